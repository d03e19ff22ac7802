"""What the user's model shows: committed parameters or an estimate, with the buffers that belong to them."""

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
    """One per parameter; None to leave the parameters as they are."""
    statistics: list[Tensor]


class ShownModel:
    """Puts values into the model, and remembers what it showed before it was settled.

    Args:
        user: Holds the model.
    """

    def __init__(self, user: UserModel) -> None:
        self.listener = Listener()
        """Receives the installed values and the other events of the compute lane."""
        self.statistics = Statistics(user.model)
        self.shown: Shown = "committed"
        self._user = user
        self._before: Held | None = None
        """Inside `settled`, what the model showed before; otherwise None."""
        self._stays_settled = True
        """Whether the next micro-batch finds the model settled, which is an error."""

    @property
    def is_settled(self) -> bool:
        """Whether the model shows the committed parameters for the duration of `settled`."""
        return self._before is not None

    def show(self, values: Sequence[Tensor], shown: Shown) -> None:
        """Copy `values`, one per parameter, into the model."""
        self._user.install(values)
        self.listener.installed(values)
        self.shown = shown

    def settle(self, values: Sequence[Tensor] | None, statistics: Sequence[Tensor]) -> None:
        """Show committed values, and keep what was shown.

        Args:
            values: One per parameter; None if the model shows the committed ones already.
            statistics: The buffers that belong to them.
        """
        self._before = self._swap(
            Held("committed", None if values is None else list(values), list(statistics))
        )

    def show_again(self) -> None:
        """Restore what was shown before `settle`."""
        if self._before is not None:
            self._swap(self._before)
            self._before = None

    def until_training(self) -> None:
        """Let the next micro-batch restore what was shown before `settle`."""
        self._stays_settled = False

    def train_on(self) -> None:
        """Restore what was shown before `settle`, if it was settled only until now."""
        if not self._stays_settled:
            self._stays_settled = True
            self.show_again()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Restore, for the block, what was shown before `settle`; do nothing if the model is not settled."""
        if self._before is None:
            yield
            return
        committed, self._before = self._swap(self._before), None
        try:
            yield
        finally:
            self._before = self._swap(committed)

    def begin_again(self) -> None:
        """Declare the model's present values, equal on all ranks, to be committed and agreed on."""
        self._user.remember()
        self.listener.installed([parameter.detach() for parameter in self._user.parameters])
        self.statistics.agree()
        self.shown = "committed"
        self._before = None

    def _swap(self, held: Held) -> Held:
        """Show the values in `held`, and return what was shown."""
        shown, parameters = self.shown, None
        if held.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self._user.parameters]
            self.show(held.parameters, held.shown)
        self.shown = held.shown
        return Held(shown, parameters, self.statistics.exchange_live(held.statistics))
