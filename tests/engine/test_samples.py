"""The samples of a batch are the length of the first tensor or array in it, whatever holds it."""

import collections
import dataclasses
import random
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


HOLDERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"a": a, "b": b},
    lambda a, b: Encoding(a=a, b=b),
    Pair,
    Record,
]
EMPTY = ["a text", b"bytes", 7, 1.5, None, [], {}, ()]


def test_samples_are_the_length_of_the_first_tensor_or_array_in_any_container() -> None:
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randrange(1, 9)
        batch: Any = draw.choice([torch.zeros(length, 3), np.zeros((length, 2))])
        for _ in range(draw.randrange(4)):
            others = torch.zeros(99)
            first, second = draw.choice([(batch, others), (batch, "a text"), (draw.choice(EMPTY), batch)])
            batch = draw.choice(HOLDERS)(first, second)
        assert num_samples(batch) == length
    assert [num_samples(batch) for batch in (*EMPTY, torch.zeros(()), object())] == [1] * (len(EMPTY) + 2)
