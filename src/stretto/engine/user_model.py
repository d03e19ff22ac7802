"""The user's model and optimizer: their hooks, and checks that nobody else changes what the engine relies on.

Note [Hooks and copies]
    Hooks live in the model's own dictionaries. A copy of the model (a moving average, `copy.deepcopy`, a pickle) would
    contain them and act on the job. So a `_Hook` is copied and pickled as a function that does nothing. A shallow copy
    shares the hooks, which compare the module's identity.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import EstimateShown, OptimizerStepped, ParametersTouched
from stretto.flat import Layout


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
        self._ids = {id(parameter) for parameter in parameters}
        self._num_groups = len(optimizer.param_groups)
        self._handles: list[Any] = []
        self.remember()

    def hook(
        self,
        *,
        before_gradient: Callable[[int, Tensor], Tensor | None],
        before_forward: Callable[[], None],
        shows_estimate: Callable[[], bool],
        where: Callable[[], str],
    ) -> None:
        """Install the hooks.

        Args:
            before_gradient: Called with a slot's index and a gradient that is about to be added to it; may return
                another one.
            before_forward: Called before every training forward pass.
            shows_estimate: Whether `model.state_dict()` would return an estimate.
            where: Rank and step, for messages.
        """

        def training_forward(module: nn.Module, _: object) -> None:
            if module is self.model and module.training and torch.is_grad_enabled():
                before_forward()

        def state_dict(module: nn.Module, *_: object) -> None:
            if module is self.model and shows_estimate():
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
            self._handles.append(
                parameter.register_hook(
                    lambda gradient, index=index: (
                        None if gradient is None else before_gradient(index, gradient)
                    )
                )
            )
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

    def install(self, values: Sequence[Tensor]) -> None:
        """Copy `values`, one per parameter, into the model."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters), list(values))
        self.remember()

    def remember(self) -> None:
        """Remember address and version of every parameter, so that a later write is noticed."""
        self._remembered = self._state()

    def check_untouched(self, where: str) -> None:
        """Raise if a parameter was replaced, rebound or written since `remember`, or a group was added.

        Raises:
            ParametersTouched: Names the first such parameter.
        """
        if len(self.optimizer.param_groups) != self._num_groups:
            raise ParametersTouched(
                f"{where}: the optimizer has {len(self.optimizer.param_groups)} parameter groups, {self._num_groups} "
                "when it was wrapped; add groups before wrapping"
            )
        trainable = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        missing = self._ids - trainable
        if trainable - self._ids:
            raise ParametersTouched(
                f"{where}: the model has {len(trainable - self._ids)} trainable parameters that it did not have when "
                "it was wrapped; wrap after the model is complete"
            )
        for name, parameter in zip(self.names, self.parameters, strict=True) if missing else ():
            if id(parameter) in missing and parameter.requires_grad:
                raise ParametersTouched(
                    f"{where}: parameter {name!r} was removed from the model after wrapping; make a new DataParallel "
                    "over the changed model"
                )
        self.check_unwritten(where)

    def check_unwritten(self, where: str) -> None:
        """Raise if a parameter was rebound or written since `remember`; quick enough for every micro-batch.

        Raises:
            ParametersTouched: Names the first such parameter.
        """
        state = self._state()
        if state == self._remembered:
            return
        for name, (address, _), (remembered, _) in zip(self.names, state, self._remembered, strict=True):
            if address != remembered:
                raise ParametersTouched(
                    f"{where}: the storage of parameter {name!r} was rebound (.data = ..., .to(...), .half()); bring "
                    "the model to its device and dtype before wrapping"
                )
        written = [n for n, now, then in zip(self.names, state, self._remembered, strict=True) if now != then]
        raise ParametersTouched(
            f"{where}: parameter {written[0]!r} was written between updates; load weights before wrapping, or "
            "through a checkpoint"
        )

    def _state(self) -> list[tuple[int, int]]:
        """Return every parameter's address and version counter."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]
