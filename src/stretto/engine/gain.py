"""How far noise of variance 1 in every gradient carries a parameter, under SGD with momentum.

Note [Gain]
    Gradients of one coordinate arrive with independent noise ε of variance 1. What it makes of the velocity is u, and
    of the parameter x:

        u ← β·u + ε
        x ← x - η·u

    E u², E u·x and E x² follow from one step to the next. An average takes x away, and u where it takes the state too.
    Without momentum E x² is Σ η². Adam, which divides by what it has seen, is not described; its β counts as none.
"""

import dataclasses

from stretto.optimizer import Hyperparameters


@dataclasses.dataclass(slots=True)
class Gain:
    """E u², E u·x and E x² of one coordinate."""

    velocity: float = 0.0
    mixed: float = 0.0
    parameter: float = 0.0

    def step(self, rate: float, momentum: float) -> None:
        """Take note of one step."""
        self.velocity = momentum**2 * self.velocity + 1.0
        mixed = momentum * self.mixed
        self.parameter += rate**2 * self.velocity - 2 * rate * mixed
        self.mixed = mixed - rate * self.velocity

    def average(self, *, state: bool) -> None:
        """Take note of an average."""
        self.mixed = self.parameter = 0.0
        if state:
            self.velocity = 0.0


def stepped(gains: list[Gain], hyperparameters: Hyperparameters) -> None:
    """Take note of one step with these settings; one gain per group."""
    for gain, group in zip(gains, hyperparameters, strict=True):
        gain.step(float(group["lr"]), float(group.get("momentum", 0.0)))
