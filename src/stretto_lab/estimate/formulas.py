"""The formulas of an estimate, on plain numbers: bytes and seconds of a job's exchange, its waiting, memory.

The site's calculator runs the same functions: `website/calculator.py` translates them to JavaScript. So each is one
expression of sums, products, quotients, `max`, `min`, `ceil` and `floor`.
"""

from math import ceil, floor


def sent_bytes(parameters: float, ranks: float, bytes_each: float) -> float:
    """Return the bytes that each rank sends per update, at `bytes_each` per parameter."""
    return parameters * (ranks - 1) / ranks * bytes_each


def busy_seconds(sent: float, bits_per_second: float) -> float:
    """Return how long a link is busy with so many bytes."""
    return 8 * sent / bits_per_second


def last_share(parameters: float, bucket_bytes: float, sent: float, least_sent: float) -> float:
    """Return the share of the gradients that is in the last bucket.

    Args:
        parameters: Number of parameters; their gradients are fp32.
        bucket_bytes: Size of a bucket of gradients in a job of few ranks.
        sent: Bytes of all gradients on the wire.
        least_sent: Smallest bucket on the wire in a job of many ranks, where a bucket has a slice for each rank.
    """
    return 1 / max(1, min(ceil(4 * parameters / bucket_bytes), floor(sent / least_sent)))


def waiting_seconds(computing: float, busy: float, share: float, hidden: float, last: float) -> float:
    """Return how long an update waits for a part of its communication.

    Args:
        computing: Seconds of computing in an update.
        busy: Seconds for which an update keeps the link busy.
        share: Share of these seconds that this part takes.
        hidden: Share of the computing during which this part is sent.
        last: Share of this part that is sent only after that computing.
    """
    return max(share * busy - hidden * (1 - last) * computing, share * busy * last)


def of_rank(parameters: float, ranks: float, whole: float, shared: float) -> float:
    """Return a rank's bytes or seconds: `whole` for each parameter, and an equal share of `shared` for each."""
    return parameters * (whole + shared / ranks)
