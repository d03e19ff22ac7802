"""A strategy's coroutine read aloud: what it asks for, and what becomes of the gradients it is given."""

from typing import get_args

from stretto.effects import (
    AllReduce,
    Average,
    Boundary,
    Divergence,
    Effect,
    Look,
    Moment,
    Preview,
    Reduce,
    Step,
)
from stretto.strategies import Strategy

KNOWN = tuple(kind for kind in get_args(Effect) if kind is not Boundary)
"""The effects a strategy may ask for."""


class Marked:
    """A gradient that knows where it comes from; it can be added and passed on, as the real one, and no more."""

    def __init__(self, update: int, rounds: frozenset[int]) -> None:
        self.update = update
        self.rounds = rounds
        """Of its update, from 0: those whose gradients it holds."""
        self.is_spent = False

    def __add__(self, other: "Marked") -> "Marked":
        total = Marked(self.update, self.rounds | other.rounds)
        total.is_spent = self.is_spent or other.is_spent
        self.is_spent = other.is_spent = True
        return total

    def __repr__(self) -> str:
        return f"the gradient of update {self.update}, rounds {sorted(self.rounds)}"


class Reading:
    """Runs the scripts of `updates` updates of one strategy, and notes what they ask for."""

    def __init__(self, strategy: Strategy, updates: int) -> None:
        self.asked: list[list[str]] = []
        """Names of effects, by update."""
        self.unknown: list[str] = []
        """What was yielded that is no effect."""
        self.misused: list[str] = []
        """What became of gradients that must not."""
        for update in range(updates):
            self._read(strategy, update)

    @property
    def rounds(self) -> list[int]:
        """Rounds of each update."""
        return [sum(name in (Reduce.__name__, AllReduce.__name__) for name in names) for names in self.asked]

    def _read(self, strategy: Strategy, update: int) -> None:
        script = strategy.update()
        names: list[str] = []
        self.asked.append(names)
        given, stepped = 0, frozenset[int]()
        answer: Marked | Moment | Divergence | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration:
                break
            names.append(type(effect).__name__)
            answer = None
            if not isinstance(effect, KNOWN):
                self.unknown.append(f"update {update}, effect {len(names)}: {effect!r}")
            elif isinstance(effect, Reduce | AllReduce):
                answer = Marked(update, frozenset([given]))
                given += 1
            elif isinstance(effect, Look):
                answer = Moment(update, 1, drains=False)
            elif isinstance(effect, Average) and effect.probe:
                answer = Divergence.none()
            elif isinstance(effect, Step | Preview):
                stepped |= self._use(effect, update)
        if left := set(range(given)) - stepped:
            self.misused.append(f"update {update}: the gradients of rounds {sorted(left)} reached no Step")

    def _use(self, effect: Step | Preview, update: int) -> frozenset[int]:
        """Check the gradient of a step or preview; return the rounds that a step commits."""
        gradient, kind = effect.gradient, type(effect).__name__
        where = f"update {update}: {kind} was given {gradient!r}"
        if not isinstance(gradient, Marked):
            self.misused.append(f"{where}, expected a gradient that a reduction has answered")
        elif gradient.update != update:
            self.misused.append(f"{where}, expected one of update {update}")
        elif gradient.is_spent:
            self.misused.append(f"{where}, which had been added to another: expected the sum")
        elif isinstance(effect, Step):
            return gradient.rounds
        return frozenset()
