"""Loaders that write every batch into the same memory: each use shows what was read, whatever plan and options."""

import dataclasses
import random
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto import Bernoulli, EchoLoader, EchoOptions, Even, Ready, errors
from stretto.echo import Linear, Plan
from tests.draws import part

CASES = 200
LENGTH = 6


class Encoding(UserDict[str, Any]):
    """As the batches of tokenizers: a mapping that keeps more beside its entries."""

    def __init__(self, data: dict[str, Any], encodings: list[Any]) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self._encodings = state["data"], state["encodings"]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    left: Any
    right: Any


class Graph:
    """An object of the user's, which nothing is known about."""

    def __init__(self, left: Any, right: Any) -> None:
        self.parts = {"left": [left], "right": right}


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    lambda left, right: [left, right],
    lambda left, right: (left, right),
    lambda left, right: {"left": left, "right": right},
    Pair,
    Record,
    Graph,
    lambda left, right: Encoding({"left": left}, [right]),
]
"""Of what a batch is made, nested in each other."""


def contents(batch: Any) -> Iterator[Any]:
    """Yield the tensors and arrays of a batch, with what is around them."""
    if isinstance(batch, (Tensor, np.ndarray)):
        yield batch
    else:
        yield type(batch)
        for part in parts(batch):
            yield from contents(part)


def parts(batch: Any) -> list[Any]:
    """Return what one container holds."""
    if isinstance(batch, Encoding):
        return [*batch.values(), *batch._encodings]
    if isinstance(batch, (dict, MappingProxyType)):
        return list(batch.values())
    if isinstance(batch, Record):
        return [batch.left, batch.right]
    if isinstance(batch, Graph):
        return [batch.parts["left"][0], batch.parts["right"]]
    return list(batch)


def shape_of(batch: Any) -> list[Any]:
    return [part if isinstance(part, type) else type(part) for part in contents(batch)]


def numbers_of(batch: Any) -> set[int]:
    """Return the values that the leaves of a batch hold; a sound batch has one."""
    leaves = [part for part in contents(batch) if not isinstance(part, type)]
    return {int(value) for leaf in leaves for value in leaf.reshape(-1).tolist()}


class Reusing:
    """A loader with a state that fills one batch again and again; its values say which batch it is."""

    def __init__(self, draws: random.Random, *, remembers: bool) -> None:
        self.position = 0
        self._fills: list[Callable[[int], Any]] = []
        self.batch = self._grow(draws, depth=draws.randrange(4))
        if draws.random() < 0.2:
            self.batch = MappingProxyType({"left": self.batch, "right": self._leaf(draws)})
        if remembers:
            self.state_dict = lambda: {"position": self.position}
            self.load_state_dict = lambda state: setattr(self, "position", state["position"])

    def __iter__(self) -> Iterator[Any]:
        while self.position < LENGTH:
            for fill in self._fills:
                fill(self.position)
            self.position += 1
            yield self.batch
        self.position = 0

    def _grow(self, draws: random.Random, depth: int) -> Any:
        if depth == 0:
            return self._leaf(draws)
        return draws.choice(CONTAINERS)(
            self._grow(draws, depth - 1), self._grow(draws, draws.randrange(depth))
        )

    def _leaf(self, draws: random.Random) -> Any:
        array = np.zeros(draws.choice([(1,), (3,), (2, 2)]), dtype=np.float32)
        if draws.random() < 0.3:
            tensor = torch.zeros(3)
            self._fills.append(tensor.fill_)
            return tensor
        self._fills.append(array.fill)
        # A tensor over the memory of an array: what is written there, PyTorch does not count.
        return array if draws.random() < 0.5 else torch.from_numpy(array)


def write_into(batch: Any) -> None:
    for array in contents(batch):
        if not isinstance(array, type):
            array[...] = -1


def random_plan(draws: random.Random) -> Plan:
    return draws.choice(
        [Even(1), Even(2.5), Even(Linear(3, 1, 12)), Bernoulli(0.4), Bernoulli(0.3, 3), Ready(3, 3), Ready()]
    )


def used(
    loader: EchoLoader[Any], steps: int | None, writes: bool
) -> tuple[list[tuple[int, set[int]]], list[Any], bool]:
    """Return number and contents of every use when it was handed out, every shape, and whether a write was noticed."""
    seen: list[tuple[int, set[int]]] = []
    shapes = []
    try:
        for batch in loader:
            seen.append((loader.batch_index, numbers_of(batch)))
            shapes.append(shape_of(batch))
            if writes:
                write_into(batch)
            if len(seen) == steps:
                break
    except errors.BatchChanged:
        return seen, shapes, True
    return seen, shapes, False


@pytest.mark.parametrize("block", part(range(4)))
def test_every_use_shows_the_batch_that_was_read_or_a_write_is_noticed(block: int) -> None:
    for case in range(block * CASES // 4, (block + 1) * CASES // 4):
        draws = random.Random(case)
        plan = random_plan(draws)
        options = EchoOptions(
            seed=case,
            ahead=draws.randrange(1 if isinstance(plan, Ready) else 0, 5),
            resume=draws.choice(["refetch", "drop"]),
            micro_batches=draws.choice([1, 3]),
        )
        structure, remembers = draws.randrange(1000), draws.random() < 0.5

        def make(structure: int = structure, remembers: bool = remembers) -> Reusing:
            return Reusing(random.Random(structure), remembers=remembers)

        writes = draws.random() < 0.4
        loader = EchoLoader(make(), plan, options=options)
        seen, shapes, noticed = used(loader, draws.randrange(1, 8), writes)
        state = loader.state_dict()
        resumed = EchoLoader(make(), plan, options=options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*to resume, Stretto reads")
            resumed.load_state_dict(state)
        if state["position"]["in_epoch"] and not noticed:
            more_seen, more_shapes, noticed = used(resumed, None, writes)
            seen, shapes = seen + more_seen, shapes + more_shapes
        assert [(number, shown) for number, shown in seen if shown != {number}] == [], (
            case,
            plan,
            options,
        )
        assert not noticed or writes, case
        assert [shape for shape in shapes if shape != shape_of(make().batch)] == [], case


def test_arrays_that_place_gives_from_one_memory_are_held_apart() -> None:
    memory = np.zeros(1)

    def place(batch: int) -> Any:
        memory.fill(batch)
        return memory

    loader = EchoLoader(range(3), Even(3), place=place)
    assert [batch for batch in loader if int(batch[0]) != loader.batch_index] == []


def test_gradients_of_a_batch_belong_to_one_use() -> None:
    for batch in EchoLoader([torch.ones(2)], Even(3)):
        batch.requires_grad_()
        batch.sum().backward()
        assert batch.grad.tolist() == [1, 1]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"x": [one]}, lambda one: Record(one, 0)])
def test_what_cannot_be_copied_is_refused_and_not_passed_over(wrap: Callable[[Any], Any]) -> None:
    batch = wrap(number for number in range(3))
    with pytest.raises(errors.ConfigError, match=r"batch.* of type \w+ cannot be copied .*generator"):
        list(EchoLoader([batch], Even(2)))
