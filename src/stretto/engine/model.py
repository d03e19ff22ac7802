"""The user's model and optimizer: what the model shows, its hooks, and checks that nobody else changes it.

Note [Hooks and copies]
    Hooks live in the model's own dictionaries. A copy of the model (a moving average, `copy.deepcopy`, a pickle) would
    contain them and act on the job. So a `_Hook` is copied and pickled as a function that does nothing. A shallow copy
    shares the hooks, which compare the module's identity.

Note [Statistics]
    The forward passes of a rank change its own copy. A round carries a snapshot. The communication lane averages the
    buffers that changed on any rank, and the landing installs

        live ← average + (live - snapshot)

    so that what the compute lane added meanwhile is kept. For a synchronous strategy, `live` is the snapshot, and all
    ranks are equal at every update. For an overlapping strategy, the ranks agree on `average`, which evaluation and
    checkpoints see; `live` also holds what came after the snapshot.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.round import Landing, Listener, Shown
from stretto.errors import EstimateShown, OptimizerStepped, ParametersTouched
from stretto.exchange import Exchange
from stretto.flat import Layout

_version = operator.attrgetter("_version")


def _do_nothing(*_: object) -> None:
    """Stand for a hook in a copy of the model."""


def _no_hook() -> Callable[..., None]:
    return _do_nothing


class _Hook:
    """A hook that does nothing in copies of the model; see Note [Hooks and copies]."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the model shows, or is to show again."""

    shown: Shown
    parameters: list[Tensor] | None
    """One per parameter; None to leave the parameters as they are."""
    statistics: list[Tensor]


class UserModel:
    """A model, its trainable parameters and its optimizer.

    Parameters may change at landings only. A version counter shows every other write, except writes through
    `.data`. Identity and address show replaced and rebound parameters.

    Args:
        model: The user's model.
        parameters: The parameters that train, in the layout's order.
        optimizer: The user's optimizer: read, never stepped.
        layout: Names the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.optimizer = optimizer
        self.names = [slot.name for slot in layout.slots]
        self.statistics = Statistics(model)
        self.shown: Shown = "committed"
        self.listeners: list[Listener] = []
        """Receive the installed values and the other events of the compute lane."""
        self._before: Held | None = None
        """Inside `settled`, what the model showed before; otherwise None."""
        self._ids = {id(parameter) for parameter in parameters}
        self._num_groups = len(optimizer.param_groups)
        self._handles: list[Any] = []
        self.remember()

    # Hooks

    def hook(
        self,
        *,
        before_gradient: Callable[[int, Tensor | None], None],
        before_forward: Callable[[], None],
        where: Callable[[], str],
    ) -> None:
        """Install the hooks.

        Args:
            before_gradient: Called with a slot's index and a gradient before that is added to the slot's.
            before_forward: Called before every training forward pass.
            where: Rank and step, for messages.
        """

        def training_forward(module: nn.Module, _: object) -> None:
            if module is self.model and module.training and torch.is_grad_enabled():
                before_forward()

        def state_dict(module: nn.Module, *_: object) -> None:
            if module is self.model and self.shown == "estimate":
                raise EstimateShown(
                    f"{where()}: model.state_dict() while the model shows an estimate: take it inside `with "
                    "parallel.settled():`, or after finish()"
                )

        def optimizer_step(*_: object) -> None:
            raise OptimizerStepped(
                f"{where()}: optimizer.step() was called by hand (or by a GradScaler): the library steps a "
                "private optimizer at every update and reads the learning rates from this one; remove the call"
            )

        for index, parameter in enumerate(self.parameters):
            self._handles.append(parameter.register_hook(functools.partial(before_gradient, index)))
        self._handles.append(self.model.register_forward_pre_hook(_Hook(training_forward)))
        self._handles.append(self.model.register_state_dict_pre_hook(_Hook(state_dict)))
        self._handles.append(self.optimizer.register_step_pre_hook(optimizer_step))

    def unhook(self) -> None:
        """Remove every hook from model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self.parameters:
            parameter.grad = None
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
        self.remember()

    @property
    def is_settled(self) -> bool:
        """Whether the model shows the committed parameters for the duration of `settled`."""
        return self._before is not None

    def settle(self, values: Sequence[Tensor] | None, statistics: Sequence[Tensor]) -> None:
        """Show committed values, and keep what was shown.

        Args:
            values: One per parameter; None if the model shows the committed ones already.
            statistics: The buffers that belong to them.
        """
        committed = Held("committed", None if values is None else list(values), list(statistics))
        self._before = self._swap(committed)

    def show_again(self) -> None:
        """Restore what was shown before `settle`."""
        if self._before is not None:
            self._swap(self._before)
            self._before = None

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
        self.remember()
        for listener in self.listeners:
            listener.installed([parameter.detach() for parameter in self.parameters])
        self.statistics.agree()
        self.shown = "committed"

    def _swap(self, held: Held) -> Held:
        """Show the values in `held`, and return what was shown."""
        shown, parameters = self.shown, None
        if held.parameters is not None:
            parameters = [parameter.detach().clone() for parameter in self.parameters]
            self.show(held.parameters, held.shown)
        self.shown = held.shown
        return Held(shown, parameters, self.statistics.exchange_live(held.statistics))

    # Nobody else writes

    def remember(self) -> None:
        """Remember address and version of every parameter, so that a later write is noticed."""
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._versions = list(map(_version, self.parameters))

    def check_unwritten(self, where: str) -> None:
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

    def check_complete(self, where: str) -> None:
        """Raise if a trainable parameter was added, removed or replaced since the model was wrapped, or a group added.

        Raises:
            ParametersTouched: Says which, or how many.
        """
        if len(self.optimizer.param_groups) != self._num_groups:
            raise ParametersTouched(
                f"{where}: the optimizer has {len(self.optimizer.param_groups)} parameter groups, {self._num_groups} "
                "when it was wrapped; add groups before wrapping"
            )
        trainable = {
            id(parameter)
            for module in self.model.modules()
            for parameter in module._parameters.values()  # half the time of parameters()
            if parameter is not None and parameter.requires_grad
        }
        if trainable == self._ids:
            return
        if trainable - self._ids:
            raise ParametersTouched(
                f"{where}: the model has {len(trainable - self._ids)} trainable parameters that it did not have when "
                "it was wrapped; wrap after the model is complete"
            )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if id(parameter) not in trainable and parameter.requires_grad:
                raise ParametersTouched(
                    f"{where}: parameter {name!r} was removed from the model after wrapping; make a new DataParallel "
                    "over the changed model"
                )


class Statistics:
    """The floating-point buffers of one model: their live values and the values that ranks last agreed on."""

    def __init__(self, model: nn.Module) -> None:
        named = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._owners = [_owner_of(model, name) for name in named]
        self.names = list(named)
        self.agreed = [buffer.detach().clone() for buffer in named.values()]
        """Values that are equal on all ranks; they change at landings only."""

    @property
    def live(self) -> list[Tensor]:
        """The buffers as the model holds them now; modules may have replaced them."""
        return [getattr(module, attribute).detach() for module, attribute in self._owners]

    def snapshot(self) -> tuple[list[Tensor], bytes]:
        """Return copies of the live buffers, and one byte each: 1 if it differs from what ranks last agreed on."""
        if not self.names:
            return [], b""
        copies = [buffer.clone() for buffer in self.live]
        return copies, bytes(not torch.equal(a, b) for a, b in zip(copies, self.agreed, strict=True))

    def install(self, snapshot: list[Tensor], averages: dict[int, Tensor]) -> None:
        """Install the averages, by index, that a round brought back for its `snapshot`."""
        live = self.live if averages else []
        for index, average in averages.items():
            self.agreed[index] = average
            if torch.equal(live[index], snapshot[index]):
                live[index].copy_(average)
            else:
                live[index].add_(average - snapshot[index])

    def agreed_after(self, landing: Landing | None) -> list[Tensor]:
        """Return what ranks will agree on once `landing`, if there is one, is installed."""
        brought = {} if landing is None else landing.reduction.statistics
        return [brought.get(index, value) for index, value in enumerate(self.agreed)]

    def agree(self) -> None:
        """Declare the live values, equal on all ranks, to be what all ranks agree on."""
        self.agreed = [buffer.clone() for buffer in self.live]

    def restore(self) -> None:
        """Restore what all ranks last agreed on: a round that was left out may have written NaN here."""
        for buffer, value in zip(self.live, self.agreed, strict=True):
            buffer.copy_(value)

    def exchange_live(self, values: list[Tensor]) -> list[Tensor]:
        """Put `values` into the model and return copies of what was there."""
        live = self.live
        held = [buffer.clone() for buffer in live]
        for buffer, value in zip(live, values, strict=True):
            buffer.copy_(value)
        return held


def average_statistics(
    exchange: Exchange, own: Sequence[Tensor], changed: Sequence[bool], counts: Sequence[int]
) -> dict[int, Tensor]:
    """Return, by index, the averages of the buffers that changed on any rank; all ranks must call.

    Args:
        exchange: Connects the ranks.
        own: This rank's buffers.
        changed: Whether each buffer changed; the same on all ranks.
        counts: The ranks' weights in the average.
    """
    indices = [index for index, flag in enumerate(changed) if flag]
    if not indices or sum(counts) == 0:
        return {}
    flat = torch.cat([own[index].flatten().float() for index in indices])
    whole = torch.empty(len(counts) * flat.numel(), dtype=flat.dtype, device=flat.device)
    exchange.gather_values(flat, whole, "average of the model's buffers")
    mean = torch.zeros_like(flat)
    for count, part in zip(counts, whole.view(len(counts), -1), strict=True):
        if count:
            mean.add_(part, alpha=count / sum(counts))
    parts = torch.split(mean, [own[index].numel() for index in indices])
    return {
        index: part.view_as(own[index]).to(own[index].dtype)
        for index, part in zip(indices, parts, strict=True)
    }


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
