"""The user's model at rest: it shows committed values for a while, and what it showed before comes back."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stretto.engine import misuse
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.model import Held, UserModel
from stretto.errors import OutOfTurn
from stretto.flat import original_name

_log = logging.getLogger("stretto")


class SettlingModel(UserModel):
    """A model that can show its committed values in the middle of training; arguments are those of `UserModel`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._keys = {original_name(key): key for key in self.model.state_dict()}
        self._settled_until_training = False
        self._committed: Sequence[Tensor] | None = None
        """What `settle` has shown instead of something else."""
        self._is_warned = False

    def drop_copies(self) -> None:
        """Drop what was made of the values for passes: casts that autocast keeps. Somebody has mended values."""
        torch.clear_autocast_cache()

    def hook_gradient(self, index: int, node: Any, before: Callable[..., Any]) -> Any:
        """Have `before` called with every gradient of a parameter, alone in a tuple, before it is added.

        Args:
            index: Of the parameter.
            node: Autograd's, which adds it.
            before: May return another gradient in the same form.

        Returns:
            A handle that removes the hook.
        """
        return node.register_prehook(before)

    def settle(self, values: Sequence[Tensor] | None, statistics: Sequence[Buffer]) -> None:
        """Show committed values, and keep what was shown.

        Args:
            values: One per parameter; None if the model shows the committed ones already.
            statistics: The buffers that belong to them.
        """
        self._committed = None if values is None else list(values)
        self.held_back = self._swap(Held("committed", self._committed, list(statistics), []))

    def changed(self) -> str | None:
        """Return the name of a parameter in which somebody has written over what `settle` has shown; None without."""
        if self._committed is None:
            return None
        # Versions would not tell: a save inside the block shows other values for a while, and counts as a write.
        for name, parameter, value in zip(self.names, self.parameters, self._committed, strict=True):
            if not torch.equal(parameter.detach(), value.to(parameter.dtype).view(parameter.shape)):
                return name
        return None

    @property
    def trained_buffers(self) -> list[Buffer]:
        """Copies of the buffers with which training continues, also while others are shown."""
        shown = self.statistics.copies
        if self.held_back is None:
            return shown
        pairs = zip(self._with_writes(self.held_back).statistics, shown, strict=True)
        return [now if before is None else before for before, now in pairs]

    def show_again(self) -> bool:
        """Restore what was shown before `settle`; return whether these are parameters that were never replaced.

        Buffers that somebody has written since stay as they are.
        """
        before, self.held_back, self._committed = self.held_back, None, None
        if before is not None:
            self._swap(self._with_writes(before))
        return before is not None and before.parameters is None

    def accept_writes(self, differing: Callable[[], str | None], where: object) -> None:
        """Accept writes to parameters that were shown all along and hold again what they held.

        Args:
            differing: Returns the name of a parameter that does not, or None.
            where: Rank and step, for messages.

        Raises:
            ParametersTouched: One does not.
        """
        if self.is_unwritten:
            return
        if (name := differing()) is not None:
            raise misuse.written_at_rest(name, where)
        self.remember()

    def evaluated(self, where: object) -> None:
        """Warn, once, if a forward pass of an evaluation meets an estimate."""
        if self.shown == "estimate" and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%s: a forward pass in eval() while the model shows an estimate: evaluate the committed "
                "parameters with parallel.evaluate(function) on all ranks, or inside `with "
                "parallel.settled():`",
                where,
            )

    def until_training(self) -> None:
        """Let the next micro-batch restore what was shown before `settle`."""
        self._settled_until_training = True

    def train_on(self, where: object) -> None:
        """Restore what was shown before `settle`, if the model was settled only until now.

        Raises:
            OutOfTurn: It is settled for a block that has not ended.
        """
        if not self._settled_until_training:
            raise OutOfTurn(f"{where}: training inside settled(): end its block first")
        self._settled_until_training = False
        self.show_again()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Restore, for the block, what was shown before `settle`; do nothing if the model is not settled."""
        if self.held_back is None:
            yield
            return
        # A save inside the block settles once more, and forgets what that has shown.
        values, committed = self._committed, self._swap(self._with_writes(self.held_back))
        self.held_back = None
        try:
            yield
        finally:
            self.held_back, self._committed = self._swap(committed), values

    def begin_again(self) -> None:
        """Declare the model's present values, equal on all ranks, to be committed and agreed on."""
        self.remember()
        for listener in self.listeners:
            listener.installed([parameter.detach() for parameter in self.parameters])
        self.statistics.agree()
        self.shown, self.lacks_values = "committed", False
        self.held_back = None
        self._settled_until_training = False

    def _swap(self, held: Held) -> Held:
        """Show the values in `held`, and return what was shown."""
        shown, parameters = self.shown, None
        if held.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self.parameters]
            self.show(held.parameters, held.shown)
        self.shown = held.shown
        return Held(shown, parameters, self.statistics.exchange_live(held.statistics), held.statistics)

    def _with_writes(self, held: Held) -> Held:
        """Return what is to be shown again, without the buffers that somebody has written while others were shown."""
        written = changes_of(held.instead, self.statistics.live)
        pairs = zip(held.statistics, written, strict=True)
        return dataclasses.replace(held, statistics=[None if flag else value for value, flag in pairs])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `model.state_dict()` returned before `torch.compile` wrapped any part of the model."""
        self.model.load_state_dict({self._keys.get(name, name): value for name, value in state.items()})
