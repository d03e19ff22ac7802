"""The samples of a batch are the length of the first tensor or array in it, whatever holds it."""

import collections
import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stretto.feed import num_samples

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    """A batch as a dataclass."""

    first: Any
    second: Any


class Encoding(collections.UserDict):
    """A mapping that is no dict, as tokenizers return."""


class Mapped(dict[str, Any]):
    """A dictionary whose keys are attributes, and which has no other ones."""

    __getattr__ = dict.__getitem__


class Strange:
    """An object that raises whatever it is asked for, or has a shape of no numbers."""

    def __init__(self, shape: Any) -> None:
        self._shape = shape

    @property
    def shape(self) -> Any:
        if isinstance(self._shape, Exception):
            raise self._shape
        return self._shape


HOLDERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"a": a, "b": b},
    lambda a, b: Encoding(a=a, b=b),
    lambda a, b: Mapped(a=a, b=b),
    Pair,
    Record,
]
EMPTY = ["a text", b"bytes", 7, 1.5, None, [], {}, ()]


def test_samples_are_the_length_of_the_first_tensor_or_array_in_any_container() -> None:
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randrange(1, 9)
        rows = [torch.zeros(draw.randrange(1, 5), 2) for _ in range(length)]
        layouts = (torch.strided, torch.jagged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are new
            nested = [torch.nested.nested_tensor(rows, layout=layout) for layout in layouts]
        batch: Any = draw.choice([torch.zeros(length, 3), np.zeros((length, 2)), *nested])
        for _ in range(draw.randrange(4)):
            others = torch.zeros(99)
            first, second = draw.choice([(batch, others), (batch, "a text"), (draw.choice(EMPTY), batch)])
            batch = draw.choice(HOLDERS)(first, second)
        assert num_samples(batch) == length
    assert [num_samples(batch) for batch in (*EMPTY, torch.zeros(()), object())] == [1] * (len(EMPTY) + 2)


def test_counting_samples_ends_no_job_whatever_a_batch_is() -> None:
    shapes = [
        (None, 3),
        ("n", 3),
        (1.5,),
        None,
        "text",
        KeyError("shape"),
        RuntimeError("no sizes"),
        ValueError(),
    ]
    endless: list[Any] = []
    endless.append(endless)
    for odd in [*map(Strange, shapes), endless, Record, Mapped(), type]:
        assert num_samples(odd) == 1
    assert num_samples([Strange((None, 3)), torch.zeros(5)]) == 5
