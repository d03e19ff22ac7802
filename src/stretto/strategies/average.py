"""Plain averages of replicas, sent while the next updates are computed: an outer step of rate 1 without momentum."""

import dataclasses

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.strategies.contract import Script, Strategy, WorkerKind
from stretto.strategies.diloco import MOST_FRAGMENTS, DiLoCo, check_transfer


@dataclasses.dataclass(frozen=True, slots=True)
class Average(Strategy):
    """Every rank steps its own replica; every `every` updates each part of the parameters is averaged, overlapped
    with training.

        θ_r ← Opt_r(θ_r, g(θ_r; B_r) / w_r)              every update, on every rank alone
        m   = Σ_q ω_q θ_q / Σ_q ω_q                      a fragment is sent, every `every` updates
        θ_r ← m + (θ_r - θ_r')                           it arrives, `delay` updates later; θ_r' is the sent value

    `ω_q` is the weight that rank q has contributed since the fragment left the last time. It is `DiLoCo(interval=every,
    outer_lr=1, outer_momentum=0, keep_progress=True)`, to the bit, with many fragments that are sent for a short time.
    A whole average that takes as long as x updates hides if `every ≥ fragments + x`.

    Staleness: 0; replicas drift apart.
    Traffic per update: one all-reduce of the parameters over `every`, a fragment at a time, during the next updates.
    Memory: masters, state and anchor whole on every rank; a fragment on its way takes its size twice.
    Equals synchronous when: `every` is 1 and the optimizer is SGD.
    Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2501.18512), for the fragments; Shen et
    al., "Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic Gradient Descent",
    for the progress that is kept.
    """

    every: int = 4
    """Updates between two averages of a fragment. Each doubling halves the sent bytes, and costs loss."""
    fragments: int | None = None
    """Parts of the parameters that are sent one after the other. None is half of `every`, rounded down: then each is
    sent for one update, and an average that takes up to half of `every` is hidden."""
    delay: int | None = None
    """Updates between a fragment's start and its arrival; 0 waits for it. None is the longest that the fragments
    allow, every // fragments - 1."""
    worker: WorkerKind = "rank"
    """The worker that steps a replica: a rank alone, or the ranks of a node together, which then train
    synchronously. "node" needs `Options(ranks_per_node=...)`."""
    outer: DiLoCo = dataclasses.field(init=False, compare=False, repr=False)
    """The equivalent `DiLoCo`, which performs the outer steps."""

    name = "average"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 1:
            raise ConfigError(f"Average(every={self.every}): expected at least 1 update")
        fragments = min(max(1, self.every // 2), MOST_FRAGMENTS) if self.fragments is None else self.fragments
        delay = max(0, self.every // max(1, fragments) - 1) if self.delay is None else self.delay
        # The dataclass is frozen: what None stands for is known from here on, in records and in words.
        object.__setattr__(self, "fragments", fragments)
        object.__setattr__(self, "delay", delay)
        check_transfer(self, "every")
        outer = DiLoCo(
            interval=self.every,
            fragments=fragments,
            outer_lr=1.0,
            outer_momentum=0.0,
            delay=delay,
            keep_progress=delay > 0,
            worker=self.worker,
        )
        object.__setattr__(self, "outer", outer)

    def update(self) -> Script:
        """One local step, with the arrival and the start of a fragment where due."""
        return self.outer.update()
