"""The recipe `stdlib-gpt`: a language model on the source code of the Python standard library."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.batches import MicroBatches
from stretto_lab.recipes.corpus import Text, read_corpus
from stretto_lab.recipes.gpt import causal_lm, shape_of
from stretto_lab.recipes.optimizers import AdamW, LanguageOptimizer, Schedule, language_optimizer
from stretto_lab.recipes.task import Loss, MeanLoss, Task
from stretto_lab.recipes.text import IGNORED, Bytes, Window, Windows, sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class StdlibGPT:
    """A language model on the source code of Python's standard library; 2 million parameters, 8 x 128 bytes per
    micro-batch.
    """

    loss_unit: ClassVar[str] = "nats per byte"
    """Unit of the losses."""

    size: str = "2m"
    """Millions of parameters: 0.1m, 0.2m, 0.5m, 1m, 2m, 5m, 10m, 20m, 50m or 100m; or LAYERSxWIDTHxHEADS, as 4x200x4.
    2 million learn visibly within a minute on two cores."""

    context: int = 128
    """Tokens the model reads at once."""

    batch: int = 8
    """Sequences per micro-batch."""

    optimizer: LanguageOptimizer = "adamw"
    """Optimizer of the model."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.001 for adamw and muon, and 0.01 for adafactor."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters and activations."""

    evaluation_windows: int = 256
    """Number of windows per evaluation, each of `context` tokens, spread evenly over the held-out text."""

    data: Text = field(default_factory=Text)
    """The text."""

    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the updates."""

    sample: int = 200
    """Most tokens of the sample text at the end."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, context=1, batch=1, lr=0, evaluation_windows=1, sample=0)
        shape_of(self.size)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens in a sample."""
        return self.context

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank; see `TaskConfig.build` for arguments and errors."""
        corpus, tokens = read_corpus(self.data), Bytes()
        model = causal_lm(
            "gpt2",
            shape_of(self.size),
            vocabulary=tokens.vocabulary,
            context=self.context,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype],
            seed=seed,
        )
        optimizer = language_optimizer(self.optimizer, model, self.lr, AdamW(), usual_lr=0.001)
        train = Windows(tokens.stream(corpus.train.values()), self.context)
        heldout = Windows(tokens.stream(corpus.heldout.values()), self.context)
        evaluated = heldout.spread(self.evaluation_windows).split(self.batch)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=MicroBatches(train, self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=lambda model, window: next_token_loss(model, window)._replace(weight=1.0),
            evaluate=MeanLoss([heldout.batch(indices) for indices in evaluated], next_token_loss),
            sample=partial(sampled, prompt="def ", length=self.sample, tokens=tokens, context=self.context),
        )


def next_token_loss(model: nn.Module, window: Window) -> Loss:
    """Return the mean cross-entropy per predicted token, in nats and in float32, with their number as its weight."""
    device = next(model.parameters()).device
    logits = model(window.inputs.to(device, non_blocking=True)).logits
    targets = window.targets.to(device, non_blocking=True)
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    value = total / max(1, window.predicted)  # a mean of nothing would be NaN, also with weight 0
    return Loss(value, float(window.predicted), len(window.inputs))
