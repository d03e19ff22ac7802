"""One pass over a loader: where it stands, and what may be asked of a loader of any kind.

Note [A pass in a checkpoint]
    A loader's state says where its iterator stands, and that may be at the end although the loop has not left the
    pass: in the last batch, in an update that lands after it, or while other ranks have more data. A checkpoint with a
    loader says where the pass is, too, and the first one after `load` is the rest of it, which may be empty. After
    the loop of a pass that was left early, because another rank had no more data or the updates were done, the rest is
    nobody's: the first one after `load` begins anew, as it does in the run that saved.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map

from stretto.echo.buffer import copied
from stretto.echo.loader import EchoLoader
from stretto.echo.state import left, state_of

Until = Literal["any", "all"]
NOTHING = object()
"""What an exhausted loader gives."""


@dataclasses.dataclass(slots=True)
class Pass:
    """One pass of this rank over a loader."""

    loader: Iterable[Any]
    batches: Iterator[Any]
    length: int | None
    """How many batches the loader says that it has."""
    until: Until
    position: int = 0
    """Batches handed out since its beginning."""
    num_fed: int = 0
    """Those of them that no checkpoint lies behind."""
    is_exhausted: bool = False
    """Whether the loader was asked and had nothing."""
    ahead: tuple[Any, int] | None = None
    """A batch that came where the loader was asked once more, and which use of it that is."""
    state: Any = None
    """The loader's state before that; None for a loader without one."""
    has_ended: bool = False
    """Whether all ranks have agreed on its end because of the data, and only land what is left."""


def length_of(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader says that it has; None if it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]  # whether it has one is the question
    except Exception:  # a loader may raise anything that says so
        return None


def leave(loader: Any) -> None:
    """Let the next iterator of a loader whose state was loaded in the middle of a pass begin another pass."""
    if isinstance(loader, EchoLoader):
        loader.load_state_dict(left(loader.state_dict()))
        loader = loader.loader
    iter(loader)  # one with a state begins once where it was loaded


def state_before(loader: Any) -> Any:
    """Return a copy of the loader's state, for a checkpoint that may be saved; None if it has none."""
    try:
        return state_of(loader)
    except Exception:  # whoever saves this loader's state is told
        return None


def own_tensors(batch: Any) -> Any:
    """Return a batch whose tensors and arrays have memory of their own; what else it holds is the loader's."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copied(leaf)
        return leaf.copy() if type(leaf) is np.ndarray else leaf

    return tree_map(own, batch)
