"""Text as tokens, tokens as windows for training, and sample texts from a model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from stretto import errors
from stretto_lab.recipes.task import evaluating, extra

END = 0
"""The token after every document, from this vocabulary. For bytes it is NUL, which text does not contain."""

IGNORED = -100
"""Target that adds no loss."""
TEMPERATURE = 0.7
"""Divides the logits before a token of a sample is drawn."""


class Bytes:
    """A tokenizer with one token per byte."""

    vocabulary = 256
    """Number of different tokens, including `end`."""
    end = END
    """The token after every document."""

    def encode(self, document: bytes) -> list[int]:
        """Return the tokens of one text, without `end`."""
        return list(document)

    def stream(self, documents: Iterable[bytes]) -> Tensor:
        """Return the tokens of all documents in a row, with `end` after each: one dimension, an integer dtype."""
        # A bytearray because torch wants writable memory; the tensor keeps it alive.
        return torch.frombuffer(bytearray(b"".join(text + b"\0" for text in documents)), dtype=torch.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of `tokens`; incomplete UTF-8 becomes the replacement character."""
        return bytes(tokens).decode("utf-8", "replace")


class Subwords:
    """A tokenizer of `transformers`, such as a model folder has.

    Args:
        tokenizer: It, with a token for the end of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        self.vocabulary: int = len(tokenizer)

    @classmethod
    def read(cls, folder: str) -> Self:
        """Return the tokenizer in a folder that `AutoTokenizer` knows; no code in it is run.

        Raises:
            ConfigError: It cannot be read, or has no token for the end of a text.
            MissingExtra: `transformers` is not installed.
        """
        transformers = extra("transformers", "a tokenizer in a folder")
        try:
            found = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a file of other people makes the reader raise
            reason = " ".join(str(error).split())
            raise errors.ConfigError(
                f"{folder} holds no tokenizer that can be read: {reason}; set tokenizer"
            ) from error
        if found.eos_token_id is None:
            raise errors.ConfigError(f"the tokenizer in {folder} has no eos_token, which must end a text")
        return cls(found)

    @classmethod
    def trained(cls, documents: Iterable[bytes], vocabulary: int) -> Self:
        """Return a byte-level BPE of so many tokens, `END` included; equal documents give equal tokens everywhere.

        Raises:
            ConfigError: The documents are too short for that many tokens.
            MissingExtra: `tokenizers` or `transformers` is not installed.
        """
        tokenizers = extra("tokenizers", "a BPE trained on the spot")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        pairs = tokenizers.Tokenizer(tokenizers.models.BPE())
        pairs.pre_tokenizer = byte_level(add_prefix_space=False)
        pairs.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<end>"],  # the first special token has number 0, which is END
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        pairs.train_from_iterator((_text(document) for document in documents), trainer)
        if (size := pairs.get_vocab_size()) != vocabulary:
            raise errors.ConfigError(
                f"the training text is too short for a BPE of {vocabulary} tokens: it gave {size}; lower the "
                "vocabulary or give more text"
            )
        transformers = extra("transformers", "a BPE trained on the spot")
        return cls(transformers.PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<end>"))

    def encode(self, document: bytes) -> list[int]:
        return list(self._tokenizer.encode(_text(document), add_special_tokens=False, verbose=False))

    def stream(self, documents: Iterable[bytes]) -> Tensor:
        # One after the other: threads of the tokenizer would not survive the fork into workers that read ahead.
        tokens = [number for document in documents for number in (*self.encode(document), self.end)]
        return torch.tensor(tokens, dtype=torch.int32)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def write(self, folder: Path) -> None:
        """Write what `read`, and `transformers`, can read into a folder."""
        self._tokenizer.save_pretrained(folder)


Tokens = Bytes | Subwords
"""A tokenizer: it converts text to numbers below its `vocabulary`; see the methods of `Bytes`."""


def _text(document: bytes) -> str:
    return document.decode("utf-8", "replace")


class Window(NamedTuple):
    """A micro-batch of windows, both tensors int64 of shape (windows, context)."""

    inputs: Tensor
    """The input tokens."""

    targets: Tensor
    """The token after each input; `IGNORED` at the end of a document, because the next document is unrelated."""

    predicted: int
    """Number of targets that are not ignored, counted here so that no caller waits for the device."""


class Windows:
    """The windows of a stream of tokens: window `i` reads `context` tokens, starting at `i * context`.

    Up to the end of the last full window, every token except the first is a target exactly once.

    Args:
        stream: Integers, one dimension.
        context: Tokens read per window.
        end: The token after every document.

    Raises:
        ConfigError: The stream is shorter than one window and its last target.
    """

    def __init__(self, stream: Tensor, context: int, end: int = END) -> None:
        if len(stream) <= context:
            raise errors.ConfigError(
                f"a text of {len(stream)} tokens has no window of {context} tokens and their targets: "
                "give more text or a shorter context"
            )
        self.stream = stream
        self.context = context
        self.end = end

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def batch(self, indices: Tensor) -> Window:
        """Return the windows `indices` (int64, one dimension) as one micro-batch."""
        places = indices.unsqueeze(1) * self.context + torch.arange(self.context + 1)
        tokens = self.stream[places].long()
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].masked_fill(inputs == self.end, IGNORED)
        return Window(inputs, targets, int((targets != IGNORED).sum()))

    def spread(self, count: int) -> Tensor:
        """Return the indices of up to `count` windows, spread evenly over the stream."""
        count = min(count, len(self))
        return torch.arange(count) * len(self) // count


def sampled(model: nn.Module, *, prompt: str, length: int, tokens: Tokens, context: int) -> str:
    """Return a prompt and the model's continuation, without control characters; equal models write equal texts.

    Args:
        model: Takes int64 tokens (1, at most `context`); its output has `logits`.
        prompt: The start of the text.
        length: Most tokens to add; the end of the document ends it sooner.
        tokens: The model's tokenizer.
        context: Number of last tokens that the model reads.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    written = tokens.encode(prompt.encode("utf-8"))
    with evaluating(model):
        for _ in range(length):
            recent = torch.tensor([written[-context:]], device=device)
            shares = torch.softmax(model(recent).logits[0, -1].float().cpu() / TEMPERATURE, dim=0)
            chosen = int(torch.multinomial(shares, 1, generator=generator))
            if chosen == tokens.end:
                break
            written.append(chosen)
    # A model that has learned little writes bytes that a terminal would obey.
    return "".join(letter for letter in tokens.decode(written) if letter.isprintable() or letter in "\n\t")
