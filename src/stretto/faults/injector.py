"""The injector of one rank: counts opportunities, damages what the plan says, and keeps a record of it."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.digests import digest, hexadecimal
from stretto.faults.patterns import alias_of, damaged, places
from stretto.faults.plan import Fault, FaultPlan, Site


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """One time that a fault struck."""

    fault: Fault
    opportunity: int
    """Of the site on that rank, from 0."""
    step: int
    """Committed updates of the job when it struck; 0 for groups that no job has been made on."""
    elements: int
    """How many were damaged."""
    span: tuple[float, float]
    """Where in the tensor the first of them begins and the last ends, as shares of its length."""
    before: str
    """Digest of the tensor, hexadecimal."""
    after: str

    @property
    def changed(self) -> bool:
        """Whether any bit is another: a zeroed padding is not."""
        return self.before != self.after


class Injector:
    """Applies one rank's share of a plan.

    Args:
        plan: Of the whole run.
        rank: This rank, by the numbers of the plan.
    """

    def __init__(self, plan: FaultPlan, rank: int) -> None:
        self._faults = plan.of_rank(rank)
        self._opportunities: Counter[Site] = Counter()
        self._held: dict[tuple[Site, int], Tensor] = {}
        self.applications: list[Application] = []
        """What has been done so far, in order."""
        self.committed: Callable[[Site], int] = lambda _: 0
        """Returns the committed updates of the job that is struck, as whoever uses the site knows of them."""

    def is_interested(self, site: Site) -> bool:
        """Return whether any fault strikes there."""
        return any(fault.site == site for fault in self._faults)

    def opportunities(self, site: Site) -> int:
        """Return how many opportunities have passed."""
        return self._opportunities[site]

    def offer(self, site: Site, tensors: Sequence[Tensor]) -> None:
        """Let the plan's faults strike at an opportunity.

        Args:
            site: What the tensors are.
            tensors: Contiguous, in the host's memory; a fault damages one of them, drawn from its seed.
        """
        opportunity = self._opportunities[site]
        self._opportunities[site] += 1
        if not self.is_interested(site):
            return
        full = [tensor for tensor in tensors if tensor.numel()]
        healthy = [alias_of(tensor).clone() for tensor in full if self._keeps_stale(site)]
        for fault in self._faults:
            if full and fault.site == site and fault.is_on(opportunity):
                self._strike(fault, opportunity, full)
        for index, values in enumerate(healthy):
            self._held[site, index] = values

    def _strike(self, fault: Fault, opportunity: int, tensors: Sequence[Tensor]) -> None:
        generator = torch.Generator().manual_seed(fault.seed * 1_000_003 + opportunity)
        # Larger tensors are hit more often, as memory is.
        sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float64)
        index = int(torch.multinomial(sizes, 1, generator=generator))
        tensor = tensors[index]
        values = alias_of(tensor)
        chosen = places(values, fault, generator)
        held = self._held.get((fault.site, index))
        is_alike = held is not None and held.shape == values.shape and held.dtype == values.dtype
        stale = held[chosen] if held is not None and is_alike else torch.zeros_like(values[chosen])
        before = digest(tensor)
        values[chosen] = damaged(values[chosen], fault, stale, generator)
        self.applications.append(
            Application(
                fault=fault,
                opportunity=opportunity,
                step=self.committed(fault.site),
                elements=chosen.numel(),
                span=(int(chosen.min()) / values.numel(), (int(chosen.max()) + 1) / values.numel()),
                before=hexadecimal(before),
                after=hexadecimal(digest(tensor)),
            )
        )

    def _keeps_stale(self, site: Site) -> bool:
        return any(fault.site == site and fault.pattern == "stale" for fault in self._faults)
