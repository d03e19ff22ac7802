"""A few updates of small tensors by an optimizer of the user's class, in a plain loop and on owners."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import UnsupportedOptimizer
from stretto.flat import plan_layout
from stretto.optimizer.private import own_attributes, rebuild
from stretto.optimizer.segments import Segment
from stretto.optimizer.settings import Hyperparameters, read_hyperparameters
from stretto.optimizer.sharded import ReducedGradient, ShardedOptimizer
from stretto.optimizer.state import adopt_states, piece_states

# Number of updates: usual warm-ups and periods of ten are over at the last.
_UPDATES = 12
# Updates before which owners are replaced; not multiples of one number, so that an optimizer that counts steps modulo
# any number loses count after one of them.
_REPLACED_BEFORE = (2, 5)
_OWNERS = 2
# Elements of a trial tensor; 8-bit optimizers treat larger ones than 4096 in another way.
_NUMEL_MIN, _NUMEL_MAX = 64, 8192
# Learning rates of the trial; the user's rate may start at zero, where every optimizer looks harmless.
_LEARNING_RATES = (0.01, 0.02, 0.005)
# Scales of the gradients, so that a clip with any bound acts once.
_GRADIENT_SCALES = (1.0, 1e4, 1e-4)

Values = list[Tensor]
"""One tensor for each trial tensor, in order."""


class Collectives(TorchDispatchMode):
    """Raises where a step communicates: ranks own different tensors, so that they would wait for each other forever."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise UnsupportedOptimizer(
                f"{self._name} communicates in its step ({func.name()}): expected steps of this rank alone, "
                "because Stretto assigns tensors to ranks and sends the new values; pass the same optimizer "
                "without its collectives, as [torch.optim.Muon(matrices), torch.optim.AdamW(others)]"
            )
        return func(*args, **(kwargs or {}))


class Trial:
    """Small tensors in the user's groups, two for every kind of parameter there, and gradients for them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = rebuild(optimizer, [[] for _ in optimizer.param_groups])
        """An optimizer without the user's parameters, to which a kept trial must not refer."""
        self.starts: Values = []
        self.group_of: list[int] = []
        """The group of every trial tensor."""
        generator = torch.Generator().manual_seed(0)
        kinds = [
            (i, like) for i, group in enumerate(optimizer.param_groups) for like in _kinds(group["params"])
        ]
        largest = max((like.numel() for _, like in kinds), default=0)
        self.numel = min(max(largest, _NUMEL_MIN), _NUMEL_MAX)
        """Elements of every trial tensor, except for rounding."""
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
        """Text that is equal for trials with the same outcome; None if there is none."""

    def rebuilt(self, stands_for: Mapping[int, Tensor]) -> torch.optim.Optimizer:
        """Return a fresh optimizer over tensors that represent the trial tensors of these indices."""
        groups: list[Values] = [[] for _ in self.optimizer.param_groups]
        for index, tensor in stands_for.items():
            groups[self.group_of[index]].append(tensor)
        return rebuild(self.optimizer, groups)

    def train(self, chosen: Sequence[int], *, attributes: bool = True) -> "PlainLoop":
        """Train the `chosen` tensors with one optimizer, with or without the attributes that the user has set on
        parameters.
        """
        return PlainLoop(
            self,
            {
                index: _twin(self.starts[index])
                if attributes
                else nn.Parameter(self.starts[index].detach().clone())
                for index in chosen
            },
        )


class PlainLoop:
    """The results of a plain loop over some trial tensors."""

    def __init__(self, trial: Trial, tensors: Mapping[int, Tensor]) -> None:
        self.history: list[Values] = []
        """The values after every update."""
        self.groups: list[list[dict[str, str]]] = []
        """The content of the parameter groups after every update."""
        self.changed: set[str] = set()
        """Entries of parameter groups that a step has changed."""
        self.wrote_gradients = False
        self.counts: set[str] = set()
        """Integer attributes of the optimizer that every step has changed."""
        places = [tensor.data_ptr() for tensor in tensors.values()]
        random_state = torch.get_rng_state()
        optimizer = trial.rebuilt(tensors)
        for update, (gradients, settings) in enumerate(zip(trial.gradients, trial.settings, strict=True)):
            for group, one in zip(optimizer.param_groups, settings, strict=True):
                group.update({key: value for key, value in one.items() if key == "lr"})
            before, numbers = described_groups(optimizer), _whole_numbers(optimizer)
            for index, tensor in tensors.items():
                tensor.grad = gradients[index].clone()
            optimizer.step()
            self.wrote_gradients |= not all(
                tensor.grad is not None and torch.equal(tensor.grad, gradients[index])
                for index, tensor in tensors.items()
            )
            self.groups.append(described_groups(optimizer))
            for old, new in zip(before, self.groups[-1], strict=True):
                self.changed |= {key for key in new if old.get(key) != new[key]}
            counted = {key for key, value in _whole_numbers(optimizer).items() if numbers.get(key) != value}
            self.counts = counted & self.counts if update > 1 else counted
            self.history.append([tensor.detach().clone() for tensor in tensors.values()])
        self.is_random = not torch.equal(random_state, torch.get_rng_state())
        self.moved = places != [tensor.data_ptr() for tensor in tensors.values()]
        """Whether a parameter got another storage."""


class Owners:
    """The results of owners that step the trial tensors, as in a job whose optimizer is sharded.

    They preview every step. Twice they are replaced by new owners that receive only the masters, the state by parameter
    and the groups, as from a checkpoint.
    """

    def __init__(self, trial: Trial) -> None:
        self.history: list[Values] = []
        """The values after every update; NaN if a preview gave different values."""
        self.groups: list[list[list[dict[str, str]]]] = []
        """The content of every owner's parameter groups after every update."""
        self.state: dict[tuple[int, str], str] = {}
        """Kind of every entry of the state after the first update, by group and name: number, tensor, plain or
        other."""
        self.later_state: dict[tuple[int, str], str] = {}
        """The kinds after the last update."""
        model = nn.ParameterList(_twin(start) for start in trial.starts)
        self._optimizer = trial.rebuilt(dict(enumerate(model)))
        self._layout, self._parameters = plan_layout(
            model,
            self._optimizer,
            world_size=_OWNERS,
            bucket_bytes=trial.numel * 4,
            widen=True,
            whole_groups=frozenset(trial.group_of),
        )
        # The content that a checkpoint has loaded into the user's groups.
        self._loaded: Hyperparameters = [{} for _ in self._optimizer.param_groups]
        self._owners = self._new_owners()
        for update, (gradients, settings) in enumerate(zip(trial.gradients, trial.settings, strict=True)):
            if update in _REPLACED_BEFORE:
                self._replace()
            self._step(
                gradients,
                [
                    {**one, **loaded, **{key: value for key, value in one.items() if key == "lr"}}
                    for one, loaded in zip(settings, self._loaded, strict=True)
                ],
            )
            self.groups.append([described_groups(owner.optimizer) for owner in self._owners])
            self.later_state = self._kinds_of_state()
            self.state = self.state or self.later_state

    def _new_owners(self) -> list[ShardedOptimizer]:
        return [
            ShardedOptimizer(self._layout, self._parameters, self._optimizer, rank=rank, num_owners=_OWNERS)
            for rank in range(_OWNERS)
        ]

    def _replace(self) -> None:
        self._loaded = [
            {**loaded, **changes}
            for loaded, changes in zip(self._loaded, self._owners[0].changes(), strict=True)
        ]
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
            owner.preview(reduced, settings, 1.0, previewed)
            owner.step(reduced, settings, 1.0)
            owner.publish(stepped)
        for found, expected in zip(stepped, previewed, strict=True):
            found[found != expected] = torch.nan
        slots = sorted(self._layout.slots, key=lambda slot: int(slot.name))
        self.history.append(
            [stepped[slot.set_index][slot.start : slot.stop].view(slot.shape) for slot in slots]
        )

    def _reduced(self, owner: ShardedOptimizer, gradients: Values) -> ReducedGradient:
        """Return the result of a reduction for an owner."""
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


def described_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return texts of the content of every parameter group."""
    return [{key: repr(value) for key, value in group.items()} for group in read_hyperparameters(optimizer)]


def _whole_numbers(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    return {key: value for key, value in own_attributes(optimizer).items() if type(value) is int}


def _described(value: Any) -> str | None:
    """Return a text that is equal for equal values; None for objects other than numbers, words and their containers."""
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
    """Return a new parameter with the values and the attributes of `start`."""
    twin = nn.Parameter(start.detach().clone())
    vars(twin).update(vars(start))
    return twin


def _kinds(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest parameter of every kind that a rule of the optimizer may distinguish."""
    found: dict[Any, Tensor] = {}
    for parameter in sorted(parameters, key=Tensor.numel):
        if parameter.requires_grad:
            found[parameter.dim(), parameter.dtype, parameter.device, tuple(vars(parameter))] = parameter
    return list(found.values())


def _small(like: Tensor, numel: int, generator: torch.Generator) -> nn.Parameter:
    """Return a parameter of the kind of `like` with at least `numel` elements and the dtype of its master.

    A matrix is nearly square, so that an optimizer that decomposes products of its rows or columns is soon done.
    """
    leading = [2] * (like.dim() - 2)
    rest = math.ceil(numel / 2 ** len(leading))
    rows = [2 ** (rest.bit_length() // 2)] if like.dim() > 1 else []
    shape = [*leading, *rows, math.ceil(numel / math.prod(leading + rows))]
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
    return f"tensor of {value.numel()} for {segment.master.numel()}"
