"""Steps that are computed on copies first, for guards: digests tell whether the real step comes to the same."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from torch import Tensor

from stretto.checksums import Digest, digests, on_host
from stretto.optimizer.settings import Hyperparameters
from stretto.optimizer.sharded import ReducedGradient, ShardedOptimizer, inside

MASTER = ""
"""Name of a segment's master among the digests of its state."""


class RehearsingOptimizer(ShardedOptimizer):
    """Computes every step first on copies, so that the result can be compared with that of the real step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rehearsed: list[dict[str, int]] = []
        """Digests of the rehearsal of the last step, by segment; empty before the first one."""

    def step(self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float) -> None:
        """Rehearse the step, then perform it."""
        self.rehearsed = self.rehearse(gradient, hyperparameters, clip)
        super().step(gradient, hyperparameters, clip)

    def forget_rehearsal(self) -> None:
        """Compare the last step with nothing: its result came from elsewhere."""
        self.rehearsed = []

    def rehearse(
        self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float
    ) -> list[dict[str, int]]:
        """Return, by segment, digests of what `step` would leave in the master and in each tensor of its state.

        Like a preview it leaves no trace. With deterministic arithmetic, these are the correct digests.
        """
        self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        keys, found = [], []
        for index, segments in groupby(self.segments, key=attrgetter("block")):
            block = self.owned.blocks[index]
            copy = inside(self.masters, block).clone()
            ghosts = [
                _by_key(ghost, state or self.optimizer.state.get(segment.master, {}))
                for segment, ghost, state in self._step_ghosts(copy, block, segments, gradient, clip)
            ]
            keys += list(map(list, ghosts))  # not the ghosts: memory for one block has to do
            found += digests([tensor for tensors in ghosts for tensor in tensors.values()])
        return _read(keys, found)


def digests_of(sharded: ShardedOptimizer) -> list[dict[str, int]]:
    """Return, by segment, digests of the present master and of each tensor of its state."""
    held = [_by_key(one.master, sharded.optimizer.state.get(one.master, {})) for one in sharded.segments]
    return _read(held, digests([tensor for tensors in held for tensor in tensors.values()]))


def _by_key(master: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a segment's tensors."""
    return {MASTER: master, **{key: value for key, value in state.items() if isinstance(value, Tensor)}}


def _read(keys: Sequence[Iterable[str]], found: Sequence[Digest]) -> list[dict[str, int]]:
    """Return digests as numbers, by segment and key."""
    numbers = iter(on_host(found))
    return [{key: next(numbers) for key in of_segment} for of_segment in keys]
