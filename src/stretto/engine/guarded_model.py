"""Watches the user's model and optimizer: whoever touches what the engine relies on is told at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.checksums import Checksum, digest, hexadecimal
from stretto.errors import EstimateShown, OptimizerStepped, ParametersTouched
from stretto.flat import Layout
from stretto.records import Incident


class GuardedModel:
    """The hooks on one model and optimizer, and the checks of what hooks cannot see.

    Parameters may change at landings only. A version counter tells every other write but those through
    `.data`; identity and address tell replaced and rebound parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        *,
        is_sealed: bool = False,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.optimizer = optimizer
        self._names = [slot.name for slot in layout.slots]
        self._ids = {id(parameter) for parameter in parameters}
        self._num_groups = len(optimizer.param_groups)
        self._handles: list[Any] = []
        self._is_sealed = is_sealed
        self._checksums: list[Checksum] = []
        self.remember(parameters)

    def hook(
        self,
        *,
        on_gradient: Callable[[int], None],
        on_forward: Callable[[], None],
        shows_estimate: Callable[[], bool],
        where: Callable[[], str],
    ) -> None:
        """Install the hooks.

        Args:
            on_gradient: Called with a slot's index when its gradient has been accumulated.
            on_forward: Called before every training forward pass.
            shows_estimate: Whether `model.state_dict()` would return an estimate.
            where: Rank and step, for messages.
        """
        for index, parameter in enumerate(self.parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: on_gradient(index))
            )

        def before_forward(module: nn.Module, args: object) -> None:
            if module.training and torch.is_grad_enabled():
                on_forward()

        def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if shows_estimate():
                raise EstimateShown(
                    f"{where()}: model.state_dict() while the model shows an estimate: take it inside `with "
                    "parallel.settled():` right after an Update, or after finish()"
                )

        def before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            raise OptimizerStepped(
                f"{where()}: optimizer.step() was called by hand (or by a GradScaler): the library steps a "
                "private optimizer at every update and reads the learning rates from this one; remove the call"
            )

        self._handles.append(self.model.register_forward_pre_hook(before_forward))
        self._handles.append(self.model.register_state_dict_pre_hook(before_state_dict))
        self._handles.append(self.optimizer.register_step_pre_hook(before_step))

    def unhook(self) -> None:
        """Leave model and optimizer as ordinary as they came."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self.parameters:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype

    def remember(self, installed: Sequence[Tensor]) -> None:
        """Take note of the parameters, which have been given the values `installed`."""
        self._noted = self._state()
        if self._is_sealed:
            # Of the values, not of the parameters: what went wrong on the way in is then seen too.
            pairs = zip(installed, self.parameters, strict=True)
            self._checksums = [Checksum.of(value.detach().to(parameter.dtype)) for value, parameter in pairs]

    def mend_damaged(self, rank: int, step: int) -> list[Incident]:
        """Mend parameters whose bits are not those that were installed; the rest has to be installed again.

        Args:
            rank: Whose model this is.
            step: The update that is under way.
        """
        incidents = []
        for name, parameter, checksum in zip(self._names, self.parameters, self._checksums, strict=False):
            found = digest(parameter)
            if found == checksum.digest:
                continue
            repair = "mended" if checksum.mends(parameter) else "installed anew"
            incidents.append(
                Incident(
                    step=step,
                    guard="rest",
                    site="shown parameters",
                    part=name,
                    ranks=(rank,),
                    action=repair,
                    expected=hexadecimal(checksum.digest),
                    found=hexadecimal(found),
                )
            )
        if incidents:
            self._noted = self._state()
        return incidents

    def is_as_installed(self) -> bool:
        """Return whether all parameters hold the bits that were installed, as far as checksums were taken."""
        pairs = zip(self.parameters, self._checksums, strict=False)
        return all(digest(parameter) == checksum.digest for parameter, checksum in pairs)

    def install_again(self, values: Sequence[Tensor]) -> bool:
        """Put `values`, one per parameter, in place, and return whether they are what was installed."""
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters), list(values))
        self._noted = self._state()
        return self.is_as_installed()

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
        for name, parameter in zip(self._names, self.parameters, strict=True):
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
        if state == self._noted:
            return
        for name, (address, _), (noted_address, _) in zip(self._names, state, self._noted, strict=True):
            if address != noted_address:
                raise ParametersTouched(
                    f"{where}: the storage of parameter {name!r} was rebound (.data = ..., .to(...), .half()); bring "
                    "the model to its device and dtype before wrapping"
                )
        written = [name for name, new, old in zip(self._names, state, self._noted, strict=True) if new != old]
        raise ParametersTouched(
            f"{where}: parameter {written[0]!r} was written between updates; load weights before wrapping, or "
            "through a checkpoint"
        )

    def _state(self) -> list[tuple[int, int]]:
        """Return every parameter's address and version counter."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self.parameters]
