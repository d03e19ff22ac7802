"""Several optimizers, or several schedulers, as one, so that a job has one of each."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from stretto.errors import UnsupportedOptimizer


class Several(torch.optim.Optimizer):
    """Optimizers that step one after the other, as one optimizer with all their groups in order.

    The groups are the members' own dictionaries, so that a change of a member's settings acts here. Groups and state
    are held here, and lent to a member for its step.

    Raises:
        UnsupportedOptimizer: A parameter is in two of them.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.members = tuple(members)
        self.param_groups = [group for member in members for group in member.param_groups]
        holders: dict[int, int] = {}
        for index, member in enumerate(members):
            self.state.update(member.state)
            for parameter in (one for group in member.param_groups for one in group["params"]):
                holder = holders.setdefault(id(parameter), index)
                if holder != index:
                    raise UnsupportedOptimizer(
                        f"optimizer: a parameter of shape {tuple(parameter.shape)} is in two of them, "
                        f"{type(members[holder]).__name__} and {type(member).__name__}: expected every parameter in one"
                    )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Step every member."""
        self._lend()
        for member in self.members:
            member.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let every member load its share of a `state_dict`."""
        self._lend()
        groups = iter(state_dict["param_groups"])
        self.state, self.param_groups = defaultdict(dict), []
        for member in self.members:
            share = list(islice(groups, len(member.param_groups)))
            own = {index for group in share for index in group["params"]}
            state = {index: entries for index, entries in state_dict["state"].items() if index in own}
            member.load_state_dict({"state": state, "param_groups": share})
            self.state.update(member.state)
            self.param_groups += member.param_groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members}

    def _lend(self) -> None:
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups = list(islice(groups, len(member.param_groups)))
            member.state = self.state


class SeveralSchedulers:
    """Schedulers that step together."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = tuple(members)

    def step(self) -> None:
        """Step every member."""
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        for member, saved in zip(self.members, state["members"], strict=True):
            member.load_state_dict(saved)


def as_one(given: Any) -> Any:
    """Return one optimizer for a sequence of optimizers; return any other argument unchanged and unchecked.

    Raises:
        UnsupportedOptimizer: The sequence is empty or holds something else, or a parameter is in two of them.
    """
    if not isinstance(given, list | tuple):
        return given
    if not given or not all(isinstance(one, torch.optim.Optimizer) for one in given):
        found = ", ".join(type(one).__name__ for one in given) or "none"
        raise UnsupportedOptimizer(
            f"optimizer: expected a torch.optim.Optimizer, or several, found a sequence of {found}"
        )
    return given[0] if len(given) == 1 else Several(given)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that it joins, or only itself."""
    return optimizer.members if isinstance(optimizer, Several) else (optimizer,)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(type(member).__name__ for member in members_of(optimizer))
