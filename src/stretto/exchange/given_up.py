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
            f"{where}sums are still wrong after {repeats} repeats: expected the same bits from the same "
            f"contributions, in {what}; remove the device of ranks {wrong} from the job",
            ranks=wrong,
        )
    return TransferCorrupt(
        f"{where}{site} still damaged after {repeats} repeats: expected the values that the sender had "
        f"sealed, found others in {what}; remove that rank or that link from the job",
        links=sorted({(lost.sender, lost.receiver) for lost in missing}),
    )
