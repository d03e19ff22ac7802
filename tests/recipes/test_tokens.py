"""From text to windows of tokens."""

import json
import subprocess
import sys

import pytest
import torch

from stretto import errors
from stretto_lab.recipes.corpus import Text, read_corpus
from stretto_lab.recipes.text import END, IGNORED, Bytes, Subwords, Tokens, Windows

DOCUMENTS = list(read_corpus(Text(megabytes=0.03)).train.values())
PAIRS = Subwords.trained(DOCUMENTS, 400)

TRAIN = """
import json
from stretto_lab.recipes.corpus import Text, read_corpus
from stretto_lab.recipes.text import Subwords
DOCUMENTS = list(read_corpus(Text(megabytes=0.03)).train.values())
print(json.dumps(Subwords.trained(DOCUMENTS, 400).stream(DOCUMENTS).tolist()))
"""


@pytest.mark.parametrize("tokens", [Bytes(), PAIRS], ids=["bytes", "bpe"])
def test_text_comes_back_from_its_tokens(tokens: Tokens) -> None:
    text = DOCUMENTS[0].decode() + "ünïcödé \N{SNOWMAN} \t  x"
    encoded = tokens.encode(text.encode())
    assert tokens.decode(encoded) == text
    assert END not in encoded
    assert max(encoded) < tokens.vocabulary


@pytest.mark.parametrize("tokens", [Bytes(), PAIRS], ids=["bytes", "bpe"])
def test_a_stream_is_the_documents_each_with_its_end(tokens: Tokens) -> None:
    expected = [number for document in DOCUMENTS for number in [*tokens.encode(document), END]]
    assert tokens.stream(DOCUMENTS).tolist() == expected


def test_every_process_trains_the_same_pairs() -> None:
    other = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == PAIRS.stream(DOCUMENTS).tolist()


def test_a_text_too_short_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="too short for a BPE of 5000 tokens"):
        Subwords.trained([b"a few words"], 5000)


def test_every_token_but_the_first_is_a_target_once() -> None:
    stream = torch.arange(1, 30)
    windows = Windows(stream, context=4)
    batch = windows.batch(torch.arange(len(windows)))
    assert batch.inputs.flatten().tolist() == list(range(1, 29))
    assert batch.targets.flatten().tolist() == list(range(2, 30))
    assert batch.predicted == 28


def test_nothing_is_predicted_across_the_end_of_a_document() -> None:
    batch = Windows(torch.tensor([7, 8, END, 9, 6]), context=4).batch(torch.tensor([0]))
    assert batch.targets.tolist() == [[8, END, IGNORED, 6]]
    assert batch.predicted == 3


def test_windows_are_spread_over_the_whole_stream() -> None:
    windows = Windows(torch.arange(1001), context=10)
    assert windows.spread(4).tolist() == [0, 25, 50, 75]
    assert windows.spread(1000).tolist() == list(range(100))


def test_a_stream_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="10 tokens has no window of 10 tokens"):
        Windows(torch.arange(10), context=10)
