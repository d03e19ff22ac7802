"""A few updates of small tensors by an optimizer of the user's class, as a plain loop makes them and as owners do."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from stretto.flat import ALIGNMENT, plan_layout
from stretto.optimizer.private import is_elementwise, own_attributes, rebuild
from stretto.optimizer.segments import Segment
from stretto.optimizer.settings import Hyperparameters, read_hyperparameters
from stretto.optimizer.sharded import ReducedGradient, ShardedOptimizer
from stretto.optimizer.state import adopt_states, piece_states

_UPDATES = 6
"""The warm-up of RAdam and the period of Lookahead, as these are usually set, are over at the last."""
_REPLACED_BEFORE = (2, 5)
"""Not at multiples of one number: whoever counts steps, to whatever number, has lost count after one of the two."""
_OWNERS = 2
_NUMEL_MIN, _NUMEL_MAX = 3 * ALIGNMENT, 8192
"""Elements of a trial tensor: enough to be cut; 8-bit optimizers treat those above 4096 in another way."""
_LEARNING_RATES = (0.01, 0.02, 0.005)
"""Not the user's, which may start at zero, where every optimizer looks harmless."""
_GRADIENT_SCALES = (1.0, 1e4, 1e-4)
"""So that a clip acts once, whatever its bound."""

Values = list[Tensor]
"""One tensor for each trial tensor, in order."""


class Trial:
    """Small tensors in the user's groups, two for every kind of parameter there, and gradients for them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = rebuild(optimizer, [[] for _ in optimizer.param_groups])
        """Without the user's parameters, which a trial that is kept must not hold."""
        self.starts: Values = []
        self.group_of: list[int] = []
        """The group of every trial tensor."""
        generator = torch.Generator().manual_seed(0)
        kinds = [
            (i, like) for i, group in enumerate(optimizer.param_groups) for like in _kinds(group["params"])
        ]
        largest = max((like.numel() for _, like in kinds), default=0)
        self.numel = min(max(largest, _NUMEL_MIN), _NUMEL_MAX)
        """Elements of every trial tensor, but for rounding."""
        # Two of a kind, because what couples parameters shows between two.
        for index, like in kinds * 2:
            self.starts.append(_small(like, self.numel, generator))
            self.group_of.append(index)
        self.gradients = [
            [torch.randn(start.shape, generator=generator).to(start).mul_(scale) for start in self.starts]
            for scale in islice(cycle(_GRADIENT_SCALES), _UPDATES)
        ]
        self.settings = [
            [_with_rate(one, rate) for one in read_hyperparameters(optimizer)]
            for rate in islice(cycle(_LEARNING_RATES), _UPDATES)
        ]

        attributes = [vars(start) for start in self.starts]
        kinds_tried = [(start.shape, start.dtype, start.device) for start in self.starts]
        chosen = (self.settings, optimizer.defaults, own_attributes(optimizer), attributes)
        told = [*map(_described, chosen), repr(kinds_tried)]
        self.description = None if None in told else (type(optimizer), *told, tuple(self.group_of))
        """Equal for trials with the same outcome; None where it cannot be said."""

    def rebuilt(self, stands_for: Mapping[int, Tensor]) -> torch.optim.Optimizer:
        """Return a fresh optimizer over tensors, each of which stands for the trial tensor of that index."""
        groups: list[Values] = [[] for _ in self.optimizer.param_groups]
        for index, tensor in stands_for.items():
            groups[self.group_of[index]].append(tensor)
        return rebuild(self.optimizer, groups)

    def train(self, chosen: Sequence[int]) -> "PlainLoop":
        """Train the `chosen` tensors with one optimizer."""
        return PlainLoop(self, {index: _twin(self.starts[index]) for index in chosen}, Tensor.clone)

    def train_parts(self, part: Callable[[Tensor], Tensor]) -> "PlainLoop":
        """Train a part of every tensor, as a tensor without attributes."""
        parts = {index: nn.Parameter(part(start.detach()).clone()) for index, start in enumerate(self.starts)}
        return PlainLoop(self, parts, part)


class PlainLoop:
    """What a plain loop makes of some trial tensors."""

    def __init__(self, trial: Trial, tensors: Mapping[int, Tensor], part: Callable[[Tensor], Tensor]) -> None:
        self.history: list[Values] = []
        """The values after every update."""
        self.changed: set[str] = set()
        """Entries of parameter groups that a step has changed."""
        places = [tensor.data_ptr() for tensor in tensors.values()]
        random_state = torch.get_rng_state()
        optimizer = trial.rebuilt(tensors)
        for gradients, settings in zip(trial.gradients, trial.settings, strict=True):
            for group, one in zip(optimizer.param_groups, settings, strict=True):
                group.update({key: value for key, value in one.items() if key == "lr"})
            before = read_hyperparameters(optimizer)
            for index, tensor in tensors.items():
                tensor.grad = part(gradients[index])
            optimizer.step()
            for old, new in zip(before, read_hyperparameters(optimizer), strict=True):
                self.changed |= {key for key in new if key not in old or repr(old[key]) != repr(new[key])}
            self.history.append([tensor.detach().clone() for tensor in tensors.values()])
        self.is_random = not torch.equal(random_state, torch.get_rng_state())
        self.moved = places != [tensor.data_ptr() for tensor in tensors.values()]
        """Whether a parameter got another storage."""


class Owners:
    """What owners make of the trial tensors, as in a job whose optimizer is sharded.

    They preview every step. Twice they are replaced by others that get the masters and the state by parameter, and
    nothing else, as from a checkpoint.

    Args:
        trial: What is tried.
        whole: Groups whose tensors are not cut.
    """

    def __init__(self, trial: Trial, whole: Collection[int]) -> None:
        self.history: list[Values] = []
        """The values after every update; not a number where a preview has shown others."""
        self.wrote_gradients = False
        self.state: dict[tuple[int, str], str] = {}
        """Kind of every entry of the state after the first update, by group and name: number, moment, tensor of a whole
        parameter, plain or other."""
        self.later_state: dict[tuple[int, str], str] = {}
        """The same after the last."""
        model = nn.ParameterList(_twin(start) for start in trial.starts)
        self._optimizer = trial.rebuilt(dict(enumerate(model)))
        # No slice of such a bucket holds a whole tensor, so each is cut that may be.
        self._layout, self._parameters = plan_layout(
            model,
            self._optimizer,
            world_size=_OWNERS,
            bucket_bytes=trial.numel * 4,
            widen=True,
            whole_groups=whole,
        )
        self._owners = self._new_owners()
        for update, (gradients, settings) in enumerate(zip(trial.gradients, trial.settings, strict=True)):
            if update in _REPLACED_BEFORE:
                self._replace()
            self._step(gradients, settings)
            self.later_state = self._kinds_of_state()
            self.state = self.state or self.later_state

    def _new_owners(self) -> list[ShardedOptimizer]:
        return [
            ShardedOptimizer(self._layout, self._parameters, self._optimizer, rank=rank, num_owners=_OWNERS)
            for rank in range(_OWNERS)
        ]

    def _replace(self) -> None:
        former, self._owners = self._owners, self._new_owners()
        for old, new in zip(former, self._owners, strict=True):
            for master, value in zip(new.masters, old.masters, strict=True):
                master.copy_(value)
            adopt_states(new, dict(piece_states(old)))

    def _step(self, gradients: Values, settings: Hyperparameters) -> None:
        previewed, stepped = (
            [torch.zeros(one.numel, dtype=one.dtype, device=one.device) for one in self._layout.sets]
            for _ in range(2)
        )
        for owner in self._owners:
            reduced = self._reduced(owner, gradients)
            sums = [one.clone() for one in reduced.sums]
            owner.preview(reduced, settings, 1.0, previewed)
            owner.step(reduced, settings, 1.0)
            owner.publish(stepped)
            self.wrote_gradients |= not all(map(torch.equal, sums, reduced.sums))
        for found, expected in zip(stepped, previewed, strict=True):
            found[found != expected] = torch.nan
        slots = sorted(self._layout.slots, key=lambda slot: int(slot.name))
        self.history.append(
            [stepped[slot.set_index][slot.start : slot.stop].view(slot.shape) for slot in slots]
        )

    def _reduced(self, owner: ShardedOptimizer, gradients: Values) -> ReducedGradient:
        """Return what a reduction would give an owner."""
        sums = owner.new_sums()
        for piece in owner.pieces:
            flat = gradients[int(piece.slot.name)].flatten()
            owner.values(sums, piece).copy_(flat[piece.offset : piece.offset + piece.numel])
        return ReducedGradient(sums, 1.0, 0.0, bytes([1] * len(self._layout.slots)))

    def _kinds_of_state(self) -> dict[tuple[int, str], str]:
        return {
            (segment.group, key): _kind(value, segment)
            for owner in self._owners
            for segment in owner.segments
            for key, value in owner.optimizer.state.get(segment.master, {}).items()
        }


def _described(value: Any) -> str | None:
    """Return text that is equal for equal values; None for what is more than numbers, words and their containers."""
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        parts = [_described(one) for one in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    is_told = value is None or isinstance(
        value, bool | int | float | complex | str | torch.dtype | torch.device
    )
    return repr(value) if is_told else None


def _twin(start: Tensor) -> nn.Parameter:
    """Return a parameter of its own with the values and the attributes of `start`."""
    twin = nn.Parameter(start.detach().clone())
    vars(twin).update(vars(start))
    return twin


def _kinds(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest parameter of every kind that a rule of the optimizer may tell apart."""
    found: dict[Any, Tensor] = {}
    for parameter in sorted(parameters, key=Tensor.numel):
        if parameter.requires_grad:
            found[parameter.dim(), parameter.dtype, parameter.device, tuple(vars(parameter))] = parameter
    return list(found.values())


def _small(like: Tensor, numel: int, generator: torch.Generator) -> nn.Parameter:
    """Return a parameter of the kind of `like` with at least `numel` elements and the dtype of its master.

    Its size is a multiple of `ALIGNMENT`, so that fused optimizers see the same vector lanes however it is cut. A
    matrix is nearly square, so that an optimizer that decomposes products of its rows or columns is soon done.
    """
    leading = [2] * (like.dim() - 2)
    rest = math.ceil(numel / 2 ** len(leading))
    rows = [2 ** (rest.bit_length() // 2)] if like.dim() > 1 else []
    before = math.prod(leading + rows)
    unit = max(1, ALIGNMENT // before)
    shape = [*leading, *rows, unit * math.ceil(numel / before / unit)]
    start = nn.Parameter(torch.randn(shape, generator=generator).to(like.device, _master_dtype(like)))
    vars(start).update(vars(like))
    return start


def _master_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _with_rate(settings: dict[str, Any], rate: float) -> dict[str, Any]:
    if settings.get("lr") is None:
        return settings
    given = settings["lr"]
    return {**settings, "lr": torch.full_like(given, rate) if isinstance(given, Tensor) else rate}


def _kind(value: Any, segment: Segment) -> str:
    if not isinstance(value, Tensor):
        return "plain" if value is None or isinstance(value, bool | int | float | str) else "other"
    if value.dim() == 0:
        return "number"
    if segment.pieces[0].slot.is_whole:
        return f"tensor of {value.numel()} for {segment.master.numel()}"
    return "moment" if is_elementwise(value, segment.master) else "other"
