"""Local SGD with probabilistic averaging: ranks step alone, and now and then average their replicas."""

import dataclasses

from stretto.effects import Average, Local, Look, Moment, Script, Step
from stretto.errors import ConfigError
from stretto.strategies.pace import Pace, Plan, Rate
from stretto.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LocalSGD(Strategy):
    """Every rank steps its own replica with its own gradients; at a given rate all ranks average.

        θ_r ← Opt_r(θ_r, g(θ_r; B_r) / w_r)
        θ_r ← Σ_q ω_q θ_q / Σ_q ω_q            where the coin of this round says so

    `ω_q` is the weight that rank q has contributed since the last average.

    Staleness: 0; replicas drift apart for as long as the gap between two averages.
    Traffic per update: the rate times one all-reduce of the parameters, exposed; nothing else is sent.
    Memory: one gradient buffer; masters and state whole on every rank; on the bf16 wire the last average too.
    Equals synchronous when: the rate is 1 and the optimizer is SGD.
    Source: "Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data Parallelism",
    Algorithm 2.
    """

    rate: Rate = 0.1
    """Averages per update, from 0 to 1; or a function of the round's index, the same on all ranks."""
    plan: Plan = "even"
    """even spreads averages as evenly as integers allow; bernoulli throws the paper's coin, whose gaps have a long
    tail at the same rate."""
    max_gap: int | None = None
    """Updates from one average to the next at most; None leaves it to the rate."""
    state: bool = False
    """Average the optimizer's moments too, in fp32: 8 bytes per parameter, moment and average more. Otherwise each
    rank keeps its own."""
    seed: int = 0
    """Of the Bernoulli coin."""
    _pace: Pace = dataclasses.field(init=False, compare=False)

    name = "local"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        if not callable(self.rate) and not 0 <= self.rate <= 1:
            raise ConfigError(f"LocalSGD(rate={self.rate}): expected averages per update, from 0 to 1")
        if self.rate == 0 and self.max_gap is None:
            raise ConfigError(
                "LocalSGD(rate=0): expected averages now and then, because only there ranks agree on an end; set "
                "max_gap, or a rate above 0"
            )
        if self.plan not in ("even", "bernoulli"):
            raise ConfigError(f"LocalSGD(plan={self.plan!r}): expected one of even, bernoulli")
        if self.max_gap is not None and self.max_gap < 1:
            raise ConfigError(f"LocalSGD(max_gap={self.max_gap}): expected at least 1 update, or None")
        object.__setattr__(self, "_pace", Pace(self.rate, self.plan, self.seed))  # the dataclass is frozen

    def __repr__(self) -> str:
        """Compared between ranks: a function appears by name, not by address."""
        rate = getattr(self.rate, "__qualname__", repr(self.rate))
        return (
            f"LocalSGD(rate={rate}, plan={self.plan!r}, max_gap={self.max_gap}, state={self.state}, "
            f"seed={self.seed})"
        )

    def update(self) -> Script:
        """One step alone, and perhaps an average."""
        gradient = yield Local()
        yield Step(gradient)
        if self.averages((yield Look())):
            yield Average(self.state)

    def averages(self, moment: Moment) -> bool:
        """Return whether an average is due at `moment`."""
        capped = self.max_gap is not None and moment.gap >= self.max_gap
        return moment.drains or capped or self._pace.is_due(moment.round_index)
