"""`EchoDataset`: echoes samples after decoding and before augmentation, inside a loader's workers.

    read, decode  ->  echo, shuffle  ->  augment  ->  batch

Each use of a sample gets an augmentation of its own, and the uses of a sample fall into different batches. Ranks and
workers are dealt their samples before the echo: dealt afterwards, the uses of a sample would land on different ranks,
each of which would have to read it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from stretto.errors import ConfigError
from stretto.randomness import draw

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class Use:
    """One use of one sample."""

    index: int
    """Of the sample."""
    use_index: int
    """1 for the first use."""
    is_last: bool
    """Whether the sample can be let go of."""


class EchoDataset(IterableDataset[Any], Generic[Sample]):
    """An iterable dataset over a map-style one, in which every sample appears `uses` times per epoch.

    DataLoader(EchoDataset(decoded, uses=3, transform=augment, shuffle=256), batch_size=32, num_workers=4)
    """

    def __init__(
        self,
        dataset: Sequence[Sample],
        uses: float = 2.0,
        *,
        transform: Callable[[Sample], Any] | None = None,
        shuffle: int = 256,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Wrap `dataset`.

        Args:
            dataset: Its `__getitem__` reads and decodes, and is called once per sample and epoch.
            uses: Of every sample, at least 1; fractions are spread over the samples.
            transform: Applied to every use: the random, cheap part of the augmentation. Must not write into its
                argument.
            shuffle: Decoded samples that each worker holds to draw from, and so the memory this costs: the uses of
                a sample are spread over about so many.
            seed: Of the order.
            rank: This rank; samples are dealt to ranks, then to workers, then echoed.
            world_size: How many ranks there are.

        Raises:
            ConfigError: A number is out of its range.
        """
        if not 1 <= uses < float("inf") or shuffle < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"expected uses >= 1, shuffle >= 1 and 0 <= rank < world_size, found {uses}, {shuffle}, {rank} and "
                f"{world_size}"
            )
        self.dataset = dataset
        self.uses = uses
        self.transform = transform
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch that the next iterators make."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the uses that this rank makes in an epoch, over all workers."""
        return sum(self._num_uses(position) for position in self._positions(0, 1))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        decoded: dict[int, Sample] = {}
        for use in self.order(*((0, 1) if worker is None else (worker.id, worker.num_workers))):
            if use.index not in decoded:
                decoded[use.index] = self.dataset[use.index]
            sample = decoded.pop(use.index) if use.is_last else decoded[use.index]
            yield sample if self.transform is None else self.transform(sample)

    def order(self, worker: int, num_workers: int) -> Iterator[Use]:
        """Yield what one worker will hand out: a function of seed, epoch, rank and worker; nothing is read."""
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))
        # Samples in hand with their uses so far and in all; one is drawn, used, and put back or replaced.
        held: list[tuple[int, int, int]] = []
        waiting = (
            (int(permutation[place]), 0, self._num_uses(place))
            for place in self._positions(worker, num_workers)
        )
        drawn = 0
        while True:
            while len(held) < self.shuffle and (following := next(waiting, None)) is not None:
                held.append(following)
            if not held:
                return
            stream = f"echo-dataset {self.epoch} {self.rank} {worker}"
            chosen = draw(self.seed, stream, drawn) % len(held)
            drawn += 1
            index, used, uses = held[chosen]
            held[chosen] = (index, used + 1, uses)
            if used + 1 == uses:
                held[chosen] = held[-1]
                held.pop()
            yield Use(index, used + 1, used + 1 == uses)

    def _positions(self, worker: int, num_workers: int) -> range:
        """Return the places in the epoch's order that are this worker's."""
        return range(self.rank + self.world_size * worker, len(self.dataset), self.world_size * num_workers)

    def _num_uses(self, place: int) -> int:
        """Return the uses of the sample at `place`: over all places on average `uses`, the floor or the ceiling."""
        numerator, denominator = self.uses.as_integer_ratio()
        turn = place // self.world_size
        return (turn + 1) * numerator // denominator - turn * numerator // denominator
