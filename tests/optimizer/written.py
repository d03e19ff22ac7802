"""Optimizers as their users and papers write them, short; each is right in a plain loop."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, optim


class Written(optim.Optimizer):
    """Steps one tensor after the other."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1}

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**self.settings, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group, self.state[parameter])

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"])


class SignSGD(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(group["lr"] * g.sign())


class Lion(Written):
    """Chen et al., 2023."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * average.lerp(g, 1 - group["betas"][0]).sign())
        average.lerp_(g, 1 - group["betas"][1])


class Lookahead(Written):
    """Zhang et al., 2019, over SGD; the slow values are state, made in the first step."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "period": 3}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        slow = state.setdefault("slow", p.clone())
        state["step"] = state.get("step", 0) + 1
        super().update(p, g, group, state)
        if state["step"] % group["period"] == 0:
            p.copy_(slow.lerp_(p, 0.5))


class RulePerGroup(Written):
    """A rule and a decay that are named in the group."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "rule": "plain"}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g.sign() if group["rule"] == "sign" else g, group, state)


class BoundOnItself(Written):
    """Clips by value; the bound is no default but an attribute."""

    def __init__(self, params: Any, lr: float = 0.1, bound: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.bound = bound

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g.clamp(-self.bound, self.bound), group, state)


class WarmsUp(Written):
    """A rate that grows with a count in the state of each tensor, and momentum from the fourth step on."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        state["step"] = state.get("step", 0) + 1
        average.lerp_(g, 0.5)
        p.sub_(group["lr"] * min(1.0, state["step"] / 4) * (average if state["step"] > 3 else g))


# What follows sees a whole tensor.


class Lamb(Written):
    """You et al., 2019; the trust ratio acts where there is decay."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.01, "weight_decay": 0.0}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(g, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(g * g, 0.01)
        direction = first / (second.sqrt() + 1e-6) + group["weight_decay"] * p
        ratio = p.norm() / direction.norm() if group["weight_decay"] else 1.0
        p.sub_(group["lr"] * ratio * direction)


class Lars(Written):
    """You et al., 2017."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        velocity = state.setdefault("velocity", torch.zeros_like(p))
        trust = p.norm() / (g.norm() + group["weight_decay"] * p.norm() + 1e-9)
        velocity.mul_(group["momentum"]).add_(trust * (g + group["weight_decay"] * p))
        p.sub_(velocity, alpha=group["lr"])


class DecaysMatrices(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g + 0.1 * p if p.dim() > 1 else g, group, state)


class RulePerGroupAndShape(Written):
    """Scales matrices by their norm in groups that ask for it, and raises for anything else there."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "matrices": False}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if group["matrices"] and g.dim() != 2:
            raise ValueError("expected a matrix")
        super().update(p, g / g.norm() if group["matrices"] else g, group, state)


# What follows sees several tensors, or remembers in another place.


class ScheduleFree(Written):
    """Defazio et al., 2024, over SGD; as published, counts and sums of weights are in the group."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "k": 0, "weight_sum": 0.0}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        z = state.setdefault("z", p.clone())
        weight = group["lr"] ** 2 / group["weight_sum"]
        p.lerp_(z, weight).sub_(g, alpha=group["lr"] * (1 - weight) * min(1.0, group["k"] / 4))
        z.sub_(g, alpha=group["lr"])


class Prodigy(Written):
    """Mishchenko and Defazio, 2023, over SGD; the estimate d is one for all parameters, in the group."""

    settings: ClassVar[dict[str, Any]] = {"lr": 1.0, "d": 1e-3, "numerator": 0.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.zeros(())
        for p in members:
            start = self.state[p].setdefault("start", p.clone())
            grown = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=first["d"])
            first["numerator"] += first["d"] * float((p.grad * (start - p)).sum())
            total += grown.abs().sum()
        d = max(first["d"], first["numerator"] / max(float(total), 1e-12))
        for group in self.param_groups:
            group["d"] = d
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * group["d"])


class ClipsByNorm(Written):
    """Clips by the norm of all gradients, which is seldom reached."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "bound": 100.0}

    def step(self, closure: Any = None) -> None:
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([torch.zeros(1), *(p.grad.flatten() for p in members)]).norm()
        self.factor = float((self.param_groups[0]["bound"] / norm).clamp(max=1.0))
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g * self.factor, group, state)


class NormalisesGroups(Written):
    """Divides by the norm of all gradients of a group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            norm = torch.cat([torch.zeros(1), *(p.grad.flatten() for p in members)]).norm()
            for p in members:
                self.update(p, p.grad / norm, group, self.state[p])


class RatePerParameter(Written):
    """Reads an attribute that users set on parameters."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g * getattr(p, "rate", 1.0), group, state)


class CountsInGroup(Written):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g / group["count"], group, state)


class CountsInTensor(Written):
    """Its count is a tensor, which steps change in place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(())).add_(1)
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g / group["count"], group, state)


class CountsOnItself(Written):
    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g / self.count, group, state)


class EverySecondStep(CountsOnItself):
    """Its count is right again whenever a multiple of two steps is left out."""

    every = 2

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        Written.update(self, p, g if self.count % self.every else -g, group, state)


class EveryThirdStep(EverySecondStep):
    every = 3


class EveryFifthStep(EverySecondStep):
    every = 5


class CountsForLater(CountsOnItself):
    """Its rule begins long after any trial."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        Written.update(self, p, g if self.count < 1000 else -g, group, state)


class Evaluates(ScheduleFree):
    def eval(self) -> None:
        """Show the averages."""


class Communicates(Written):
    """Sums its steps over ranks by itself."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        step = torch.ops._c10d_functional.all_reduce(g, "sum", "nobody")
        super().update(p, step, group, state)


class ClipsByValue(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_value_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class NewStorage(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * g


class WritesGradient(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g.add_(p, alpha=0.1), group, state)


class Noisy(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g + torch.randn_like(g), group, state)


class LateState(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 2:
            g = state.setdefault("average", torch.zeros_like(p)).lerp_(g, 0.5)
        super().update(p, g, group, state)


class ListState(Written):
    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("norms", []).append(1.0)
        super().update(p, g, group, state)


class Count:
    """Nothing that a checkpoint could hold."""

    steps = 0


class ObjectState(Written):
    """Its state is an object, which a copy by reference shares."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("count", Count()).steps += 1
        super().update(p, g / state["count"].steps, group, state)


class RuleObject(Written):
    """Its rule is an object, given to the constructor and kept on itself."""

    def __init__(self, params: Any, rule: Any = None) -> None:
        super().__init__(params)
        self.rule = rule or torch.nn.Identity()

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, self.rule(g), group, state)


class SAM(Written):
    """Foret et al., 2020: two gradients per step, so it needs a closure."""

    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("SAM needs a closure")
        closure()


class Around(optim.Optimizer):
    """Around another optimizer, as Accelerate's and Fabric's classes are."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults


Make = Callable[[list[dict[str, Any]]], optim.Optimizer]

ELEMENT_WISE: dict[str, Make] = {
    **{
        kind.__name__: lambda groups, kind=kind: kind(groups, lr=0.01)
        for kind in (
            *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop),
            *(optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Adamax),
        )
    },
    "SGD with momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW amsgrad foreach": lambda groups: optim.AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "AdamW maximize": lambda groups: optim.AdamW(groups, lr=0.1, maximize=True),
    "RMSprop centered": lambda groups: optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5),
}
"""By name, from groups; their tensors may be cut."""

WHOLE: dict[str, Make] = {
    **{
        kind.__name__: kind
        for kind in (
            *(SignSGD, Lion, Lookahead, RulePerGroup, WarmsUp, Lars, DecaysMatrices),
            *(CountsInGroup, CountsInTensor, ScheduleFree),
        )
    },
    "BoundOnItself": lambda groups: BoundOnItself(groups, 0.1, bound=0.01),
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.1),
    "Adafactor foreach": lambda groups: optim.Adafactor(groups, lr=torch.tensor(0.1), foreach=True),
    "Lamb": lambda groups: Lamb(groups, weight_decay=0.1),
    "RulePerGroupAndShape": lambda groups: RulePerGroupAndShape(
        [{**group, "matrices": group["params"][0].dim() == 2} for group in groups]
    ),
}
"""By name, from groups; their tensors must stay whole."""

REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (lambda groups: optim.LBFGS(groups[0]["params"]), "by itself .*closure"),
    "SparseAdam": (optim.SparseAdam, "by itself .*dense gradients"),
    "Evaluates": (Evaluates, r"its eval\(\) shows other values"),
    "Prodigy": (Prodigy, r"in its parameter groups \(numerator\)"),
    "Communicates": (Communicates, "communicates in its step .*all_?reduce.*torch.optim.Muon"),
    "ClipsByNorm": (ClipsByNorm, r"depends on others.*Options\(clip_norm=...\)"),
    "NormalisesGroups": (NormalisesGroups, "depends on others"),
    "CountsOnItself": (CountsOnItself, "outside optimizer.state"),
    "EverySecondStep": (EverySecondStep, "outside optimizer.state"),
    "EveryThirdStep": (EveryThirdStep, "outside optimizer.state"),
    "EveryFifthStep": (EveryFifthStep, "outside optimizer.state"),
    "CountsForLater": (CountsForLater, r"counts in an attribute of its own \(count\)"),
    "ClipsByValue": (ClipsByValue, r"write into .grad.*p.grad.clamp"),
    "NewStorage": (NewStorage, "another storage"),
    "WritesGradient": (WritesGradient, r"write into .grad.*p.grad.add\(...\)"),
    "Noisy": (Noisy, "random numbers"),
    "LateState": (LateState, r"state is \['step'\] at first and \['average', 'step'\] later"),
    "ListState": (ListState, r"state \['norms'\] is neither"),
    "ObjectState": (ObjectState, r"state \['count'\] is neither"),
    "RuleObject": (lambda groups: RuleObject(groups, torch.nn.Tanh()), r"'rule' \(a Tanh\).*\['rule'\]"),
    "SAM": (SAM, "SAM needs a closure"),
}
"""By name, from two groups, matrices first; and what the refusal says."""
