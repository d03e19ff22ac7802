"""The user's model and optimizer on an update's path: values are installed, and nobody else writes any."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.engine import misuse
from stretto.engine.buffers import Buffer
from stretto.engine.options import BufferChoices
from stretto.engine.round import Listener, Shown
from stretto.engine.written import WrittenStatistics
from stretto.flat import Layout
from stretto.optimizer import Schedule, members_of

_version = operator.attrgetter("_version")
trains = operator.attrgetter("requires_grad")


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the model shows, or is to show again."""

    shown: Shown
    parameters: list[Tensor] | None
    """One per parameter; None to leave the parameters as they are."""
    statistics: list[Buffer]
    instead: list[Buffer]
    """The buffers that are shown in the place of these."""


class UserModel:
    """A model, its trainable parameters and its optimizer.

    Parameters may change at landings only. A version counter shows every other write, but those through `.data`.
    Identity and address show replaced and rebound parameters.

    Args:
        model: The user's model.
        parameters: The values that train, in the layout's order.
        optimizer: The user's optimizer: read, never stepped.
        layout: Names the parameters.
        choices: What becomes of which buffers.
        registered: The model's parameters whose values these are; None where they are themselves.
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
        """What autograd gives gradients to."""
        self.optimizer = optimizer
        self._members = members_of(optimizer)
        self.names = [slot.name for slot in layout.slots]
        self.statistics = WrittenStatistics(model, choices)
        self.shown: Shown = "committed"
        self.listeners: list[Listener] = []
        """Receive the installed values and the other events of the compute lane."""
        self.lacks_values = False
        """Whether the model shows an estimate of an earlier job, and nobody has loaded committed values since."""
        self.held_back: Held | None = None
        """Inside `settled`, what the model showed before; otherwise None."""
        self._ids = {id(parameter) for parameter in self.registered}
        self._groups = [member.param_groups for member in self._members]
        self._sizes = [len(one["params"]) for groups in self._groups for one in groups]
        self._memory = list(map(misuse.memory_of, parameters))
        self.remember()

    # What the model shows

    def show(self, values: Sequence[Tensor], shown: Shown) -> None:
        """Install `values`, one per parameter, and tell the listeners."""
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
        """Let schedulers know that the optimizer has been stepped, or they warn; turn the job's so many times."""
        for one in (self.optimizer, *self._members):
            one._opt_called = True  # type: ignore[attr-defined]  # PyTorch's own mark
        if schedule is not None:
            schedule.turn(times, where)

    # Nobody else writes

    def remember(self) -> None:
        """Remember address and version of every parameter, so that a later write is noticed."""
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._versions = list(map(_version, self.parameters))

    def drop_held(self) -> None:
        """Forget what `settled` holds back: an error has ended the job, and nothing is shown again."""
        self.held_back = None

    def begin(self, *, lacks_values: bool) -> None:
        """Say whether the model begins with an estimate of an earlier job; the same on all ranks."""
        self.lacks_values = lacks_values

    def check_values(self, where: object) -> None:
        """Raise if the model has begun with an estimate of an earlier job.

        Raises:
            EstimateShown: Says what to load.
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
            ParametersTouched: Names the first such parameter.
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
            ParametersTouched: Says which, or how many.
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
        """Whether other tensors are in the parameters' places, as inside `torch.func.functional_call`."""
        return not self._ids <= set(map(id, self._every_parameter()))

    def _every_parameter(self) -> Iterator[nn.Parameter]:
        """Yield what is registered in the modules' places for parameters, in half the time of `parameters()`."""
        for module in self.model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter
