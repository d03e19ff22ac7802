"""`digest`: one 64-bit number that changes when any byte, its place or the length does."""

import xxhash
from torch import Tensor

from stretto.digests.locate import locate
from stretto.digests.words import bytes_of


def digest(tensor: Tensor, seed: int = 0) -> int:
    """Return xxh3 of a tensor's bytes; of its `locate` sums where the bytes are not in the host's memory.

    Two different contents have one digest with a chance of about 2⁻⁶⁴; on a device the measured miss classes of
    `locate` come on top (docs/guards.md). Values of one device type are comparable with each other only.

    Args:
        tensor: Of any dtype, shape and strides; read in the order of its elements.
        seed: What the values are, as a number: equal bytes under different seeds have different digests, so that
            a stale or misplaced value cannot pass for the right one.
    """
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(bytes_of(tensor).numpy().data, seed=seed)
    sums = locate(tensor)
    return xxhash.xxh3_64_intdigest(sums.to_bytes(), seed=seed)


def hexadecimal(value: int) -> str:
    """Return a digest as records show it."""
    return f"{value:016x}"
