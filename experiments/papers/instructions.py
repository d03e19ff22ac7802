"""Language models tuned on instructions: `stretto train experiments/papers/instructions.py:Tuned`.

Rows have `instruction`, `input` and `output`, as Alpaca's; they are set in headings, as Alpaca does without its first
sentence, and the loss is taken of the output alone.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.recipes.language_models import language_model, with_lora
from stretto_lab.recipes.optimizers import AdamW, Schedule
from stretto_lab.recipes.rows import Heldout, read_sides
from stretto_lab.recipes.stdlib_gpt import next_token_loss
from stretto_lab.recipes.task import MeanLoss
from stretto_lab.recipes.text import IGNORED, Subwords, Tokens, Window


@dataclass(frozen=True)
class Instructions:
    """Instructions by index; a micro-batch is as long as its longest one."""

    rows: Any
    tokens: Tokens
    length: int
    """Most tokens of one; of what is longer, first the prompt is cut down to a half, and then the output."""

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor) -> Window:
        """Return the rows `indices`, padded at their ends; of prompts and padding no loss is taken.

        Padding needs no mask of attention: it stands behind all that a causal model reads to predict a token.
        """
        pairs = [self._pair(self.rows[index]) for index in indices.tolist()]
        longest = max(len(inputs) for inputs, _ in pairs)
        inputs, targets = (
            torch.stack([functional.pad(row, (0, longest - len(row)), value=filler) for row in side])
            for side, filler in zip(zip(*pairs, strict=True), (self.tokens.end, IGNORED), strict=True)
        )
        return Window(inputs, targets, int((targets != IGNORED).sum()))

    def _pair(self, row: dict[str, str]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets; of a prompt its end is kept, which stands beside the output."""
        parts = [("Instruction", row["instruction"]), ("Input", row.get("input"))]
        headed = "".join(f"### {title}:\n{text}\n\n" for title, text in parts if text)
        output = [*self.tokens.encode(row["output"].encode()), self.tokens.end]
        room = max(self.length + 1 - len(output), (self.length + 1) // 2)
        prompt = self.tokens.encode(f"{headed}### Response:\n".encode())[-room:]
        kept = torch.tensor([*prompt, *output][: self.length + 1])
        targets = kept[1:].clone()
        targets[: len(prompt) - 1] = IGNORED
        return kept[:-1], targets


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A language model of a folder, tuned on instructions by AdamW without decay."""

    loss_unit: ClassVar[str] = "nats per token"

    model: str = "model"
    """Folder with safetensors and a tokenizer."""
    data: str = "alpaca.jsonl"
    """JSON, JSON lines or Parquet."""
    length: int = 512
    """Most tokens of an instruction with its output."""
    batch: int = 4
    """Instructions per micro-batch."""
    lora_rank: int | None = None
    """Rank of LoRA's adapters, which alone are trained, with a factor of 16; None trains the whole model."""
    lr: float = 2e-5
    """Learning rate, which falls to zero as a half cosine."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank."""
        tokens = Subwords.read(self.model)
        sides = read_sides(self.data, Heldout(), "file")
        train, heldout = (Instructions(side, tokens, self.length) for side in sides)
        dtype = getattr(torch, self.dtype)
        model = language_model(
            self.model, vocabulary=tokens.vocabulary, length=self.length, dtype=dtype, seed=seed
        )
        if self.lora_rank is not None:
            model = with_lora(model, self.lora_rank, 16.0, seed)
        optimizer = AdamW(betas=self.betas, weight_decay=0.0).build(model, self.lr)
        first = torch.arange(min(256, len(heldout))).split(self.batch)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=Schedule(warmup=0, floor=0.0).build(optimizer, updates),
            loader=MicroBatches(train, self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=next_token_loss,
            evaluate=MeanLoss([heldout.batch(some) for some in first], next_token_loss),
        )
