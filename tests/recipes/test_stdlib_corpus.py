"""Where the text comes from, and that no file is on both sides."""

import pytest

from stretto import errors
from stretto_lab.recipes.corpus import HELDOUT_SHARE, Document, Text, read_corpus


def test_the_standard_library_is_there_and_split_by_file() -> None:
    corpus = read_corpus(Text(megabytes=100))
    assert not corpus.train.keys() & corpus.heldout.keys()
    assert {"dataclasses.py", "json/decoder.py"} <= corpus.train.keys() | corpus.heldout.keys()
    assert sum(map(len, corpus.train.values())) > 5e6
    folders = {part for name in corpus.train | corpus.heldout for part in name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "encodings"}


def test_two_readings_are_equal_in_content_and_order() -> None:
    first, second = (read_corpus(Text(megabytes=1)) for _ in range(2))
    assert list(first.train.items()) == list(second.train.items())
    assert list(first.heldout.items()) == list(second.heldout.items())


def test_the_cap_is_filled_on_both_sides_and_not_exceeded() -> None:
    corpus = read_corpus(Text(megabytes=0.5))
    assert sum(map(len, corpus.train.values())) == 450_000
    assert sum(map(len, corpus.heldout.values())) == 50_000


def test_the_side_of_a_name_is_the_same_everywhere() -> None:
    names = [f"part{number % 3}/file{number}.txt" for number in range(40)]
    held_out = [name for name in names if Document(name, bytes).place < HELDOUT_SHARE]
    assert sorted(held_out) == ["part0/file3.txt", "part0/file39.txt", "part1/file19.txt"]


def test_no_text_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="megabytes must be positive, found 0"):
        Text(megabytes=0.0)
