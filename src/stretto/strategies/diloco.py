"""DiLoCo: ranks step alone, and an outer optimizer steps with their changes, one fragment after the other."""

import dataclasses

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.strategies.contract import (
    Land,
    Launch,
    Local,
    Look,
    OuterStep,
    Script,
    Step,
    Strategy,
    WorkerKind,
)

MOST_FRAGMENTS = 1000
"""Most fragments, since each has its own collectives and buckets, which a job makes before it starts."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiLoCo(Strategy):
    """Every rank steps its own replica; every `interval` updates each fragment takes an outer step.

    With the anchor a, which is the same on all ranks, its velocity u, and fragment p of every tensor:

        θ_r ← Opt_r(θ_r, g(θ_r; B_r) / w_r)                      every update, on every rank alone
        d   = Σ_q ω_q (θ_q - a) / Σ_q ω_q                        p is sent: the ranks' changes
        u   ← μ u + d,   a ← a + η (d + μ u)                     the outer step; without `nesterov` a ← a + η u
        θ_r ← α θ_r + (1 - α) a                                  p arrives, `delay` updates later
        θ_r ← α θ_r + (1 - α) (a + θ_r - θ_r')                   the same with `keep_progress`; θ_r' was sent

    `ω_q` is the weight that rank q has contributed since p was last sent. The fragments are sent one after another,
    evenly spread over the interval. -d is the outer gradient of the papers. With `worker="node"` gradient and weight
    in the first line are sums over all ranks of r's node, so that they hold the same θ_r.

    With one fragment, `outer_lr` 1 and no momentum, delay or mix this is `LocalSGD(rate=1 / interval)`. Without
    `nesterov` and delay it is SlowMo (Wang et al., "SlowMo", 1910.00643) with α = `outer_lr` and β = `outer_momentum`,
    while the inner rate stays: there u is divided by that rate, here not. With a mix, without momentum and delay, it is
    elastic averaging (Zhang et al., 1412.6651) in rounds, whose pull 1 - α is to the centre after it has moved.

    Staleness: 0; replicas drift apart. Changes made while a fragment is in flight are discarded except for a share α
    (`mix`), unless progress is kept.
    Traffic per update: one all-reduce of the parameters over the interval, a fragment at a time, during the next
    updates if there is a delay. With `worker="node"` also one all-reduce of the gradients inside the node.
    Memory: masters, state and anchor whole on every rank; the velocity is divided among them. A fragment in flight
    takes its size once more, with `keep_progress` twice.
    Equals synchronous when: the interval is 1, `outer_lr` 1, without momentum, delay and mix, and the optimizer is SGD.
    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2311.08105);
    Douillard et al., "Streaming DiLoCo with overlapping communication" (2501.18512). Progress is kept as in Shen et
    al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient Descent".
    """

    interval: int = 10
    """Updates between two outer steps of a fragment. The papers use 30 to 500 for large models."""
    fragments: int = 1
    """Parts of the parameters that are sent one after the other: the total traffic is the same, but each transfer is
    shorter, so the delay can be shorter too."""
    outer_lr: float = 0.7
    """Learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Momentum of the outer step, from 0 to below 1; about 0.6 suits short runs."""
    nesterov: bool = True
    """Look ahead along the new velocity, as the papers do; off gives the heavy ball of SlowMo."""
    delay: int = 0
    """Updates between a fragment's start and its arrival, which hide its transfer; 0 waits for it. One fragment is
    in flight at a time, so the delay is below interval / fragments. Long delays cost loss; use more fragments
    instead."""
    mix: float = 0.0
    """Share of a rank's own values that is kept when a fragment arrives, from 0 to below 1. Streaming DiLoCo uses
    0.5 with a delay; without a delay, replicas are pulled towards the anchor and stay different."""
    keep_progress: bool = False
    """Add a rank's changes since the fragment was sent to the arriving anchor; only with a delay. With `outer_lr=1,
    outer_momentum=0` this is an average that hides; a delay above about half of the interval costs much loss."""
    worker: WorkerKind = "rank"
    """The worker that steps a replica: a rank alone, or the ranks of a node together, which then train
    synchronously. "node" needs `Options(ranks_per_node=...)`."""

    name = "diloco"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.interval < 1:
            raise ConfigError(f"DiLoCo(interval={self.interval}): expected at least 1 update")
        check_transfer(self, "interval")
        if not 0 < self.outer_lr < float("inf"):
            raise ConfigError(f"DiLoCo(outer_lr={self.outer_lr}): expected a positive, finite number")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"DiLoCo(outer_momentum={self.outer_momentum}): expected from 0 to below 1")
        if not 0 <= self.mix < 1:
            raise ConfigError(f"DiLoCo(mix={self.mix}): expected from 0 to below 1")
        if self.keep_progress and not self.delay:
            raise ConfigError(
                "DiLoCo(keep_progress=True, delay=0): without a delay no step falls between sending and "
                "arrival; expected a delay"
            )

    def update(self) -> Script:
        """One local step, with the arrival and the start of a fragment where due."""
        gradient = yield Local(self.worker)
        yield Step(gradient)
        moment = yield Look()
        if moment.in_flight_rounds is not None and (
            moment.is_finishing or moment.in_flight_rounds >= self.delay
        ):
            yield Land(self.mix, self.delay)
        position = moment.round_index % self.interval + 1
        fragment = -(-position * self.fragments // self.interval) - 1  # the first that leaves here or later
        is_due = (fragment + 1) * self.interval // self.fragments == position
        if is_due or moment.is_finishing:
            step = OuterStep(self.outer_lr, self.outer_momentum, self.nesterov)
            has_left = yield Launch(step, fragment, self.fragments, self.keep_progress)
            # A rank without data has nothing to compute meanwhile.
            if has_left and (moment.is_finishing or not self.delay):
                yield Land(self.mix, self.delay)


def check_transfer(record: Strategy, interval: str) -> None:
    """Raise unless a strategy's `fragments` and `delay` fit its interval, whose field is named `interval`.

    Raises:
        ConfigError: A fragment would have no update in which to be sent, or would not arrive before the next one
            starts.
    """
    kind = type(record).__name__
    every, fragments, delay = (getattr(record, name) for name in (interval, "fragments", "delay"))
    if not 1 <= fragments <= min(every, MOST_FRAGMENTS):
        raise ConfigError(
            f"{kind}(fragments={fragments}, {interval}={every}): expected at least 1 fragment, and at most one per "
            f"update of the interval and {MOST_FRAGMENTS} in all"
        )
    if not 0 <= delay < every // fragments:
        raise ConfigError(
            f"{kind}(delay={delay}, {interval}={every}, fragments={fragments}): expected from 0 to "
            f"{every // fragments - 1}, because a fragment must arrive before the next fragment is sent; "
            f"raise {interval} or lower fragments"
        )
