"""What every rank raises where repeats do not help."""

import dataclasses
from collections.abc import Sequence

from stretto.errors import CorruptionError, TransferCorrupt
from stretto.exchange.missing import Missing


def given_up(
    rank: int, site: str, missing: Sequence[Missing], repeats: int, numbers: Sequence[int]
) -> CorruptionError:
    """Return the error: it names ranks whose sums come out wrong, or else senders and receivers.

    Args:
        rank: This one.
        site: Of the damage.
        missing: What ranks miss.
        repeats: How often it was sent again.
        numbers: The job's numbers of the ranks.
    """
    missing = [
        dataclasses.replace(one, receiver=numbers[one.receiver], sender=numbers[one.sender])
        for one in missing
    ]
    where, what = f"rank {numbers[rank]}: ", "; ".join(map(str, missing))
    if wrong := sorted({lost.receiver for lost in missing if lost.is_sum}):
        return CorruptionError(
            f"{where}sums came out wrong or differently after {repeats} repeats: expected the same bits from the "
            f"same contributions, in {what}; take the device of ranks {wrong} out of the job",
            ranks=wrong,
        )
    return TransferCorrupt(
        f"{where}{site} still damaged after {repeats} repeats: expected what the sender had sealed, found "
        f"something else in {what}; take that rank or that link out of the job",
        links=sorted({(lost.sender, lost.receiver) for lost in missing}),
    )
