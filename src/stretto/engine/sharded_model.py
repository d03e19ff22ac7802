"""A model that FSDP2 has sharded inside a node: its shards hold the shown values, and accumulate gradients.

Note [Never stale]
    FSDP2 gathers parameters for a forward pass, and copies the shards' values. Parameters of the root module, and all
    with `reshard_after_forward=False`, stay gathered until a backward pass is over. If other values are installed
    after a forward pass without a backward one, an evaluation, say, the next forward pass would use the old ones. So
    every installation of values drops gathered copies.

Note [Into the buffer]
    FSDP2 reduces gradients inside the node and adds them, in place, into what a parameter has as `.grad`: a `DTensor`
    over a view of the flat buffer. No hook sees a gradient before that, only after. So the backward pass of somebody
    else cannot be kept apart, and is an error.

    Reductions between nodes are hidden by the same hook: called when a gradient has been added, and not before, it is
    the moment at which the gradient has come.

    It divides by the number of ranks of the node. The loss is multiplied by that number, so that a sum arrives. All
    ranks of a node have to run a backward pass together, also those whose weight is zero.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stretto.engine.accumulation import Accumulation, GradientBuffer, Gradients
from stretto.engine.early_accumulation import EarlyAccumulation
from stretto.engine.model import UserModel
from stretto.errors import GradientsTouched, ParametersTouched, UsageError
from stretto.flat import shard_of


class ShardedModel(UserModel):
    """A model whose values are this rank's shards; see Note [Never stale]. See `UserModel` for the arguments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        check_reductions(self.model.modules(), "before step 1")
        self._gathered = [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def install(self, values: Sequence[Tensor]) -> None:
        """Copy `values`, one per shard, into the model."""
        self._drop_gathered()
        super().install(values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a `model.state_dict()`."""
        self._drop_gathered()
        own = self.model.state_dict()
        whole = {}
        for name, value in state.items():
            held = own[self._keys.get(name, name)]
            whole[name] = _as_shard(value.to(held.device), held) if isinstance(held, DTensor) else value
        super().load_state_dict(whole)

    def drop_copies(self) -> None:
        """Drop cached and gathered copies of the values; all ranks of the node must call."""
        self._drop_gathered()
        super().drop_copies()

    def hook_gradient(self, index: int, node: Any, before: Callable[..., Any]) -> Any:
        """Call `before` after every gradient of a parameter is added: FSDP2 has no earlier hook."""

        def after(parameter: Tensor) -> None:
            before((parameter.grad,))

        return self.registered[index].register_post_accumulate_grad_hook(after)

    def check_complete(self, where: object) -> None:
        """Raise if a trainable parameter was added, removed, replaced or rebound since the model was wrapped."""
        super().check_complete(where)
        check_reductions(self._gathered, where)
        for name, parameter, value in zip(self.names, self.registered, self.parameters, strict=True):
            if shard_of(parameter)[0].data_ptr() != value.data_ptr():
                raise ParametersTouched(
                    f"{where}: the storage of parameter {name!r} was replaced (.to(...), .half()): move the "
                    "model to its device and dtype before wrapping"
                )

    def _every_parameter(self) -> Any:
        """Yield the registered parameters: while a module is gathered, it holds other tensors instead."""
        self._drop_gathered()
        return super()._every_parameter()

    def _drop_gathered(self) -> None:
        for module in self._gathered:
            module.reshard()


def check_reductions(modules: Iterable[nn.Module], where: object) -> None:
    """Raise unless FSDP2 reduces every gradient, and divides it by the number of ranks of its node.

    Raises:
        UsageError: It does not; the message names the setting.
    """
    for module in modules:
        for group in _groups_of(module):
            if group.gradient_divide_factor is not None:
                raise UsageError(
                    f"{where}: set_gradient_divide_factor({group.gradient_divide_factor}) on a module of "
                    "FSDP2: expected no such factor, because a job divides by the weights of its "
                    "micro-batches; remove the call, and weigh with parallel.backward(loss, weight)"
                )
            if not group.reduce_grads:
                raise UsageError(
                    f"{where}: set_requires_gradient_sync(False) on a module of FSDP2: expected True, because "
                    "otherwise gradients stay on each rank and no shard arrives; remove the call: "
                    "micro-batches accumulate in shards"
                )


def _groups_of(module: nn.Module) -> Sequence[Any]:
    """Return FSDP2's groups of a module's own parameters; its settings are not public."""
    if not isinstance(module, FSDPModule):
        return ()
    state = module._get_fsdp_state()
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # since PyTorch 2.12
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


class ShardedAccumulation(Accumulation):
    """The gradients of one rank's shards; see Note [Into the buffer].

    Args:
        parameters: Parameters that FSDP2 has sharded, in the layout's order.
        buffer: The buffer of the first round.
    """

    def __init__(self, parameters: Sequence[Tensor], buffer: GradientBuffer) -> None:
        self.parameters = parameters
        self._over: weakref.WeakKeyDictionary[GradientBuffer, list[Tensor]] = weakref.WeakKeyDictionary()
        self._num_shards = parameters[0].device_mesh.size()  # type: ignore[attr-defined]  # a DTensor
        self._is_foreign = False  # whether a backward pass that was not this job's has added to the buffer
        super().__init__(parameters, buffer)

    def begin(self, buffer: GradientBuffer, *, attached: bool = True) -> None:
        """Begin a round in `buffer`; gradients accumulate in it at once, or after `attach`."""
        super().begin(buffer, attached=False)
        if buffer not in self._over:
            pairs = zip(buffer.views, self.parameters, strict=True)
            self._over[buffer] = [_as_shard(view, parameter) for view, parameter in pairs]
        self.gradients = self._over[buffer]
        if attached:
            self.attach()

    def before_gradient(self, index: int, gradients: Gradients) -> Gradients | None:
        """Note that a gradient was added to a slot."""
        if self.stand_in is not None:
            return self.stand_in.before_gradient(index, gradients)
        if gradients[0] is None:
            return None
        if self._is_own_backward:
            self.has_arrived = True
            self.contribution.used[index] = 1
        else:
            self._is_foreign = True
        return None

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight` times the loss; a weight of zero adds zeros.

        Raises:
            UsageError: The loss has 16 bits, which would round its weight.
        """
        factor = weight * self._num_shards
        if (
            loss.dtype.itemsize < torch.float32.itemsize
            and float(torch.tensor(factor, dtype=loss.dtype)) != factor
        ):
            raise UsageError(
                f"weight {weight} and a loss of {loss.dtype}: gradients of shards take their weight from the "
                "loss, which would round it; pass loss.float()"
            )
        self._is_own_backward = True
        try:
            (loss if factor == 1.0 else loss * factor).backward()
        finally:
            self._is_own_backward = False
        self.remember()

    def check_untouched(self, where: object) -> None:
        """Raise if gradients were written outside this job's backward passes, or replaced."""
        if self._is_foreign:
            raise GradientsTouched(
                f"{where}: a backward pass outside this job (loss.backward(), or of another job) has added to "
                "the gradients of sharded parameters, where Stretto cannot separate it: use "
                "parallel.backward(loss), and torch.autograd.grad to look at other gradients"
            )
        super().check_untouched(where)


class EarlyShards(EarlyAccumulation, ShardedAccumulation):
    """Gradients of shards that are sent during the backward pass; see Note [Hidden reductions]."""

    def before_gradient(self, index: int, gradients: Gradients) -> Gradients | None:
        """Note that a gradient was added to a slot, and send complete buckets."""
        ShardedAccumulation.before_gradient(self, index, gradients)
        if self._leaves and gradients[0] is not None:
            self._come(index)
        return None


def _as_shard(local: Tensor, like: Any) -> Tensor:
    """Return a `DTensor` over the memory of `local`, sharded like `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
