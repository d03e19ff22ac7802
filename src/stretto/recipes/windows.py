"""A stream of tokens as windows for next-token prediction."""

from typing import NamedTuple

import torch
from torch import Tensor

from stretto import errors
from stretto.recipes.tokens import END

IGNORED = -100
"""Target that no loss is taken of."""


class Window(NamedTuple):
    """A micro-batch of windows, both tensors int64 of shape (windows, context)."""

    inputs: Tensor
    """The tokens read."""

    targets: Tensor
    """The token after each; `IGNORED` after the end of a document, where an unrelated one begins."""

    predicted: int
    """Number of targets that are not ignored, counted where the data are made: the device is not asked."""


class Windows:
    """Window `i` reads the tokens from `i * context` on; every token is a target once, save the first.

    Args:
        stream: Integers, one dimension.
        context: Tokens read per window.

    Raises:
        ConfigError: The stream is shorter than one window and its last target.
    """

    def __init__(self, stream: Tensor, context: int) -> None:
        if len(stream) <= context:
            raise errors.ConfigError(
                f"a text of {len(stream)} tokens has no window of {context} tokens and their targets: "
                "give more text or a shorter context"
            )
        self.stream = stream
        self.context = context

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def batch(self, indices: Tensor) -> Window:
        places = indices.unsqueeze(1) * self.context + torch.arange(self.context + 1)
        tokens = self.stream[places].long()
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].masked_fill(inputs == END, IGNORED)
        return Window(inputs, targets, int((targets != IGNORED).sum()))

    def spread(self, count: int) -> Tensor:
        """Indices of up to `count` windows, evenly spread over the stream."""
        count = min(count, len(self))
        return torch.arange(count) * len(self) // count
