"""The formulas of an estimate, on plain numbers: bytes and seconds of a job's exchange, the part that waits, and
memory.

The calculator of the site runs these functions too: `website/calculator.py` writes them again in JavaScript. So each is
one expression of sums, products, quotients, `max`, `min`, `ceil` and `floor`.
"""

from math import ceil, floor


def sent_bytes(parameters: float, ranks: float, bytes_each: float) -> float:
    """Return the bytes that each rank sends per update, of `bytes_each` for a parameter that all send."""
    return parameters * (ranks - 1) / ranks * bytes_each


def busy_seconds(sent: float, bits_per_second: float) -> float:
    """Return for how long a link is busy with so many bytes."""
    return 8 * sent / bits_per_second


def last_share(parameters: float, bucket_bytes: float, sent: float, least_sent: float) -> float:
    """Return which part of the gradients the last bucket is.

    Args:
        parameters: With fp32 gradients.
        bucket_bytes: Of a bucket of these, in a job of few ranks.
        sent: Bytes of all gradients on the wire.
        least_sent: Of one bucket there, in a job of many ranks: it has a part for each of them.
    """
    return 1 / max(1, min(ceil(4 * parameters / bucket_bytes), floor(sent / least_sent)))


def waiting_seconds(computing: float, busy: float, share: float, hidden: float, last: float) -> float:
    """Return for how long an update waits for a part of its communication.

    Args:
        computing: Seconds of an update's computing.
        busy: Seconds for which the update keeps the link busy.
        share: Of these seconds, for this part.
        hidden: Share of the computing during which it is sent.
        last: Share of the part that is sent only after that computing.
    """
    return max(share * busy - hidden * (1 - last) * computing, share * busy * last)


def held_bytes(parameters: float, ranks: float, whole: float, shared: float) -> float:
    """Return the bytes that each rank holds, of `whole` and a part of `shared` for each parameter."""
    return parameters * (whole + shared / ranks)
