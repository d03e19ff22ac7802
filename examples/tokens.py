"""A language model on files of tokens, which are mapped into memory, so that they may be larger than it.

    stretto train examples/tokens.py:TokenFile --task.data train.bin --task.heldout val.bin

A file has an unsigned 16-bit number for every token and nothing else. Ranks of a machine share its pages. The order of
the windows needs 8 bytes for each of them on every rank: 0.4 GB for 50 billion tokens in windows of 1,024.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.recipes.language_models import language_model
from stretto_lab.recipes.optimizers import AdamW, Schedule
from stretto_lab.recipes.stdlib_gpt import next_token_loss
from stretto_lab.recipes.task import MeanLoss
from stretto_lab.recipes.text import Windows


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A causal language model from nothing, under AdamW."""

    loss_unit: ClassVar[str] = "nats per token"

    data: str = "train.bin"
    """File of tokens to train on."""
    heldout: str = "val.bin"
    """File of tokens, of which 256 windows are evaluated on."""
    model: str = "gpt2"
    """Size or config.json."""
    vocabulary: int = 50257
    """Number of different tokens."""
    end: int = 50256
    """The token after every document."""
    length: int = 1024
    """Tokens the model reads at once."""
    batch: int = 8
    """Windows per micro-batch."""
    lr: float = 6e-4
    """Learning rate after the warm-up."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank."""
        model = language_model(
            self.model, vocabulary=self.vocabulary, length=self.length, dtype=torch.float32, seed=seed
        )
        optimizer = AdamW().build(model, self.lr)
        train, heldout = self.mapped(self.data), self.mapped(self.heldout)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=Schedule().build(optimizer, updates),
            loader=MicroBatches(train, self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=next_token_loss,
            evaluate=MeanLoss(
                [heldout.batch(some) for some in heldout.spread(256).split(self.batch)], next_token_loss
            ),
        )

    def mapped(self, path: str) -> Windows:
        """Return the windows of a file; only those of a micro-batch are read."""
        # Copy on write, though nothing is written: PyTorch warns of memory that is read-only.
        return Windows(torch.from_numpy(np.memmap(path, np.uint16, "c")), self.length, self.end)
