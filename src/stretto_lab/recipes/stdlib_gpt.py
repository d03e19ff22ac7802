"""The recipe `stdlib-gpt`: a language model on the sources of the Python standard library."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.batches import MicroBatches
from stretto_lab.recipes.corpus import Text, read_corpus
from stretto_lab.recipes.gpt import SHAPES, Architecture, Shape, Size, causal_lm
from stretto_lab.recipes.optimizers import (
    Adafactor,
    AdamW,
    LanguageOptimizer,
    Muon,
    Schedule,
    language_optimizer,
)
from stretto_lab.recipes.task import Loss, Task, mean_loss
from stretto_lab.recipes.text import IGNORED, BytePairs, Bytes, Snippet, Tokens, Window, Windows

Weigh = Literal["micro-batch", "token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StdlibGPT:
    """A language model on the sources of Python's standard library; 2 million parameters, 8 x 128 bytes per
    micro-batch."""

    architecture: Architecture = "gpt2"
    """Model family; GPT-2 has learned positions, LayerNorm and GELU, Llama rotary positions, RMSNorm and SwiGLU."""

    size: Size = "2m"
    """Millions of parameters, if tokens are bytes. 2 million learn visibly within a minute on two
    cores."""

    layers: int | None = None
    """Transformer blocks; None takes those of `size`."""

    width: int | None = None
    """Width of the residual stream; None takes that of `size`."""

    heads: int | None = None
    """Attention heads, a divisor of the width; None takes those of `size`."""

    context: int = 128
    """Tokens the model reads at once."""

    batch: int = 8
    """Sequences per micro-batch."""

    optimizer: LanguageOptimizer = "adamw"
    """Optimizer of the model; its own options are below."""

    lr: float | None = None
    """Learning rate after the warm-up; None takes 0.001 for adamw and muon, and 0.01 for adafactor."""

    weigh: Weigh = "micro-batch"
    """Weight of a micro-batch in the update; 1, or the number of tokens it predicts. No token is predicted across
    the border of two documents, so this number varies a little."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of parameters and activations."""

    evaluation_windows: int = 256
    """Windows that an evaluation reads; each of `context` tokens, spread evenly over the held-out text."""

    data: Text = field(default_factory=Text)
    """Where the text comes from, and what a token is."""

    adamw: AdamW = field(default_factory=AdamW)
    """Options of adamw."""

    muon: Muon = field(default_factory=Muon)
    """Options of muon."""

    adafactor: Adafactor = field(default_factory=Adafactor)
    """Options of adafactor."""

    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the updates."""

    sample: Snippet = field(default_factory=Snippet)
    """The text written at the end."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, layers=1, width=1, heads=1, context=1, batch=1, lr=0, evaluation_windows=1)

    @property
    def loss_unit(self) -> str:
        """Of the mean loss: what it is a mean over depends on the tokens."""
        return "nats per byte" if self.data.tokens == "bytes" else "nats per token"

    def shape(self) -> Shape:
        """Return the dimensions of `size`, replaced by those that are set."""
        preset = SHAPES[self.size]
        return Shape(self.layers or preset.layers, self.width or preset.width, self.heads or preset.heads)

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank; arguments and errors are those of `TaskConfig.build`."""
        corpus = read_corpus(self.data)
        texts = list(corpus.train.values())
        tokens: Tokens = Bytes() if self.data.tokens == "bytes" else BytePairs(texts, self.data.vocabulary)
        model = causal_lm(
            self.architecture,
            self.shape(),
            vocabulary=tokens.vocabulary,
            context=self.context,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype],
            seed=seed,
        )
        optimizer = language_optimizer(self, model, usual_lr=0.001)
        train = Windows(tokens.stream(texts), self.context)
        heldout = Windows(tokens.stream(corpus.heldout.values()), self.context)
        evaluated = heldout.spread(self.evaluation_windows).split(self.batch)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=self.schedule.build(optimizer, updates),
            loader=MicroBatches(train, self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=partial(next_token_loss, weigh=self.weigh),
            evaluate=partial(
                mean_loss,
                batches=[heldout.batch(indices) for indices in evaluated],
                loss=partial(next_token_loss, weigh="token"),
            ),
            sample=partial(self.sample.write, tokens=tokens, context=self.context),
        )


def next_token_loss(model: nn.Module, window: Window, weigh: Weigh) -> Loss:
    """Return the mean cross-entropy per predicted token, in nats; in float32, also for a bf16 model."""
    device = next(model.parameters()).device
    logits = model(window.inputs.to(device, non_blocking=True)).logits
    targets = window.targets.to(device, non_blocking=True)
    total = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    value = total / max(1, window.predicted)  # a mean of nothing would be NaN, also with weight 0
    return Loss(value, float(window.predicted) if weigh == "token" else 1.0, len(window.inputs))
