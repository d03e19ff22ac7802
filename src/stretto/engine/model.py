"""The user's model and optimizer: what the model shows, its hooks, and checks that nobody else changes it.

Note [Hooks and copies]
    Hooks live in the model's own dictionaries. A copy of the model (a moving average, `copy.deepcopy`, a pickle) would
    contain them and act on the job. So a `_Hook` is copied and pickled as a function that does nothing. A shallow copy
    shares the hooks, which compare the module's identity. Every module of the model has a hook, so that no part of it
    is copied or gives its state away unnoticed while it shows an estimate.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.buffers import Buffer
from stretto.engine.holding import Mark, adding_node
from stretto.engine.options import BufferChoices
from stretto.engine.round import Listener, Shown
from stretto.engine.statistics import Statistics
from stretto.errors import EstimateShown, OptimizerStepped, OutOfTurn, ParametersTouched, UsageError
from stretto.flat import Layout, original_name
from stretto.optimizer import Schedule, members_of

_version = operator.attrgetter("_version")

Gradients = tuple[Tensor | None]
"""The gradient of one parameter, as autograd hands it to a hook on a node."""


def _do_nothing(*_: object) -> None:
    """Stand for a hook in a copy of the model."""


def _no_hook() -> Callable[..., None]:
    return _do_nothing


class _Hook(functools.partial[Any]):
    """A hook that does nothing in copies of the model; see Note [Hooks and copies].

    An argument `before_copy` is called when something that has the hook is copied or pickled.
    """

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        if "before_copy" in self.keywords:
            self.keywords["before_copy"]()
        return _no_hook, ()


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the model shows, or is to show again."""

    shown: Shown
    parameters: list[Tensor] | None
    """One per parameter; None to leave the parameters as they are."""
    statistics: list[Buffer]


class UserModel:
    """A model, its trainable parameters and its optimizer.

    Parameters may change at landings only. A version counter shows every other write, but those through `.data`.
    Identity and address show replaced and rebound parameters.

    Args:
        model: The user's model.
        parameters: The parameters that train, in the layout's order.
        optimizer: The user's optimizer: read, never stepped.
        layout: Names the parameters.
        choices: What becomes of which buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        choices: BufferChoices,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.optimizer = optimizer
        self._members = members_of(optimizer)
        self.names = [slot.name for slot in layout.slots]
        self.statistics = Statistics(model, choices)
        self.shown: Shown = "committed"
        self.listeners: list[Listener] = []
        """Receive the installed values and the other events of the compute lane."""
        self.mark = Mark()
        """Says who holds the job."""
        self.held_back: Held | None = None
        """Inside `settled`, what the model showed before; otherwise None."""
        self._ids = {id(parameter) for parameter in parameters}
        self._groups = [member.param_groups for member in self._members]
        self._num_groups = sum(map(len, self._groups))
        self._handles: list[Any] = []
        self._nodes = [adding_node(parameter) for parameter in parameters]
        """Kept: a node and its hooks end with the last reference."""
        self._keys = {original_name(key): key for key in model.state_dict()}
        self._settled_until_training = False
        self.remember()

    # Hooks

    def hook(
        self,
        *,
        before_gradient: Callable[[int, Gradients], Gradients | None],
        before_forward: Callable[[nn.Module, object], None],
        where: object,
    ) -> None:
        """Install the hooks.

        Args:
            before_gradient: Called with a slot's index and a gradient, alone in a tuple, before that is added to the
                slot's; may return another one in the same form.
            before_forward: Called before every forward pass of the model, with it and the arguments.
            where: Rank and step, for messages.
        """

        for index, node in enumerate(self._nodes):
            self._handles.append(node.register_prehook(functools.partial(before_gradient, index)))
            self.mark.put(node)
        self._hook_model(before_forward, where)
        self._hook_optimizer(where)

    def _hook_model(self, before_forward: Callable[[nn.Module, object], None], where: object) -> None:
        def refuse_estimate() -> None:
            if self.shown == "estimate":
                raise EstimateShown(
                    f"{where}: state_dict(), a copy or a pickle of the model (or of a part of it) while it shows an "
                    "estimate: expected the committed parameters; do it inside `with parallel.settled():`, or after "
                    "finish()"
                )

        modules = {id(module) for module in self.model.modules()}

        def state_dict(module: nn.Module, *_: object, before_copy: Callable[[], None]) -> None:
            if id(module) in modules:
                before_copy()

        # A scripted module takes no hooks: its backward pass brings a take-off, and its own state_dict() is not seen.
        hooked = [module for module in self.model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        if self.model in hooked:
            self._handles.append(self.model.register_forward_pre_hook(_Hook(before_forward)))
        for module in hooked:
            self._handles.append(
                module.register_state_dict_pre_hook(_Hook(state_dict, before_copy=refuse_estimate))
            )

    def _hook_optimizer(self, where: object) -> None:
        def step(*_: object) -> None:
            raise OptimizerStepped(
                f"{where}: optimizer.step() was called by hand (or by a GradScaler): the library steps a "
                "private optimizer at every update and reads the learning rates from this one; remove the call, and a "
                "GradScaler with it: bfloat16 needs none"
            )

        def state(*_: object) -> None:
            raise UsageError(
                f"{where}: the state of this optimizer is empty during the job, because a private one is stepped in "
                "its place: expected parallel.state_dict() and load_state_dict(), or checkpoint.save and load"
            )

        for member in self._members:
            self._handles.append(member.register_step_pre_hook(step))
            self._handles.append(member.register_state_dict_pre_hook(state))
            self._handles.append(member.register_load_state_dict_pre_hook(state))

    def unhook(self) -> None:
        """Remove every hook from model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for node in self._nodes:
            self.mark.remove(node)
        for parameter in self.parameters:
            parameter.grad = None
            if parameter.grad_dtype != parameter.dtype:  # once set, it stays when the model changes its dtype
                parameter.grad_dtype = parameter.dtype

    # What the model shows

    def show(self, values: Sequence[Tensor], shown: Shown) -> None:
        """Install `values`, one per parameter, and tell the listeners."""
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

    def settle(self, values: Sequence[Tensor] | None, statistics: Sequence[Buffer]) -> None:
        """Show committed values, and keep what was shown.

        Args:
            values: One per parameter; None if the model shows the committed ones already.
            statistics: The buffers that belong to them.
        """
        committed = Held("committed", None if values is None else list(values), list(statistics))
        self.held_back = self._swap(committed)

    def show_again(self) -> bool:
        """Restore what was shown before `settle`; return whether these are parameters that were never replaced."""
        before, self.held_back = self.held_back, None
        if before is not None:
            self._swap(before)
        return before is not None and before.parameters is None

    def accept_writes(self, differing: Callable[[], str | None], where: object) -> None:
        """Accept writes to parameters that were shown all along and hold again what they held.

        Args:
            differing: Returns the name of a parameter that does not, or None.
            where: Rank and step, for messages.

        Raises:
            ParametersTouched: One does not.
        """
        if list(map(_version, self.parameters)) == self._versions:
            return
        if (name := differing()) is not None:
            raise ParametersTouched(
                f"{where}: parameter {name!r} was written inside settled() and holds another value at the end of the "
                "block: put back what was there, or load weights through a checkpoint"
            )
        self.remember()

    def until_training(self) -> None:
        """Let the next micro-batch restore what was shown before `settle`."""
        self._settled_until_training = True

    def train_on(self, where: object) -> None:
        """Restore what was shown before `settle`, if the model was settled only until now.

        Raises:
            OutOfTurn: It is settled for a block that has not ended.
        """
        if not self._settled_until_training:
            raise OutOfTurn(f"{where}: training inside settled(): leave its block first")
        self._settled_until_training = False
        self.show_again()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Restore, for the block, what was shown before `settle`; do nothing if the model is not settled."""
        if self.held_back is None:
            yield
            return
        committed, self.held_back = self._swap(self.held_back), None
        try:
            yield
        finally:
            self.held_back = self._swap(committed)

    def begin_again(self) -> None:
        """Declare the model's present values, equal on all ranks, to be committed and agreed on."""
        self.remember()
        for listener in self.listeners:
            listener.installed([parameter.detach() for parameter in self.parameters])
        self.statistics.agree()
        self.shown = "committed"
        self.held_back = None
        self._settled_until_training = False

    def _swap(self, held: Held) -> Held:
        """Show the values in `held`, and return what was shown."""
        shown, parameters = self.shown, None
        if held.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self.parameters]
            self.show(held.parameters, held.shown)
        self.shown = held.shown
        return Held(shown, parameters, self.statistics.exchange_live(held.statistics))

    # Loading, and schedulers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `model.state_dict()` returned before `torch.compile` wrapped any part of the model."""
        self.model.load_state_dict({self._keys.get(name, name): value for name, value in state.items()})

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

    def check_unwritten(self, where: object) -> None:
        """Raise if a parameter was rebound or written since `remember`; quick enough for every micro-batch.

        Raises:
            ParametersTouched: Names the first such parameter.
        """
        addresses, versions = (
            list(map(Tensor.data_ptr, self.parameters)),
            list(map(_version, self.parameters)),
        )
        if addresses == self._addresses and versions == self._versions:
            return
        for name, old, new in zip(self.names, self._addresses, addresses, strict=True):
            if old != new:
                raise ParametersTouched(
                    f"{where}: the storage of parameter {name!r} was rebound (.data = ..., .to(...), .half()); bring "
                    "the model to its device and dtype before wrapping"
                )
        written = [n for n, old, new in zip(self.names, self._versions, versions, strict=True) if old != new]
        raise ParametersTouched(
            f"{where}: parameter {written[0]!r} was written between updates; load weights before wrapping, or "
            "through a checkpoint"
        )

    def check_complete(self, where: object) -> None:
        """Raise if a trainable parameter was added, removed or replaced since the model was wrapped, or a group added.

        Raises:
            ParametersTouched: Says which, or how many.
        """
        if (num_groups := sum(map(len, self._groups))) != self._num_groups:
            raise ParametersTouched(
                f"{where}: the optimizer has {num_groups} parameter groups, {self._num_groups} "
                "when it was wrapped; add groups before wrapping"
            )
        trainable = {id(parameter) for parameter in self._every_parameter() if parameter.requires_grad}
        if trainable == self._ids:
            return
        if trainable - self._ids:
            raise ParametersTouched(
                f"{where}: the model has {len(trainable - self._ids)} trainable parameters that it did not have when "
                "it was wrapped; wrap after the model is complete, and freeze behind that what is to train later"
            )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if id(parameter) not in trainable and parameter.requires_grad:
                raise ParametersTouched(
                    f"{where}: parameter {name!r} was removed from the model after wrapping; make a new DataParallel "
                    "over the changed model"
                )

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
