"""Which optimizers may be sharded, and how: found out by a trial, because names prove nothing.

The optimizer trains a few small tensors twice, as a plain loop does and on owners. If every bit agrees, it works
element by element, and all that it remembers is in `optimizer.state[parameter]`. A group for which they do not agree is
tried again on owners that hold whole tensors. If every bit agrees then, it works tensor by tensor. Otherwise further
trials show why.
"""

import functools

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer
from stretto.optimizer.private import wrapped_optimizer
from stretto.optimizer.several import members_of
from stretto.optimizer.trial import Owners, PlainLoop, Trial, Values


def whole_groups(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the groups whose tensors must stay whole, so that owners step as a plain loop does, to the bit.

    Args:
        optimizer: The user's. Its class and settings are tried on other tensors; it is never stepped.

    Raises:
        UnsupportedOptimizer: The results differ in any case, or the optimizer cannot step tensors by itself.
    """
    found: set[int] = set()
    first = 0
    for member in members_of(optimizer):
        found |= {first + index for index in _whole_groups_of_one(member)}
        first += len(member.param_groups)
    return frozenset(found)


def _whole_groups_of_one(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    _check_kind(optimizer)
    name = type(optimizer).__name__
    _check_calls(optimizer, name)
    try:
        trial = Trial(optimizer)
        with torch.random.fork_rng({start.device for start in trial.starts if start.is_cuda}):
            verdict = _verdict(trial) if trial.description is None else _verdict_once(_Described(trial))
    except UnsupportedOptimizer:
        raise
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{name} cannot step a tensor by itself ({type(error).__name__}: {error}): expected an optimizer such as "
            "AdamW or Muon"
        ) from error
    if isinstance(verdict, str):
        raise UnsupportedOptimizer(f"{name} cannot be cut into shards: {verdict}")
    return verdict


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless it is an optimizer, and one that has not stepped."""
    held = wrapped_optimizer(optimizer)
    if held is not None and _num_parameters(getattr(optimizer, held)) < _num_parameters(optimizer):
        inner = type(getattr(optimizer, held)).__name__
        raise UnsupportedOptimizer(
            f"optimizer: found a {type(optimizer).__name__}, which steps this rank's share of the parameters with its "
            f"own {inner}: expected the {inner} over all of them, as in {inner}(model.parameters(), ...); the strategy "
            "ZeRO1() shards it"
        )
    if held is not None or not isinstance(optimizer, torch.optim.Optimizer):
        found = f"found a {type(optimizer).__name__}"
        meant = f" around another optimizer; hand over its .{held}, without what the wrapper adds"
        raise UnsupportedOptimizer(
            f"optimizer: expected a torch.optim.Optimizer, or several, {found}{meant if held else ''}"
        )
    # Adagrad has state from the start, at step 0; a momentum has no step count.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        raise UnsupportedOptimizer(
            "optimizer: expected one that has not stepped yet, found state that the library's private optimizer "
            "would not have; make it anew and wrap it before training, or go on from a checkpoint"
        )


def _num_parameters(optimizer: object) -> int:
    return sum(len(group["params"]) for group in getattr(optimizer, "param_groups", ()))


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
def _verdict_once(described: _Described) -> frozenset[int] | str:
    return _verdict(described.trial)


def _verdict(trial: Trial) -> frozenset[int] | str:
    """Return the groups whose tensors must stay whole, or why the optimizer may not be sharded at all."""
    trial.rebuilt({}).step()  # a rank may own nothing
    plain = trial.train(range(len(trial.starts)))
    if plain.is_random:
        return "its steps draw random numbers, so that no two runs are equal; expected steps without them"
    owners, whole = _cut(trial, plain, frozenset(trial.group_of))
    if owners is None or whole:
        owners = Owners(trial, whole)
    return _reason_against(trial, plain, owners) or whole


def _cut(trial: Trial, plain: PlainLoop, groups: frozenset[int]) -> tuple[Owners | None, frozenset[int]]:
    """Cut the tensors of some groups, and leave all others whole.

    Returns:
        The owners, if they could step at all; and those of the groups that they have stepped in another way than the
        plain loop, or keep other state for.
    """
    try:
        owners = Owners(trial, frozenset(trial.group_of) - groups)
    except Exception:  # an optimizer may refuse slices in any way
        if len(groups) <= 1:
            return None, groups
        return None, frozenset().union(*(_cut(trial, plain, frozenset([group]))[1] for group in groups))
    keep = {group for (group, _), kind in owners.later_state.items() if kind == "other"}
    step = {
        group
        for ones, others in zip(plain.history, owners.history, strict=True)
        for group, one, other in zip(trial.group_of, ones, others, strict=True)
        if not torch.equal(one, other)
    }
    return owners, groups & (keep | step)


def _reason_against(trial: Trial, plain: PlainLoop, owners: Owners) -> str | None:
    """Return why the optimizer may not be sharded as `owners` did; None if it may."""
    odd = sorted({key for (_, key), kind in owners.later_state.items() if kind == "other"})
    if odd:
        return f"its state {odd} is neither a number nor a tensor; expected no other kinds"
    if not _is_equal(plain.history, owners.history):
        return _difference(trial, plain)
    if owners.wrote_gradients:
        return (
            "its steps write into .grad, which some strategies use twice; expected p.grad.add(...) in the place of "
            "p.grad.add_(...)"
        )
    if owners.later_state != owners.state:
        first, later = (sorted({key for _, key in state}) for state in (owners.state, owners.later_state))
        return (
            f"its state is {first} at first and {later} later, or of another size; expected every entry from the first "
            "step on, because checkpoints rely on it"
        )
    return None


def _difference(trial: Trial, plain: PlainLoop) -> str:
    """Return what makes owners of whole tensors differ from the plain loop."""
    if not all(values.isfinite().all() for update in plain.history for values in update):
        return "with its settings values are not finite after a few steps; expected finite settings in its param_groups"
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
            "Options(clip_norm=...), and take an optimizer that treats each parameter by itself, such as AdamW or Muon"
        )
    if not _is_equal(plain.history, trial.train_parts(Tensor.clone).history):
        return (
            "what it does depends on an attribute of the parameter, which owners do not have; expected settings in "
            "parameter groups"
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
