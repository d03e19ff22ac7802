"""Bytes that one rank sends in a collective, by the algorithm that Gloo runs.

N is the world size. Only payload counts, no headers; a division rounds down.
"""


def all_reduce(size: int, world_size: int) -> int:
    """Ring over a vector of `size` bytes: reduce-scatter, then all-gather, 2 (N-1)/N of it."""
    return 2 * (world_size - 1) * size // world_size


def reduce_scatter(size: int, world_size: int) -> int:
    """Of `size` input bytes. Gloo all-reduces the whole input and keeps one part: 2 (N-1)/N of it."""
    return all_reduce(size, world_size)


def all_gather(own: int, world_size: int) -> int:
    """Ring: `own` bytes of every other rank but the next are passed on, N-1 times `own` in all."""
    return (world_size - 1) * own


def all_to_all(parts: list[int], rank: int) -> int:
    """`parts[r]` bytes to every rank r but oneself."""
    return sum(parts) - parts[rank]


def broadcast(size: int, rank: int, root: int, world_size: int) -> int:
    """Binomial tree: in round i the ranks at a distance below 2^i from the root send `size` bytes 2^i further."""
    distance = (rank - root) % world_size
    rounds = range((world_size - 1).bit_length())
    return size * sum(distance < 1 << i and distance + (1 << i) < world_size for i in rounds)


def reduce(size: int, rank: int, root: int, world_size: int) -> int:
    """Ring reduce-scatter, (N-1)/N of `size`, after which everybody hands a 1/N to the root."""
    return (world_size - 1) * size // world_size + (0 if rank == root else size // world_size)


def gather(own: int, rank: int, root: int) -> int:
    """`own` bytes to the root."""
    return 0 if rank == root else own


def scatter(part: int, rank: int, root: int, world_size: int) -> int:
    """`part` bytes from the root to every other rank."""
    return (world_size - 1) * part if rank == root else 0
