"""The interface between a recipe and the training loop.

A recipe is a callable without arguments that returns a `TaskConfig`: a frozen dataclass of options. Its `build` makes
the `Task` of one rank: model, optimizer, scheduler, micro-batches, loss and evaluation.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto import errors
from stretto.checkpoint.ranks import Ranks
from stretto.parallel import DataParallel

Batch = Any
"""One micro-batch of a task; only the task's loss reads it."""

BatchOut = TypeVar("BatchOut", covariant=True)


@runtime_checkable
class TaskConfig(Protocol):
    """A frozen dataclass of options that builds a task."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> "Task":
        """Build the task of one rank.

        Args:
            rank: This rank, from 0.
            world_size: Number of ranks that share the micro-batches.
            seed: Decides the initial parameters and the order of the data; equal on every rank.
            updates: Length of the run in committed updates; None if only time ends it.

        Raises:
            ConfigError: The options contradict each other or the data.
            MissingExtra: A package of the `recipes` extra is not installed.
        """
        ...


def loss_unit(task: object) -> str:
    """Return the unit of a recipe's losses after a space; empty if its options have no `loss_unit`."""
    unit = getattr(task, "loss_unit", "")
    return f" {unit}" if unit else ""


def tokens_per_sample(task: object) -> int | None:
    """Return the tokens in a sample of a language model; None if the recipe's options do not give them."""
    found: int | None = getattr(task, "tokens_per_sample", None)
    return found


@runtime_checkable
class OverFiles(Protocol):
    """Options of a task that reads the user's own files."""

    def check(self) -> None:
        """Read enough to find mistakes before there are workers or a run's folder.

        Raises:
            ConfigError: A file is missing, empty, or of the wrong kind.
            MissingExtra: A package of the `recipes` extra is not installed.
        """
        ...

    def kept_in(self, folder: str) -> TaskConfig:
        """Return options that keep, in the run's `folder`, the files that must be the same after a resume."""
        ...


class ResumableLoader(Protocol[BatchOut]):
    """The micro-batches of one rank, in an order that a saved state can continue.

    Every iterator continues after the last micro-batch that any iterator has returned. From that moment the state
    counts the micro-batch as consumed.
    """

    def __iter__(self) -> Iterator[BatchOut]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loss(NamedTuple):
    """The loss of one micro-batch, which adds `weight * value` to the update's objective."""

    value: Tensor
    """Scalar mean loss, attached to the graph."""

    weight: float
    """Weight of this mean among the micro-batches of the update (1, or the number of predicted tokens)."""

    samples: int
    """Sequences or images in the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model with all parts needed to train it on one rank."""

    model: nn.Module
    """The model; equal on every rank for equal seeds."""

    optimizer: Optimizer
    """An optimizer over the model's trainable parameters that has not stepped."""

    scheduler: LRScheduler | None
    """A scheduler that steps once per committed update."""

    loader: ResumableLoader[Batch]
    """This rank's micro-batches."""

    loss: Callable[[nn.Module, Batch], Loss]
    """Forward pass; moves the micro-batch to the model's device."""

    evaluate: Callable[[nn.Module], float]
    """Returns the mean loss over the held-out samples; deterministic, without gradients, and without a change of the
    model's modes."""

    sample: Callable[[nn.Module], str] | None = None
    """Returns a text that the model writes (language models)."""

    accuracy: Callable[[nn.Module], float] | None = None
    """Returns the share of held-out samples that are classified correctly (classifiers)."""

    publish: Callable[[Mapping[str, Tensor], Path], None] | None = None
    """Writes the model, given its `state_dict()`, into a folder that other libraries can read."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and disable gradients during the block; then restore each module's mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode  # not `train()`, which would also set the modules inside


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """The weighted mean of `loss` over held-out batches, summed in float64: `sum(weight * value) / sum(weight)`."""

    batches: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Loss]

    def __call__(self, model: nn.Module, parallel: DataParallel | None = None) -> float:
        """Return the mean, the same to the bit on one rank as where the ranks of a job take every N-th batch each."""
        rank, world_size = (0, 1) if parallel is None else (parallel.rank, parallel.world_size)
        with evaluating(model):
            losses = [self.loss(model, batch) for batch in self.batches[rank::world_size]]
        found = [[one.weight * one.value.item(), one.weight] for one in losses]
        dealt = [found] if parallel is None else Ranks(parallel).gather("evaluating", lambda: found)
        rows = [dealt[index % world_size][index // world_size] for index in range(len(self.batches))]
        return float(sum(value for value, _ in rows) / sum(weight for _, weight in rows))


def extra(module: str, purpose: str) -> ModuleType:
    """Import a module that the extra `recipes` installs.

    Args:
        module: Its full name.
        purpose: The feature that needs it; the subject of the error's sentence.

    Raises:
        MissingExtra: It is not installed. An installed module that fails to import raises its own error.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but something that it needs is not
        raise errors.MissingExtra(package, "recipes", purpose) from error
