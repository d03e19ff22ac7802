"""Which optimizers may be sharded: found out by a trial, because names prove nothing.

The optimizer trains a few small tensors twice, as a plain loop does and on owners. If every bit agrees, it works
element by element, and all that it remembers is in `optimizer.state[parameter]`. Otherwise further trials show why.
"""

import functools

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer
from stretto.optimizer.trial import Owners, PlainLoop, Trial, Values


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless stepping parameters whole equals stepping flat pieces of them on owners, to the bit.

    Args:
        optimizer: The user's. Its class and settings are tried on other tensors; it is never stepped.

    Raises:
        UnsupportedOptimizer: The results differ, or the optimizer cannot step flat tensors by itself.
    """
    name = type(optimizer).__name__
    _check_calls(optimizer, name)
    try:
        trial = Trial(optimizer)
        with torch.random.fork_rng({start.device for start in trial.starts if start.is_cuda}):
            reason = _reason_against(trial) if trial.description is None else _reason_once(_Described(trial))
    except UnsupportedOptimizer:
        raise
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{name} cannot step a flat tensor by itself ({type(error).__name__}: {error}): expected an "
            "element-wise optimizer such as AdamW or SGD"
        ) from error
    if reason:
        raise UnsupportedOptimizer(f"{name} cannot be cut into shards: {reason}")


def _check_calls(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise if something is to happen at the `step` of the user's own optimizer, which no job calls."""
    given = vars(optimizer)
    if any(given.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        raise UnsupportedOptimizer(
            f"{name} has step hooks, which would never be called, because a private optimizer is stepped: remove them; "
            "clip with Options(clip_norm=...), and do what follows a step when an Update is returned"
        )
    if "step" in given and not hasattr(given["step"], "_wrapped_by_lr_sched"):
        raise UnsupportedOptimizer(
            f"{name}.step was replaced on the instance, and would never be called, because a private optimizer is "
            "stepped: override step in a subclass"
        )


class _Described:
    """A trial that is equal to every other with the same description."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self.trial.description == other.trial.description

    def __hash__(self) -> int:
        return hash(self.trial.description)


@functools.lru_cache(maxsize=8)  # a process with many ranks or jobs asks for the same one again and again
def _reason_once(described: _Described) -> str | None:
    return _reason_against(described.trial)


def _reason_against(trial: Trial) -> str | None:
    """Return why the optimizer may not be sharded; None if it may."""
    trial.rebuilt({}).step()  # a rank may own nothing
    plain = trial.train(range(len(trial.starts)))
    if plain.is_random:
        return "its steps draw random numbers, so that no two runs are equal; expected steps without them"
    owners = Owners(trial)
    if not _is_equal(plain.history, owners.history):
        return _difference(trial, plain)
    if owners.wrote_gradients:
        return (
            "its steps write into .grad, which some strategies use twice; expected p.grad.add(...) in the place of "
            "p.grad.add_(...)"
        )
    odd = [key for key, kind in owners.later_state.items() if kind == "other"]
    if odd:
        return f"its state {odd} is neither a number nor one value per element; expected no other kinds"
    if owners.later_state != owners.state:
        return (
            f"its state is {sorted(owners.state)} at first and {sorted(owners.later_state)} later; expected every "
            "entry from the first step on, because checkpoints rely on it"
        )
    return None


def _difference(trial: Trial, plain: PlainLoop) -> str:
    """Return what makes owners differ from the plain loop."""
    if plain.moved:
        return "it gives parameters another storage; expected steps in place, such as p.data.add_(...)"
    if plain.changed:
        return (
            f"it keeps state in its parameter groups ({', '.join(sorted(plain.changed))}), which are set from yours "
            "before every step; expected all state in optimizer.state[parameter]"
        )
    everything = range(len(trial.starts))
    alone = [trial.train([index]).history for index in everything]
    if not _is_equal(plain.history, _side_by_side(alone)):
        return (
            "what it does to one parameter depends on others, as with a norm of all gradients; clip with "
            "Options(clip_norm=...), and take an element-wise optimizer such as AdamW or SGD"
        )
    first, second = (trial.train_parts(half).history for half in (_first_half, _second_half))
    whole = [[tensor.flatten() for tensor in update] for update in plain.history]
    if not _is_equal(whole, [list(map(_joined, *pair)) for pair in zip(first, second, strict=True)]):
        return (
            "what it does to an element depends on the shape, the norm or an attribute of the parameter, and shards "
            "are flat pieces; expected an element-wise optimizer such as AdamW or SGD"
        )
    return (
        "it remembers something outside optimizer.state[parameter], in an attribute of its own, for example, which "
        "previews and checkpoints do not see; expected all state there"
    )


def _is_equal(one: list[Values], other: list[Values]) -> bool:
    return all(
        torch.equal(left, right)
        for ones, others in zip(one, other, strict=True)
        for left, right in zip(ones, others, strict=True)
    )


def _side_by_side(histories: list[list[Values]]) -> list[Values]:
    return [[tensor for values in update for tensor in values] for update in zip(*histories, strict=True)]


def _first_half(tensor: Tensor) -> Tensor:
    return tensor.flatten()[: tensor.numel() // 2]


def _second_half(tensor: Tensor) -> Tensor:
    return tensor.flatten()[tensor.numel() // 2 :]


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second])
