"""Where the text comes from, and that no file is on both sides."""

from pathlib import Path

import pytest

from stretto import errors
from stretto_lab.recipes.corpus import Text, read_corpus

MANY = {f"part{number % 3}/file{number}.txt": f"text {number}\n" * 20 for number in range(40)}


def folder_of(files: dict[str, str], root: Path) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    return root


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
    corpus = read_corpus(Text(megabytes=0.5, heldout_share=0.2))
    assert sum(map(len, corpus.train.values())) == 400_000
    assert sum(map(len, corpus.heldout.values())) == 100_000


def test_a_folder_is_read_whole_and_by_its_suffixes(tmp_path: Path) -> None:
    root = folder_of({**MANY, "picture.png": "no text", ".hidden/notes.txt": "no", "empty.txt": ""}, tmp_path)
    corpus = read_corpus(Text(folder=str(root), heldout_share=0.3))
    assert not corpus.train.keys() & corpus.heldout.keys()
    assert {**corpus.train, **corpus.heldout} == {name: text.encode() for name, text in MANY.items()}


def test_the_side_of_a_name_is_the_same_everywhere(tmp_path: Path) -> None:
    corpus = read_corpus(Text(folder=str(folder_of(MANY, tmp_path)), heldout_share=0.1))
    assert list(corpus.heldout) == ["part1/file19.txt", "part0/file39.txt", "part0/file3.txt"]


def test_a_file_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    text = Text(folder=str(tmp_path), heldout_share=0.3)
    folder_of(dict(list(MANY.items())[:30]), tmp_path)
    before = read_corpus(text)
    folder_of(MANY, tmp_path)
    after = read_corpus(text)
    assert before.train.keys() < after.train.keys()
    assert before.heldout.keys() < after.heldout.keys()


@pytest.mark.parametrize("splits", [False, True])
def test_a_saved_dataset_is_read_by_rows(splits: bool, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": list(MANY.values())})
    (datasets.DatasetDict(train=rows) if splits else rows).save_to_disk(str(tmp_path / "saved"))
    corpus = read_corpus(Text(dataset_path=str(tmp_path / "saved"), dataset_column="body", heldout_share=0.3))
    assert not corpus.train.keys() & corpus.heldout.keys()
    texts = [*corpus.train.values(), *corpus.heldout.values()]
    assert sorted(texts) == sorted(text.encode() for text in MANY.values())


def test_a_dataset_that_cannot_be_read_says_what_is_there(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["text"]})
    rows.save_to_disk(str(tmp_path / "rows"))
    datasets.DatasetDict(validation=rows).save_to_disk(str(tmp_path / "splits"))
    for name, message in (
        ("rows", r"no column 'text', only \['body'\]"),
        ("splits", r"no split 'train', only \['validation'\]"),
        ("nothing", "no dataset saved by `save_to_disk`"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            read_corpus(Text(dataset_path=str(tmp_path / name)))


def test_a_source_without_enough_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="does not exist or is not a folder"):
        read_corpus(Text(folder=str(tmp_path / "missing")))
    with pytest.raises(errors.ConfigError, match=r"no text on the train side .* \(0 documents"):
        read_corpus(Text(folder=str(tmp_path)))
    folder_of({"only.txt": "text"}, tmp_path)
    with pytest.raises(errors.ConfigError, match=r"no text on the \w+ side .* \(1 documents"):
        read_corpus(Text(folder=str(tmp_path)))


def test_contradictions_are_refused_at_once() -> None:
    for options in (
        {"folder": "a", "dataset_path": "b"},
        {"heldout_share": 1.0},
        {"megabytes": 0.0},
        {"tokens": "bpe", "vocabulary": 256},
    ):
        with pytest.raises(errors.ConfigError, match="found"):
            Text(**options)
