"""Fields are checked against their annotations, and one word of text is read by the same annotations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pytest

from stretto.errors import ConfigError, UnknownName
from stretto.fields import check_at_least, check_fields, read_record, read_value


@dataclasses.dataclass(frozen=True)
class Inner:
    """A record in a record."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One field of every kind."""

    count: int | None = None
    share: float = 0.5
    mode: Literal["raise", "skip"] = "raise"
    is_on: bool = False
    names: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    rates: Mapping[int, float] = dataclasses.field(default_factory=dict)
    schedule: float | Callable[[int], float] = 1.0
    inner: Inner = Inner()
    anything: Any = None
    text: str = ""
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    "values",
    [
        {"count": np.int64(3), "share": 1, "pair": (1, 2.0)},
        {"share": np.float32(0.5), "rates": {0: 2}, "schedule": lambda step: 1.0 / (step + 1)},
        {"names": ("a", "b"), "anything": object(), "is_on": True, "mode": "skip"},
    ],
)
def test_values_of_the_annotated_types_are_taken(values: dict[str, Any]) -> None:
    Record(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": True}, "Record(count=True): expected an integer or None"),
        ({"share": "1"}, "Record(share='1'): expected a number"),
        ({"mode": "skipp"}, "Record(mode='skipp'): expected one of raise, skip; did you mean 'skip'?"),
        ({"mode": None}, "Record(mode=None): expected one of raise, skip"),
        ({"is_on": 1}, "Record(is_on=1): expected True or False"),
        ({"names": ["a"]}, "Record(names=['a']): expected a tuple[str, ...]"),
        ({"pair": (1.0,)}, "Record(pair=(1.0,)): expected a tuple[float, float]"),
        ({"rates": {"0": 1.0}}, "Record(rates={'0': 1.0}): expected a Mapping[int, float]"),
        ({"schedule": "fast"}, "Record(schedule='fast'): expected a function or a number"),
        (
            {"inner": Inner},
            "Record(inner=<class 'tests.fields.test_fields.Inner'>): expected an instance of Inner",
        ),
        ({"count": "a\n" * 99}, "Record(count='a\\na\\n"),
    ],
)
def test_another_value_is_refused_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Record(**values)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("record", {}),
        ("record:count=3:share=2e-1:mode=skip", {"count": 3, "share": 0.2, "mode": "skip"}),
        ("record:count=None:is_on=on:text=a b", {"count": None, "is_on": True, "text": "a b"}),
        ("record:schedule=half", {"schedule": 0.5}),
    ],
)
def test_one_word_is_read_by_the_types_of_the_fields(text: str, values: dict[str, Any]) -> None:
    readers = {float | Callable[[int], float]: lambda word: {"half": 0.5}[word]}
    assert read_record("record", text, {"record": Record}, readers) == Record(**values)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("recrod", UnknownName, "no kind is called 'recrod'; there are record; did you mean 'record'?"),
        ("record:mod=skip", UnknownName, "'record:mod=skip': record has no setting 'mod'; there are count, "),
        ("record:derived=1", UnknownName, "record has no setting 'derived'"),
        ("record:count=1.5", ConfigError, "cannot read count='1.5': expected an integer or None"),
        ("record:mode=rise", ConfigError, "expected one of raise, skip; did you mean 'raise'?"),
        ("record:is_on=yes", ConfigError, "expected on or off"),
        ("record:share", ConfigError, "cannot read share='': expected a number"),
    ],
)
def test_a_word_that_cannot_be_read_says_what_was_expected(
    text: str, kind: type[ConfigError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        read_record("kind", text, {"record": Record})
    assert said in str(caught.value)


def test_a_minimum_holds_for_everything_but_none() -> None:
    check_at_least(Record(count=None, share=2), count=1, share=2)
    for value in (1.9, float("nan")):
        with pytest.raises(ConfigError, match=f"share must be at least 2, found {value}"):
            check_at_least(Record(share=value), share=2)


def test_of_a_union_the_first_type_that_fits_is_read() -> None:
    assert read_value("3", int | str) == 3
    assert read_value("three", int | str) == "three"
    assert read_value("None", str | None) is None
