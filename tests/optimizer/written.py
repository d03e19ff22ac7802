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


class BoundOnItself(Written):
    """Clips by value; the bound is no default but an attribute."""

    def __init__(self, params: Any, lr: float = 0.1, bound: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.bound = bound

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g.clamp(-self.bound, self.bound), group, state)


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


class MeasuresInGroup(Written):
    """Remembers in the group what it has seen of gradients, as Prodigy its estimate of a distance."""

    settings: ClassVar[dict[str, Any]] = {"lr": 0.1, "measured": 1.0}

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["measured"] += float(g.abs().sum())
        super().update(p, g, group, state)


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


class RatePerParameter(Written):
    """Reads an attribute that users set on parameters."""

    def update(self, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        super().update(p, g * getattr(p, "rate", 1.0), group, state)


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
    **{kind.__name__: kind for kind in (SignSGD, Lars, CountsInTensor, ScheduleFree)},
    "BoundOnItself": lambda groups: BoundOnItself(groups, 0.1, bound=0.01),
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.1),
    "Adafactor foreach": lambda groups: optim.Adafactor(groups, lr=torch.tensor(0.1), foreach=True),
    "Lamb": lambda groups: Lamb(groups, weight_decay=0.1),
}
"""By name, from groups; their tensors must stay whole."""

REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (lambda groups: optim.LBFGS(groups[0]["params"]), "alone .*closure"),
    "SparseAdam": (optim.SparseAdam, "alone .*dense gradients"),
    "Evaluates": (Evaluates, r"its eval\(\) shows averages"),
    "MeasuresInGroup": (MeasuresInGroup, r"in its parameter groups \(measured\)"),
    "Communicates": (Communicates, "communicates in its step .*all_?reduce.*torch.optim.Muon"),
    "ClipsByNorm": (ClipsByNorm, r"depends on other parameters.*Options\(clip_norm=...\)"),
    "CountsOnItself": (CountsOnItself, "outside optimizer.state"),
    "EverySecondStep": (EverySecondStep, "outside optimizer.state"),
    "EveryThirdStep": (EveryThirdStep, "outside optimizer.state"),
    "EveryFifthStep": (EveryFifthStep, "outside optimizer.state"),
    "CountsForLater": (CountsForLater, r"counts in its own attribute \(count\)"),
    "ClipsByValue": (ClipsByValue, r"write into .grad.*p.grad.clamp"),
    "NewStorage": (NewStorage, "another storage"),
    "WritesGradient": (WritesGradient, r"write into .grad.*p.grad.add\(...\)"),
    "Noisy": (Noisy, "random numbers"),
    "LateState": (LateState, r"state is \['step'\] at first and \['average', 'step'\] later"),
    "ObjectState": (ObjectState, r"state \['count'\] is neither"),
    "RuleObject": (lambda groups: RuleObject(groups, torch.nn.Tanh()), r"'rule' \(a Tanh\).*\['rule'\]"),
}
"""By name, from two groups, matrices first; and what the refusal says."""
