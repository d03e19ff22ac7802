"""What the user's model shows: committed parameters or an estimate, and the buffers that go with them."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from stretto.engine.listener import Listener
from stretto.engine.round import Shown
from stretto.engine.statistics import Statistics
from stretto.engine.user_model import UserModel


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the model shows, or is to show again."""

    shown: Shown
    parameters: list[Tensor] | None
    """None where they stay as they are."""
    statistics: list[Tensor]


class ShownModel:
    """Puts values into the model, and remembers what it showed before it was settled.

    Args:
        user: The user's model.
    """

    def __init__(self, user: UserModel) -> None:
        self.listener = Listener()
        """Hears what is installed, and what happens on the compute lane."""
        self.statistics = Statistics(user.model)
        self.shown: Shown = "committed"
        self._user = user
        self._before: Held | None = None
        """Inside `settled`: what the model showed before."""

    @property
    def is_settled(self) -> bool:
        """Whether the committed parameters are shown for a while."""
        return self._before is not None

    def show(self, values: Sequence[Tensor], shown: Shown) -> None:
        """Copy `values`, one per parameter, into the model."""
        self._user.install(values)
        self.listener.installed(values)
        self.shown = shown

    def settle(self, values: Sequence[Tensor] | None, statistics: Sequence[Tensor]) -> None:
        """Show committed values, and hold on to what was shown.

        Args:
            values: One per parameter; None where the committed ones are shown already.
            statistics: The buffers that go with them.
        """
        self._before = self._swap(
            Held("committed", None if values is None else list(values), list(statistics))
        )

    def show_again(self) -> None:
        """Show again what was shown before `settle`."""
        if self._before is not None:
            self._swap(self._before)
            self._before = None

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Inside `settle`, show inside the block what was shown before; elsewhere do nothing."""
        if self._before is None:
            yield
            return
        committed, self._before = self._swap(self._before), None
        try:
            yield
        finally:
            self._before = self._swap(committed)

    def begin_again(self) -> None:
        """Take what the model holds, alike on all ranks, for committed and agreed."""
        self._user.remember()
        self.listener.installed([parameter.detach() for parameter in self._user.parameters])
        self.statistics.agree()
        self.shown = "committed"

    def _swap(self, held: Held) -> Held:
        """Show what `held` holds, and return what was there."""
        shown, parameters = self.shown, None
        if held.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self._user.parameters]
            self.show(held.parameters, held.shown)
        self.shown = held.shown
        return Held(shown, parameters, self.statistics.exchange_live(held.statistics))
