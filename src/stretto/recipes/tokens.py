"""Two ways to cut text into tokens: single bytes, or a byte-level BPE trained on the spot."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from stretto import errors
from stretto.recipes.extras import extra

END = 0
"""The token after every document. For bytes it is NUL, which text does not contain."""


class Tokens(Protocol):
    """A reversible cut of text into numbers below `vocabulary`."""

    @property
    def vocabulary(self) -> int:
        """Number of different tokens, `END` included."""
        ...

    def encode(self, document: bytes) -> list[int]:
        """The tokens of one text, without an end."""
        ...

    def stream(self, documents: Iterable[bytes]) -> Tensor:
        """All documents behind each other, `END` after each: one dimension, the smallest fitting integers."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; incomplete UTF-8 shows as the replacement character."""
        ...


class Bytes:
    """One token per byte."""

    vocabulary = 256

    def encode(self, document: bytes) -> list[int]:
        return list(document)

    def stream(self, documents: Iterable[bytes]) -> Tensor:
        # A bytearray because torch wants writable memory; the tensor keeps it alive.
        return torch.frombuffer(bytearray(b"".join(text + b"\0" for text in documents)), dtype=torch.uint8)

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class BytePairs:
    """A byte-level BPE, trained on `documents`: the same documents give the same tokens in every process.

    Args:
        documents: What it learns from.
        vocabulary: Number of tokens to reach, `END` included.

    Raises:
        ConfigError: The documents are too short for that many tokens.
        MissingExtra: `tokenizers` is not installed.
    """

    def __init__(self, documents: Iterable[bytes], vocabulary: int) -> None:
        tokenizers = extra("tokenizers", "a BPE trained on the spot (data.tokens bpe)")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<end>"],  # the first special token is number 0, that is END
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        self._tokenizer.train_from_iterator((_text(document) for document in documents), trainer)
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        if self.vocabulary != vocabulary:
            raise errors.ConfigError(
                f"the training text is too short for a BPE of {vocabulary} tokens: it gave "
                f"{self.vocabulary}; lower data.vocabulary or give more text"
            )

    def encode(self, document: bytes) -> list[int]:
        return list(self._tokenizer.encode(_text(document)).ids)

    def stream(self, documents: Iterable[bytes]) -> Tensor:
        encodings = self._tokenizer.encode_batch_fast([_text(document) for document in documents])
        return torch.cat([torch.tensor([*encoding.ids, END], dtype=torch.int32) for encoding in encodings])

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


def _text(document: bytes) -> str:
    return document.decode("utf-8", "replace")
