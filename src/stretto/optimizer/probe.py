"""Which optimizers may be sharded, and how.

Tensors are cut if the class is known to work element by element, and stay whole otherwise. A trial shows whether owners
may step whole tensors: the optimizer trains a few small tensors twice, in a plain loop and on owners, and every bit
must agree. The class's name does not count there. If bits differ, further trials show why.
"""

import functools

import torch

from stretto.errors import UnsupportedOptimizer
from stretto.optimizer.private import wrapped_optimizer
from stretto.optimizer.several import members_of
from stretto.optimizer.trial import Collectives, Owners, PlainLoop, Trial, Values

ELEMENT_WISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
    *(torch.optim.Rprop, torch.optim.ASGD),
)
"""Classes whose tensors may be cut. A trial cannot find others, because a rule may depend on values that only
training brings: a direction, a size, a time. A subclass does not count unless it sets `element_wise` itself, because
it may do anything."""


def whole_groups(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the groups whose tensors must stay whole, so that owners step as a plain loop does, to the bit.

    Args:
        optimizer: The user's optimizer. Its class and settings are tried on other tensors; it is never stepped.

    Raises:
        UnsupportedOptimizer: The results differ in any case, or the optimizer cannot step tensors alone.
    """
    found: set[int] = set()
    first = 0
    for member in members_of(optimizer):
        _check_kind(member)
        last = first + len(member.param_groups)
        _check_calls(member, type(member).__name__)
        if type(member) not in ELEMENT_WISE:
            _check_rule(member, type(member).__name__)
            if not vars(type(member)).get("element_wise"):
                found.update(range(first, last))
        first = last
    return frozenset(found)


def _check_rule(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise unless owners that step whole tensors give the same result as a plain loop."""
    try:
        trial = Trial(optimizer)
        with (
            torch.random.fork_rng({start.device for start in trial.starts if start.is_cuda}),
            Collectives(name),
        ):
            reason = _reason(trial) if trial.description is None else _reason_once(_Described(trial))
    except UnsupportedOptimizer:
        raise
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{name} cannot step a tensor alone ({type(error).__name__}: {error}): expected an optimizer such "
            "as AdamW or Muon"
        ) from error
    if reason is not None:
        raise UnsupportedOptimizer(f"{name} cannot be cut into shards: {reason}")


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless it is an optimizer that has not stepped."""
    held = wrapped_optimizer(optimizer)
    if held is not None and _num_parameters(getattr(optimizer, held)) < _num_parameters(optimizer):
        inner = type(getattr(optimizer, held)).__name__
        raise UnsupportedOptimizer(
            f"optimizer: found a {type(optimizer).__name__}, which steps the parameters of this rank's share "
            f"with its own {inner}: expected the {inner} over all parameters, as in "
            f"{inner}(model.parameters(), ...); the strategy ZeRO1() shards it"
        )
    if held is not None or not isinstance(optimizer, torch.optim.Optimizer):
        found = f"found a {type(optimizer).__name__}"
        meant = f" around another optimizer; pass its .{held}, without the wrapper"
        raise UnsupportedOptimizer(
            f"optimizer: expected a torch.optim.Optimizer, or several, {found}{meant if held else ''}"
        )
    # Adagrad has state from the start, at step 0; a momentum has no step count.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        raise UnsupportedOptimizer(
            "optimizer: expected an optimizer that has not stepped yet, found state that the private optimizer of "
            "Stretto would not have; make a new optimizer, wrap it before training, and load a checkpoint; "
            "parallel.load_state_dict takes the moments of a plain run, as the page optimizers shows under Moving in"
        )


def _num_parameters(optimizer: object) -> int:
    return sum(len(group["params"]) for group in getattr(optimizer, "param_groups", ()))


def _check_calls(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise if code is attached to the `step` of the user's own optimizer, which no job calls."""
    given = vars(optimizer)
    if any(given.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")):
        raise UnsupportedOptimizer(
            f"{name} has step hooks, which would never run, because Stretto steps a private optimizer: remove them; "
            "clip with Options(clip_norm=...), and run code that follows a step when an Update is returned"
        )
    if "step" in given and not hasattr(given["step"], "_wrapped_by_lr_sched"):
        raise UnsupportedOptimizer(
            f"{name}.step was replaced on the instance and would never run, because Stretto steps a private "
            "optimizer: override step in a subclass"
        )


class _Described:
    """A trial that is equal to every trial with the same description."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Described) and self.trial.description == other.trial.description

    def __hash__(self) -> int:
        return hash(self.trial.description)


@functools.lru_cache(maxsize=8)  # a process with many ranks or jobs asks for the same one again and again
def _reason_once(described: _Described) -> str | None:
    return _reason(described.trial)


def _reason(trial: Trial) -> str | None:
    """Return why the optimizer may not be sharded; None if it may."""
    if callable(getattr(trial.optimizer, "eval", None)):
        return (
            "its eval() shows averages from state that your optimizer does not have during a job; use AdamW "
            "with a schedule"
        )
    plain = trial.train(range(len(trial.starts)))
    if plain.is_random:
        return (
            "its steps draw random numbers, so no two runs are equal; expected steps without random numbers"
        )
    if plain.wrote_gradients:
        return (
            "its steps write into .grad, which some strategies use twice; expected p.grad.add(...) instead "
            "of p.grad.add_(...), and p.grad.clamp(-bound, bound) instead of clip_grad_value_"
        )
    trial.rebuilt({}).step()  # a rank may own nothing
    owners = Owners(trial)
    odd = sorted({key for (_, key), kind in owners.later_state.items() if kind == "other"})
    if odd:
        return f"its state {odd} is neither a number nor a tensor; expected no other kinds"
    if not _is_equal(plain.history, owners.history):
        return _difference(trial, plain)
    if uneven := sorted(
        {
            key
            for groups, of_owners in zip(plain.groups, owners.groups, strict=True)
            for of_owner in of_owners
            for one, other in zip(groups, of_owner, strict=True)
            for key in one.keys() | other.keys()
            if key in plain.changed and one.get(key) != other.get(key)
        }
    ):
        return (
            f"it keeps values of all parameters together in its parameter groups ({', '.join(uneven)}); use "
            "an optimizer that steps each parameter alone, such as AdamW or Muon"
        )
    if plain.counts:
        return (
            f"it counts in its own attribute ({', '.join(sorted(plain.counts))}), which previews and "
            "checkpoints do not see; expected all state in optimizer.state[parameter]"
        )
    if owners.later_state != owners.state:
        first, later = (sorted({key for _, key in state}) for state in (owners.state, owners.later_state))
        return (
            f"its state is {first} at first and {later} later, or changes its size; expected every entry from "
            "the first step on, because checkpoints rely on it"
        )
    return None


def _difference(trial: Trial, plain: PlainLoop) -> str:
    """Return why owners and a plain loop differ."""
    if not all(values.isfinite().all() for update in plain.history for values in update):
        return "with these settings values are not finite after a few steps; expected finite settings in param_groups"
    if plain.moved:
        return "it gives parameters another storage; expected steps in place, such as p.data.add_(...)"
    everything = range(len(trial.starts))
    alone = [trial.train([index]).history for index in everything]
    side_by_side = [[one for values in update for one in values] for update in zip(*alone, strict=True)]
    if not _is_equal(plain.history, side_by_side):
        return (
            "its step of one parameter depends on other parameters, as a norm of all gradients does; clip "
            "with Options(clip_norm=...), switch off the clip in the optimizer, and use an optimizer that "
            "steps each parameter alone, such as AdamW or Muon"
        )
    if not _is_equal(plain.history, trial.train(everything, attributes=False).history):
        return (
            "its step depends on an attribute of the parameter, which the private copies do not have; "
            "expected settings in parameter groups"
        )
    return (
        "it keeps state outside optimizer.state[parameter], for example in its own attribute, which previews "
        "and checkpoints do not see; expected all state in optimizer.state"
    )


def _is_equal(one: list[Values], other: list[Values]) -> bool:
    return all(
        torch.equal(left, right)
        for ones, others in zip(one, other, strict=True)
        for left, right in zip(ones, others, strict=True)
    )
