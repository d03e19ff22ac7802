"""`EchoDataset`: repeats samples instead of batches, inside a loader's workers.

    read, decode  ->  echo, shuffle  ->  augment  ->  batch

The echo comes after decoding and before augmentation: every use of a sample has its own augmentation, and falls into
another batch. Samples are dealt to ranks and workers before the echo. If they were dealt after it, the uses of a
sample would be spread over several ranks, and each of them would have to read it.
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
    """Index of the sample in the dataset."""
    use_index: int
    """1 for the first use."""
    is_last: bool
    """Whether the sample is not needed after it."""


class EchoDataset(IterableDataset[Any], Generic[Sample]):
    """An iterable dataset that gives every sample of a map-style dataset `uses` times per epoch.

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
            dataset: Its `__getitem__` reads and decodes; it is called once per sample and epoch.
            uses: Uses of every sample per epoch, at least 1. A fraction is spread over the samples.
            transform: Called at every use: the part of the augmentation that is random and cheap. It must not write
                into its argument.
            shuffle: Number of decoded samples that each worker holds and draws from, which is also the cost in
                memory. The uses of a sample are spread over about as many places.
            seed: Seed of the order.
            rank: This rank. Samples are dealt to ranks, then to workers, and then echoed.
            world_size: Number of ranks.

        Raises:
            ConfigError: A number is out of its range.
        """
        if not 1 <= uses < float("inf") or shuffle < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                "EchoDataset: expected uses >= 1, shuffle >= 1 and 0 <= rank < world_size, found "
                f"uses={uses}, shuffle={shuffle}, rank={rank} and world_size={world_size}"
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
        """Set the epoch of the next iterator; every epoch has its own order."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of samples that this rank gives in an epoch, all uses and workers together."""
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
        """Yield the uses of one worker in their order, which seed, epoch, rank and worker determine; reads nothing."""
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.dataset))
        # Held samples: index, uses so far, uses in all. One is drawn and used; after its last use another replaces it.
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
        """Return the places in the epoch's order that belong to this worker."""
        return range(self.rank + self.world_size * worker, len(self.dataset), self.world_size * num_workers)

    def _num_uses(self, place: int) -> int:
        """Return the uses of the sample at `place`: the floor or the ceiling of `uses`, and `uses` on average."""
        numerator, denominator = self.uses.as_integer_ratio()
        turn = place // self.world_size
        return (turn + 1) * numerator // denominator - turn * numerator // denominator
