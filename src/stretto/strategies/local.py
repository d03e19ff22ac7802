"""Local SGD with probabilistic averaging: ranks step alone, and average their replicas at intervals.

Whether round k ends with an average depends only on the seed and k, so ranks agree without communication:

    even         when the sum of rate(i) over i <= k reaches the next whole number: gaps as equal as integers allow
    bernoulli    when coin(seed, "average", k, rate(k)) says so: gaps are geometric
"""

import dataclasses
import math
from typing import Literal

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.randomness import coin
from stretto.schedules import Schedule, value_at
from stretto.strategies.contract import Land, Launch, Local, Look, Moment, Script, Step, Strategy, WorkerKind

Plan = Literal["even", "bernoulli"]

_WHOLE = 2**40
"""Rates are rounded up to this fraction, so that ten times a tenth is one; the error is one average in 10^12."""


class Pace:
    """Decides in which rounds ranks average.

    Args:
        rate: Averages per update; a number, or a function of the round's index. Values outside [0, 1] are cut.
        plan: How averages are spaced.
        seed: Seed of the Bernoulli plan.
    """

    def __init__(self, rate: Schedule, plan: Plan, seed: int) -> None:
        self._rate = rate
        self._plan = plan
        self._seed = seed
        # Σ_{i<index} rate(i), remembered where the last question has left it: indices mostly grow by one.
        self._index = 0
        self._sum = 0

    def is_due(self, index: int) -> bool:
        """Return whether the round at `index`, from 0, ends with an average; the answer never changes."""
        if self._plan == "bernoulli":
            return coin(self._seed, "average", index, self._rate_at(index))
        before = self._sum_below(index)
        return (before + self._units(index)) // _WHOLE > before // _WHOLE

    def _rate_at(self, index: int) -> float:
        return min(1.0, max(0.0, value_at(self._rate, index)))

    def _units(self, index: int) -> int:
        return math.ceil(self._rate_at(index) * _WHOLE)

    def _sum_below(self, index: int) -> int:
        if not callable(self._rate):
            return index * self._units(0)
        if index < self._index:
            self._index = self._sum = 0
        while self._index < index:
            self._sum += self._units(self._index)
            self._index += 1
        return self._sum


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LocalSGD(Strategy):
    """Every rank steps its own replica with its own gradients; at a given rate all ranks average their replicas.

        θ_r ← Opt_r(θ_r, g(θ_r; B_r) / w_r)
        θ_r ← Σ_q ω_q θ_q / Σ_q ω_q            where the coin of this round says so

    `ω_q` is the weight that rank q has contributed since the last average. With `worker="node"` gradient and weight
    in the first line are sums over all ranks of r's node, so that they hold the same θ_r.

    Staleness: 0; replicas drift apart while the gap between two averages.
    Traffic per update: the rate times one all-reduce of the parameters, exposed; nothing else is sent. With
    `worker="node"` one all-reduce of the gradients inside the node besides.
    Memory: one gradient buffer; masters and state whole on every rank; on the bf16 wire the last average too.
    Equals synchronous when: the rate is 1 and the optimizer is SGD.
    Source: "Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data Parallelism", Algorithm
    2, as its reviews describe it.
    """

    rate: Schedule = 0.1
    """Averages per update, from 0 to 1; or a function of the round's index, equal on all ranks."""
    plan: Plan = "even"
    """even spaces averages as evenly as integers allow; bernoulli uses the paper's coin, whose gaps have a long tail
    at the same rate."""
    max_gap: int | None = None
    """Most updates between two averages; None sets no limit."""
    state: bool = False
    """Average the optimizer's moments too, in fp32, which sends 8 more bytes per parameter, moment and average.
    Otherwise each rank keeps its own moments."""
    seed: int = 0
    """Seed of the Bernoulli coin."""
    worker: WorkerKind = "rank"
    """The worker that steps a replica: a rank alone, or the ranks of a node together, which then train
    synchronously. "node" needs `Options(ranks_per_node=...)`."""
    _pace: Pace = dataclasses.field(init=False, compare=False)

    name = "local"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.rate) and not 0 <= self.rate <= 1:
            raise ConfigError(f"LocalSGD(rate={self.rate}): expected averages per update, from 0 to 1")
        if self.rate == 0 and self.max_gap is None:
            raise ConfigError(
                "LocalSGD(rate=0): expected some averages, because ranks agree on an end only at averages; "
                "set max_gap, or a rate above 0"
            )
        if self.max_gap is not None and self.max_gap < 1:
            raise ConfigError(f"LocalSGD(max_gap={self.max_gap}): expected at least 1 update, or None")
        object.__setattr__(self, "_pace", Pace(self.rate, self.plan, self.seed))  # the dataclass is frozen

    def __repr__(self) -> str:
        """Text that ranks compare: a function is shown by name, not by address."""
        rate = getattr(self.rate, "__qualname__", repr(self.rate))
        return (
            f"LocalSGD(rate={rate}, plan={self.plan!r}, max_gap={self.max_gap}, state={self.state}, "
            f"seed={self.seed}, worker={self.worker!r})"
        )

    def update(self) -> Script:
        """One local step, with an average where due."""
        gradient = yield Local(self.worker)
        yield Step(gradient)
        if self.averages((yield Look())) and (yield Launch(state=self.state)):
            yield Land()

    def averages(self, moment: Moment) -> bool:
        """Return whether an average is due at `moment`."""
        capped = self.max_gap is not None and moment.gap >= self.max_gap
        return moment.is_finishing or capped or self._pace.is_due(moment.round_index)
