"""Random decisions that are equal on all ranks without communication.

A decision is a function of a seed and a counter:

    coin(step) = [ hash(seed, stream, step) < 2^64 p ]

A generator would have to advance equally on all ranks and be saved in checkpoints. A hash needs only the counter, which
every rank and checkpoint has.
"""

import struct

_RANGE = 1 << 64


def draw(seed: int, stream: str, counter: int) -> int:
    """Return the `counter`-th of the stream's independent uniform integers, from 0 to 2^64 - 1.

    Args:
        seed: Seed of the run; modulo 2^64.
        stream: Name of the decision; streams are independent of each other.
        counter: Step or round index, not negative.
    """
    import xxhash  # strategies are priced where there is nothing but the library

    numbers = struct.pack("<Qq", seed % _RANGE, counter)
    return xxhash.xxh3_64_intdigest(stream.encode() + numbers)


def coin(seed: int, stream: str, counter: int, probability: float) -> bool:
    """Return True with `probability`, always the same for the same arguments, as for `draw`."""
    return draw(seed, stream, counter) < int(probability * _RANGE)
