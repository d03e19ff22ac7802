"""Hooks on the user's model and optimizer, by which a job follows passes and refuses calls whose effect would be lost.

Note [Hooks and copies]
    Hooks live in the model's own dictionaries. A copy of the model (a moving average, `copy.deepcopy`, a pickle) would
    contain them and act on the job. So a `_Hook` is copied and pickled as a function that does nothing. A shallow copy
    shares the hooks, which compare the module's identity. Every module of the model has a hook, so that no part of it
    is copied or gives its state away unnoticed while it shows an estimate. A copy of the optimizer would have no state,
    and is refused.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import jit, nn

from stretto.engine import misuse
from stretto.engine.accumulation import Gradients
from stretto.engine.holding import LeftEstimate, Mark, adding_node
from stretto.engine.method_patch import MethodPatch
from stretto.engine.model import UserModel
from stretto.errors import EstimateShown, OptimizerStepped
from stretto.optimizer import members_of


def _do_nothing(*_: object) -> None:
    """Replace a hook in a copy of the model."""


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


def _before_copies(model: nn.Module, call: Callable[[], None]) -> list[Any]:
    """Call `call` before a part of the model is copied, pickled or returns its state; return handles."""
    modules = {id(module) for module in model.modules()}

    def state_dict(module: nn.Module, *_: object, before_copy: Callable[[], None]) -> None:
        if id(module) in modules:
            before_copy()

    hooked = [module for module in model.modules() if not isinstance(module, jit.ScriptModule)]
    return [module.register_state_dict_pre_hook(_Hook(state_dict, before_copy=call)) for module in hooked]


def shows_estimate(model: nn.Module) -> bool:
    """Return whether an ended job has left an estimate in this model or a part of it; drop records of deleted
    models.
    """
    is_shown = False
    for module in model.modules():
        for key, hook in list(module._state_dict_pre_hooks.items()):
            left = hook.keywords.get("before_copy") if isinstance(hook, _Hook) else None
            if isinstance(left, LeftEstimate):
                if left.is_shown:
                    is_shown = True
                else:
                    del module._state_dict_pre_hooks[key]
    return is_shown


class Hooks:
    """The hooks of one job.

    Args:
        model: The user's model and optimizer.
        before_gradient: Called with a slot's index and a tuple of one gradient, before the gradient is added; may
            return another such tuple.
        before_forward: Called before every forward pass of the model, with it and the arguments.
        where: Rank and step, for messages.
    """

    def __init__(
        self,
        model: UserModel,
        *,
        before_gradient: Callable[[int, Gradients], Gradients | None],
        before_forward: Callable[[nn.Module, object], None],
        where: object,
    ) -> None:
        self.mark = Mark()
        """Identifies the holder of the job."""
        self._user = model
        self._where = where
        self._handles: list[Any] = []
        self._nodes = [adding_node(parameter) for parameter in model.registered]
        """The nodes are kept here, because a node and its hooks end with the last reference."""
        for index, node in enumerate(self._nodes):
            self._handles.append(model.hook_gradient(index, node, functools.partial(before_gradient, index)))
            self.mark.put(node)
        self._hook_model(model.model, before_forward, where)
        self._hook_optimizer(where)

    def _hook_model(
        self, model: nn.Module, before_forward: Callable[[nn.Module, object], None], where: object
    ) -> None:
        def refuse_estimate() -> None:
            if self._user.saved_view is None:  # a checkpoint that is loaded looks at the entries
                self._user.check_values(where)
            if self._user.shown == "estimate":
                raise EstimateShown(
                    f"{where}: state_dict(), a copy or a pickle of the model (or of a part of it) while it "
                    "shows an estimate: expected the committed parameters; copy it inside `with "
                    "parallel.settled():`, or after finish()"
                )

        # A scripted module takes no hooks: its backward pass submits the round, and its own state_dict() is not seen.
        hooked = [module for module in model.modules() if not isinstance(module, jit.ScriptModule)]
        if model in hooked:
            # First: what is to be shown has to be there before hooks of others look at parameters.
            self._handles.append(model.register_forward_pre_hook(_Hook(before_forward), prepend=True))
        self._handles += _before_copies(model, refuse_estimate)

    def _hook_optimizer(self, where: object) -> None:
        def step(*_: object) -> None:
            raise OptimizerStepped(
                f"{where}: optimizer.step() was called by hand (or by a GradScaler): the library steps a "
                "private optimizer at every update and reads the learning rates from this one; remove the call, and a "
                "GradScaler with it: bfloat16 needs none"
            )

        def state(*_: object) -> None:
            raise misuse.optimizer_state_read(where)

        def copied() -> None:
            raise misuse.optimizer_copied(where)

        for member in members_of(self._user.optimizer):
            self._handles.append(MethodPatch(member, "__getstate__", copied))
            self._handles.append(member.register_step_pre_hook(step))
            self._handles.append(member.register_state_dict_pre_hook(state))
            self._handles.append(member.register_load_state_dict_pre_hook(state))

    def unhook(self) -> None:
        """Remove all hooks from model and optimizer; a job that is dropped after its end does nothing."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for node in self._nodes:
            self.mark.remove(node)
        if self._user.shown == "estimate" or self._user.lacks_values:
            _before_copies(self._user.model, LeftEstimate(self._user.parameters, str(self._where)))

    def remove(self) -> None:
        """Remove all hooks, and restore the parameters' `.grad`."""
        self.unhook()
        for parameter in self._user.registered:
            parameter.grad = None
            if parameter.grad_dtype != parameter.dtype:  # once set, it stays when the model changes its dtype
                parameter.grad_dtype = parameter.dtype
