"""Documents packed one after the other into blocks of tokens.

Packing needs the lengths of documents, which only the tokenizer knows. So the global order is an order of *parcels*,
consecutive runs of documents. A worker tokenises a parcel as a whole and cuts it into blocks; the last block is filled
with end tokens, which add no loss. So a rank can resume in the middle of a parcel without the documents before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stretto import errors
from stretto_lab.recipes.batches import MicroBatches
from stretto_lab.recipes.text import Tokens, Window, Windows

PARCELS, PARCEL = 64, 64
"""A parcel has at most `PARCEL` documents, and fewer if an epoch would have less than `PARCELS` parcels."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Documents by index; consecutive documents form a stream of tokens."""

    rows: Any
    """A data set of `datasets`."""
    column: str
    """Name of the column with the text; a missing text counts as empty."""
    tokens: Tokens
    """The tokenizer."""

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> Tensor:
        """Return the tokens of the documents `indices`, with an end token after each."""
        texts = self.rows[indices.tolist()][self.column]
        return self.tokens.stream([(text or "").encode() for text in texts])


class Packed:
    """One rank's micro-batches of packed blocks, without end; a saved state continues at any of them.

    Of `W` ranks, rank `r` takes the parcels `r, r + W, ...` of the global order. An update has the same blocks at every
    world size only if all parcels have equally many blocks.

    Args:
        documents: The data.
        length: Tokens of a block.
        size: Blocks per micro-batch.
        rank: This rank.
        world_size: Number of ranks.
        seed: Decides the order of the documents.
        workers: Processes that read and tokenise ahead.

    Raises:
        ConfigError: As `MicroBatches`.
    """

    def __init__(
        self,
        documents: Streams,
        *,
        length: int,
        size: int,
        rank: int,
        world_size: int,
        seed: int,
        workers: int = 0,
    ) -> None:
        parcel = min(PARCEL, max(1, len(documents) // PARCELS))
        self._parcels = MicroBatches(
            documents, parcel, rank=rank, world_size=world_size, seed=seed, workers=workers
        )
        self._end = documents.tokens.end
        self.length = length
        self.size = size
        self._before = self._parcels.state_dict()
        """State before the parcel that is being cut."""
        self._begun: dict[int, int] = {}
        """By place: number of blocks already returned from this parcel, and from parcels that ranks of another world
        size had started."""

    def __iter__(self) -> Iterator[Window]:
        self._parcels.load_state_dict(self._before)
        before, parcel = self._before, self._parcels.position
        over: list[int] = []  # parcels whose last blocks are in a micro-batch to come
        taken: list[Window] = []
        missing = self.size
        for stream in self._parcels:
            windows = blocks_of(stream, self.length, self._end)
            place = self._begun.get(parcel, 0)
            while place < len(windows):
                count = min(missing, len(windows) - place)
                taken.append(windows.batch(torch.arange(place, place + count)))
                place, missing = place + count, missing - count
                if not missing:
                    is_cut = place == len(windows)
                    self._before = self._parcels.state_dict() if is_cut else before
                    self._begun[parcel] = place
                    for one in [*over, *([parcel] if is_cut else [])]:
                        self._begun.pop(one, None)
                    over.clear()
                    yield joined(taken)
                    taken, missing = [], self.size
            over.append(parcel)
            before, parcel = self._parcels.state_dict(), self._parcels.position

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the current parcel, and the number of blocks returned since then."""
        return {**self._before, "length": self.length, "begun": [list(one) for one in self._begun.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved loader of this rank stopped.

        Raises:
            ConfigError: The state belongs to another order, rank, world size or length of blocks.
        """
        if state.get("length") != self.length:
            raise errors.ConfigError(
                f"the saved data order does not continue here: saved with blocks of {state.get('length')} tokens, now "
                f"{self.length}; use the same length"
            )
        self._parcels.load_state_dict(state)
        self._before = self._parcels.state_dict()
        self._begun = {int(parcel): int(given) for parcel, given in state["begun"]}


def blocks_of(stream: Tensor, length: int, end: int) -> Windows:
    """Return a stream cut into blocks; the last block is filled with end tokens, which add no loss."""
    filled = max(length + 1, len(stream) + (1 - len(stream)) % length)
    return Windows(functional.pad(stream, (0, filled - len(stream)), value=end), length, end)


def joined(windows: list[Window]) -> Window:
    return Window(
        torch.cat([one.inputs for one in windows]),
        torch.cat([one.targets for one in windows]),
        sum(one.predicted for one in windows),
    )
