"""ACCO: accumulate while you communicate."""

import dataclasses

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.strategies.contract import Gather, Preview, Reduce, Script, Step, Strategy


@dataclasses.dataclass(frozen=True, slots=True)
class ACCO(Strategy):
    """Half of a batch estimates the next parameters; both halves commit them.

        θ̃_{t+1} = peek(θ_t,  Σ g(θ̃_t; A) / w_A)                              (1), shown while B is sent
        θ_{t+1} = Opt(θ_t, [Σ g(θ̃_t; A) + Σ g(θ_t; B)] / (w_A + w_B))        (2)

    There is no estimate at the start, so the first A is computed at θ_0.

    Staleness: none for B; A is computed at an estimate of the parameters to which it is applied.
    Traffic per update: twice ZeRO-1's, hidden.
    Memory: as DPU, and one more reduced gradient, cut by the number of ranks.
    Equals synchronous when: approximately always; the loss is within noise.
    Source: Nabli et al., "ACCO: Accumulate While You Communicate for Communication-Overlapped Sharded LLM Training",
    equations (1) and (2).
    """

    first: int | None = None
    """Micro-batches of a rank in the estimate's half A, at least 1; None splits evenly, with the larger half last,
    because the computation of B must hide the exchange of A."""

    name = "acco"
    overlaps = True
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def fixes_split(self) -> bool:
        """See `Strategy.fixes_split`."""
        return self.first is not None

    def update(self) -> Script:
        """Two rounds: estimate with A, commit with A and B."""
        at_estimate = yield Reduce()
        yield Preview(at_estimate)
        yield Gather()
        at_committed = yield Reduce()
        yield Step(at_estimate + at_committed)
        yield Gather()

    def quotas(self, micro_batches: int, rounds: int) -> tuple[int, ...]:
        """Split by `first` where it is given; see `Strategy.quotas`.

        Raises:
            ConfigError: `first` leaves no micro-batch for one of the halves.
        """
        if self.first is None:
            return Strategy.quotas(self, micro_batches, rounds)
        if not 1 <= self.first < micro_batches:
            raise ConfigError(
                f"ACCO(first={self.first}) with {micro_batches} micro-batches per update: "
                f"first must be at least 1 and leave at least one for the second half"
            )
        return self.first, micro_batches - self.first
