"""Parameters that no rank uses: most often a mistake in the model."""

from collections.abc import Sequence

from stretto.engine.job import Reduction
from stretto.errors import UnusedParameters
from stretto.flat import Layout


def check_used(reductions: Sequence[Reduction], layout: Layout, where: str) -> None:
    """Look at one update's rounds.

    Raises:
        UnusedParameters: A parameter received no gradient on any rank.
    """
    used = [any(flags) for flags in zip(*(r.call.used for r in reductions), strict=True)]
    unused = [slot.name for slot in layout.slots if not used[slot.index]]
    if unused:
        raise UnusedParameters(
            f"{where}: {len(unused)} parameters received no gradient on any rank, among them {unused[:3]}: "
            "freeze them, or accept that they are skipped as PyTorch skips them with Options(allow_unused=True)"
        )
