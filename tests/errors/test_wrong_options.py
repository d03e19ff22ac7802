"""Every option of every record and command refuses what it cannot be: in one line, before anything begins.

Options are taken from the records themselves, so that a new one is covered without a line here.
"""

import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

import stretto as st
from stretto.errors import ConfigError
from stretto.fields import field_types
from stretto.groups import Link
from stretto.guards import GUARDS
from stretto.strategies import STRATEGIES
from stretto_lab.cli import main
from stretto_lab.faults import Fault, FaultPlan
from stretto_lab.recipes import RECIPES
from stretto_lab.train.configuration import CompareConfig, DiagnoseConfig, RunConfig
from stretto_lab.train.simulation import SimulateConfig
from stretto_lab.train.slow_loader import SlowStore
from stretto_lab.virtual import Compute, Network, Uplink, VirtualCluster

COMMANDS: Mapping[str, Callable[[Any], Any]] = {
    "train": lambda task: RunConfig(task=task),
    "compare": lambda task: CompareConfig(task=task),
    "simulate": lambda task: SimulateConfig(task=task),
    "diagnose": lambda task: DiagnoseConfig(task=task),
}


def nested(record: Any) -> Iterator[Any]:
    """A record and all records that are its values."""
    yield record
    for field in dataclasses.fields(record):
        if dataclasses.is_dataclass(getattr(record, field.name)):
            yield from nested(getattr(record, field.name))


def all_records() -> list[Any]:
    """One record of every kind that a user may write."""
    records = [
        st.Options(),
        st.Clock(),
        *(kind() for kind in STRATEGIES.values()),
        *(kind() for kind in GUARDS.values()),
        Fault(site="sum", rank=0),
        FaultPlan(),
        Link(),
        Network(),
        Uplink(ranks=(0,), link=Link()),
        Compute(),
        VirtualCluster(2),
        SlowStore(milliseconds=1.0),
        *(one for recipe in RECIPES.values() for one in nested(recipe())),
        *(configure(RECIPES["digits-resnet"]()) for configure in COMMANDS.values()),
    ]
    return list({type(record): record for record in records}.values())


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def wrong_types(kind: Any) -> Iterator[Any]:
    """Values that no field of this type takes."""
    yield object()
    kinds = members(kind)
    if str not in kinds and not any(get_origin(one) is Literal for one in kinds):
        yield "many"
    if bool not in kinds:
        yield True
    if {int, float}.isdisjoint(kinds):
        yield 1
    if float not in kinds:
        yield 1.5
    if type(None) not in kinds:
        yield None


def misspelt(kind: Any) -> dict[str, str]:
    """Words that are nearly one of those that a field takes, and the word that was meant."""
    literals = [one for one in members(kind) if get_origin(one) is Literal]
    return {word + word[-1]: word for literal in literals for word in get_args(literal)}


def impossible(kind: Any) -> list[Any]:
    """Numbers that hardly any field takes."""
    kinds = members(kind)
    return [math.nan] if float in kinds else [-1] if int in kinds else []


ANY_INTEGER = {
    "ACCO.first",  # compared with the micro-batches of an update, when a job begins
    # Seeds of hashes:
    "LocalSGD.seed",
    "Audit.seed",
    "Fault.seed",
}
RECORDS = [pytest.param(record, id=type(record).__name__) for record in all_records()]


def refusal(record: Any, name: str, value: Any) -> str:
    """What is said when a field is given this value: one line that names the field."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(record, **{name: value})
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert name in said
    return said


@pytest.mark.parametrize("record", RECORDS)
def test_a_field_refuses_values_of_another_type(record: Any) -> None:
    for name, kind in field_types(type(record)).items():
        for value in wrong_types(kind):
            assert f"{type(record).__name__}({name}=" in refusal(record, name, value), value


@pytest.mark.parametrize("record", RECORDS)
def test_a_misspelt_word_is_answered_with_the_word_that_was_meant(record: Any) -> None:
    for name, kind in field_types(type(record)).items():
        for word, meant in misspelt(kind).items():
            assert refusal(record, name, word).endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize("record", RECORDS)
def test_a_field_refuses_a_number_that_cannot_be(record: Any) -> None:
    for name, kind in field_types(type(record)).items():
        if f"{type(record).__name__}.{name}" in ANY_INTEGER:
            dataclasses.replace(record, **{name: -1})
        else:
            for value in impossible(kind):
                refusal(record, name, value)


ANY_TEXT = ("run-dir", "out", "folder", "dataset-path", "column", "prompt", "suffixes")
"""Options that take any word: names of files and columns, and text to go on from."""


def options(record: Any, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """Every option of a configuration, and its type."""
    for name, kind in field_types(type(record)).items():
        value = getattr(record, name)
        option = prefix + name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from options(value, f"{option}.")
        else:
            yield option, kind


def all_options() -> Iterator[Any]:
    """Every option, with the first command that has it: configurations inherit most of theirs."""
    seen = set()
    configured = [
        (f"{command} {recipe}", configure(make()))
        for recipe, make in RECIPES.items()
        for command, configure in COMMANDS.items()
    ]
    for command, configuration in configured:
        for option, kind in options(configuration):
            if (option, kind) not in seen:
                seen.add((option, kind))
                yield pytest.param(command, option, kind, id=f"{command} {option}")


OPTIONS = list(all_options())


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that cannot be: one line and exit code 2, and nothing has begun."""
    assert main(words) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert "Config" not in line  # the user wrote an option, and has never heard of a class
    assert list(Path().iterdir()) == []
    assert multiprocessing.active_children() == []
    return line


def is_named(option: str, line: str) -> bool:
    """Whether a message names an option, as a setting or as the noun that it is about."""
    name = option.lstrip("-").rpartition(".")[2]
    noun = name.replace("-", " ").removesuffix("ies").removesuffix("s")
    return any(word in line for word in (option, name.replace("-", "_"), noun))


HASH_SEEDS = ("split-seed", "sample.seed")


@pytest.mark.parametrize(("command", "option", "kind"), OPTIONS)
def test_an_option_refuses_words_and_numbers_that_it_cannot_be(
    command: str, option: str, kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), option]
    if option.endswith(ANY_TEXT):
        assert is_named(option, complaint(words, capsys))
        return
    assert is_named(option, complaint([*words, "bogus"], capsys))
    for word, meant in misspelt(kind).items():
        line = complaint([*words, word], capsys)
        assert line.startswith(f"stretto: {option} {word}: ")
        assert line.endswith(f"did you mean {meant!r}?")
    if {int, float} & set(members(kind)) and not option.endswith(HASH_SEEDS):
        number = "nan" if float in members(kind) else "-1"
        assert is_named(option, complaint([*words, number], capsys))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_option_is_answered_with_the_one_that_was_meant(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, _ in list(options(COMMANDS[command](RECIPES["digits-resnet"]())))[::9]:
        line = complaint([command, "digits-resnet", option + option[-1], "1"], capsys)
        assert line.endswith(f"did you mean {option!r}?")
