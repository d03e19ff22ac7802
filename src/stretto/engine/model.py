"""The user's model and optimizer: the engine installs values, and no other code writes any."""

import dataclasses
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine import misuse
from stretto.engine.buffer_sync import BufferSync
from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.options import BufferChoices
from stretto.engine.round import Listener, Shown
from stretto.errors import OutOfTurn
from stretto.flat import Layout, original_name
from stretto.optimizer import Schedule, members_of

_log = logging.getLogger("stretto")
_version = operator.attrgetter("_version")
trains = operator.attrgetter("requires_grad")


@dataclasses.dataclass(frozen=True, slots=True)
class SavedView:
    """The values that the model shows, or will show again."""

    shown: Shown
    parameters: list[Tensor] | None
    """One per parameter; None to leave the parameters unchanged."""
    buffers: list[Buffer]
    replaced_by: list[Buffer]
    """The buffers that are shown instead of these."""


class UserModel:
    """A model, its trainable parameters and its optimizer.

    Parameters may change only at installs. A version counter shows every other write, except writes through `.data`.
    Identity and address show replaced and rebound parameters.

    Args:
        model: The user's model.
        parameters: The trained values, in the layout's order.
        optimizer: The user's optimizer: read, never stepped.
        layout: Names the parameters.
        choices: The treatment of each buffer.
        registered: The model's parameters with these values; None if they are `parameters`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        choices: BufferChoices,
        registered: Sequence[Tensor] | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.registered = parameters if registered is None else registered
        """The tensors to which autograd gives gradients."""
        self.optimizer = optimizer
        self._members = members_of(optimizer)
        self.names = [slot.name for slot in layout.slots]
        self.buffer_sync = BufferSync(model, choices)
        self.shown: Shown = "committed"
        self.listeners: list[Listener] = []
        """Receive the installed values and the other events of the compute lane."""
        self.lacks_values = False
        """Whether the model shows an estimate of an earlier job, and no committed values were loaded since."""
        self.saved_view: SavedView | None = None
        """In a `settled` block, the values that the model showed before; otherwise None."""
        self._ids = {id(parameter) for parameter in self.registered}
        self._groups = [member.param_groups for member in self._members]
        self._sizes = [len(one["params"]) for groups in self._groups for one in groups]
        self._memory = list(map(misuse.memory_of, parameters))
        self._keys = {original_name(key): key for key in model.state_dict()}
        self.first_buffers = {
            original_name(name): one.detach().to("meta") for name, one in model.named_buffers()
        }
        """Shapes and dtypes of the buffers when the model was wrapped, which a fresh model has when it loads."""
        self._settled_until_training = False
        self._committed: Sequence[Tensor] | None = None
        """The values that `settle` shows."""
        self._is_warned = False
        self.remember()

    # What the model shows

    def show(self, values: Sequence[Tensor], shown: Shown) -> None:
        """Install `values`, one per parameter, and notify the listeners."""
        self.shown = "estimate"  # until all of it is there: an interrupt may come in between
        self.install(values)
        for listener in self.listeners:
            listener.installed(values)
        self.shown = shown

    def install(self, values: Sequence[Tensor]) -> None:
        """Copy `values`, one per parameter, into the model."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters), list(values))
        torch.clear_autocast_cache()  # it may hold casts of the old values where autocast is on around the loop
        self.remember()

    def stepped(self, schedule: Schedule | None, times: int, where: object) -> None:
        """Mark the optimizer as stepped for schedulers, which would warn otherwise; step the job's scheduler so many
        times.
        """
        for one in (self.optimizer, *self._members):
            one._opt_called = True  # type: ignore[attr-defined]  # PyTorch's own mark
        if schedule is not None:
            schedule.turn(times, where)

    # Nobody else writes

    def remember(self) -> None:
        """Record address and version of every parameter, so that a later write is noticed."""
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._versions = list(map(_version, self.parameters))

    def drop_saved_view(self) -> None:
        """Drop the values that `settled` would restore, because an error has ended the job."""
        self.saved_view = None

    def begin(self, *, lacks_values: bool) -> None:
        """Set whether the model starts with an estimate of an earlier job; equal on all ranks."""
        self.lacks_values = lacks_values

    def check_values(self, where: object) -> None:
        """Raise if the model has started with an estimate of an earlier job.

        Raises:
            EstimateShown: It has; the message names the state to load.
        """
        if self.lacks_values:
            raise misuse.estimate_left(where)

    @property
    def is_unwritten(self) -> bool:
        """Whether no parameter was written since `remember`, as far as versions show it."""
        return list(map(_version, self.parameters)) == self._versions

    def check_unwritten(self, where: object) -> None:
        """Raise if a parameter was rebound or written since `remember`; quick enough for every micro-batch.

        Raises:
            ParametersTouched: A parameter was; the message names the first.
        """
        addresses = list(map(Tensor.data_ptr, self.parameters))
        versions = list(map(_version, self.parameters))
        if addresses == self._addresses and versions == self._versions:
            return
        misuse.check_moved(self.names, self.parameters, self._memory, self._addresses, where)
        self._addresses = addresses
        misuse.check_written(self.names, self._versions, versions, where)

    def check_complete(self, where: object) -> None:
        """Raise if a trainable parameter was added, removed or replaced since the model was wrapped, or groups changed.

        Raises:
            ParametersTouched: They have changed; the message names or counts them.
        """
        if (sizes := [len(one["params"]) for groups in self._groups for one in groups]) != self._sizes:
            raise misuse.groups_changed(sizes, self._sizes, where)
        trainable = {id(parameter) for parameter in self._every_parameter() if parameter.requires_grad}
        if trainable == self._ids:
            return
        if trainable - self._ids:
            raise misuse.parameters_added(len(trainable - self._ids), where)
        for name, parameter in zip(self.names, self.registered, strict=True):
            if id(parameter) not in trainable and parameter.requires_grad:
                raise misuse.parameter_removed(name, where)

    @property
    def is_replaced(self) -> bool:
        """Whether other tensors replace the parameters, as in `torch.func.functional_call`."""
        return not self._ids <= set(map(id, self._every_parameter()))

    def _every_parameter(self) -> Iterator[nn.Parameter]:
        """Yield the entries of the modules' parameter dictionaries, in half the time of `parameters()`."""
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter

    # At rest

    def drop_copies(self) -> None:
        """Drop autocast's cached casts of the values, because a guard has repaired values."""
        torch.clear_autocast_cache()

    def hook_gradient(self, index: int, node: Any, before: Callable[..., Any]) -> Any:
        """Call `before` with every gradient of a parameter, in a tuple of one, before it is added.

        Args:
            index: Index of the parameter.
            node: Autograd's node that adds it.
            before: May return another gradient in the same form.

        Returns:
            A handle that removes the hook.
        """
        return node.register_prehook(before)

    def settle(self, values: Sequence[Tensor] | None, buffers: Sequence[Buffer]) -> None:
        """Show committed values, and keep the values from before.

        Args:
            values: One per parameter; None if the model already shows the committed values.
            buffers: The buffers for these values.
        """
        self._committed = None if values is None else list(values)
        self.saved_view = self._swap(SavedView("committed", self._committed, list(buffers), []))

    def changed(self) -> str | None:
        """Return the name of a parameter that was written since `settle`; None if there is none."""
        if self._committed is None:
            return None
        # Versions would not tell: a save inside the block shows other values for a while, and counts as a write.
        for name, parameter, value in zip(self.names, self.parameters, self._committed, strict=True):
            if not torch.equal(parameter.detach(), value.to(parameter.dtype).view(parameter.shape)):
                return name
        return None

    @property
    def trained_buffers(self) -> list[Buffer]:
        """Copies of the buffers with which training continues, even while others are shown."""
        shown = self.buffer_sync.copies
        if self.saved_view is None:
            return shown
        pairs = zip(self._with_writes(self.saved_view).buffers, shown, strict=True)
        return [now if before is None else before for before, now in pairs]

    def show_again(self) -> bool:
        """Restore the values from before `settle`; return whether these are parameters that were never replaced.

        Buffers that were written since are not changed.
        """
        before, self.saved_view, self._committed = self.saved_view, None, None
        if before is not None:
            self._swap(self._with_writes(before))
        return before is not None and before.parameters is None

    def accept_writes(self, differing: Callable[[], str | None], where: object) -> None:
        """Accept writes to parameters that were shown all along, if the values are unchanged.

        Args:
            differing: Returns the name of a parameter with another value, or None.
            where: Rank and step, for messages.

        Raises:
            ParametersTouched: A value has changed.
        """
        if self.is_unwritten:
            return
        if (name := differing()) is not None:
            raise misuse.written_at_rest(name, where)
        self.remember()

    def evaluated(self, where: object) -> None:
        """Warn once if an evaluation's forward pass uses an estimate."""
        if self.shown == "estimate" and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "%s: a forward pass in eval() while the model shows an estimate: evaluate the committed parameters "
                "with parallel.evaluate(function) on all ranks, or inside `with parallel.settled():`",
                where,
            )

    def until_training(self) -> None:
        """Let the next micro-batch restore the values that were shown before `settle`."""
        self._settled_until_training = True

    def train_on(self, where: object) -> None:
        """Restore the values from before `settle`, if the model was settled only until training continues.

        Raises:
            OutOfTurn: A `settled` block has not ended.
        """
        if not self._settled_until_training:
            raise OutOfTurn(f"{where}: training inside settled(): end its block first")
        self._settled_until_training = False
        self.show_again()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Restore, for the block, the values from before `settle`; do nothing if the model is not settled."""
        if self.saved_view is None:
            yield
            return
        # A save inside the block settles once more, and forgets what that has shown.
        values, committed = self._committed, self._swap(self._with_writes(self.saved_view))
        self.saved_view = None
        try:
            yield
        finally:
            self.saved_view, self._committed = self._swap(committed), values

    def begin_again(self) -> None:
        """Declare the model's current values, equal on all ranks, to be committed and agreed."""
        self.remember()
        for listener in self.listeners:
            listener.installed([parameter.detach() for parameter in self.parameters])
        self.buffer_sync.agree()
        self.shown, self.lacks_values = "committed", False
        self.saved_view = None
        self._settled_until_training = False

    def _swap(self, saved: SavedView) -> SavedView:
        """Show the values in `saved`, and return the values from before."""
        shown, parameters = self.shown, None
        if saved.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self.parameters]
            self.show(saved.parameters, saved.shown)
        self.shown = saved.shown
        return SavedView(shown, parameters, self.buffer_sync.exchange_live(saved.buffers), saved.buffers)

    def _with_writes(self, saved: SavedView) -> SavedView:
        """Return the values to restore, without buffers that were written while others were shown."""
        written = changes_of(saved.replaced_by, self.buffer_sync.live)
        pairs = zip(saved.buffers, written, strict=True)
        return dataclasses.replace(saved, buffers=[None if flag else value for value, flag in pairs])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `model.state_dict()` from before `torch.compile` wrapped any part of the model."""
        self.model.load_state_dict({self._keys.get(name, name): value for name, value in state.items()})
