"""A plan for a user's own training loop: the arguments for `DataParallel`."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine import Clock, Options
from stretto.errors import ConfigError
from stretto.flat import is_dtensor
from stretto.groups import join_launched_group, launched_per_node
from stretto.random_states import random_states, restore_random_states
from stretto.strategies import Strategy
from stretto_lab.evidence import SMALL
from stretto_lab.observe import Stages
from stretto_lab.plan.measure import Machine, Ranks, measure_task
from stretto_lab.plan.ranking import Ranking, rank_by_time
from stretto_lab.recipes.task import Loss, Task
from stretto_lab.train.arms import Arm, parse_arm


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a plan for a training loop; equal on all ranks."""

    arm: Arm
    """The strategy and wire, as the command line writes them."""
    micro_batches: int | Clock
    """Micro-batches for `DataParallel`: a number per rank and update, or a clock if ranks differ in speed and gain by
    it."""
    ranking: Ranking | None
    """The prices of all candidates, and the measurements; None if there is one rank only."""

    @property
    def strategy(self) -> Strategy:
        """The strategy for `DataParallel`."""
        return self.arm.strategy()

    @property
    def wire(self) -> str:
        """The wire for `DataParallel`."""
        return self.arm.wire

    @property
    def ranks_per_node(self) -> int | None:
        """The value for `Options`; None unless ranks are on nodes and gain by it."""
        return self.arm.settings.get("ranks_per_node")


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    *,
    micro_batches: int | Clock = 1,
    batches: int = 8,
    bucket_bytes: int | None = None,
    allow_loss: float = SMALL,
) -> Choice:
    """Measure a loop's work and link for some seconds, and return the strategy and wire whose updates are the fastest.

    It considers only strategies whose cost in held-out loss is known and allowed. It measures a copy of model and
    optimizer; they and the random states stay unchanged. All ranks must call it before `DataParallel`. A single rank
    gets the default.

    Args:
        model: On its device.
        optimizer: Over its trainable parameters.
        loss_function: Returns the scalar loss of a model on a batch; the planner calls it with the copy.
        loader: This rank's batches; the planner takes `batches + 2`, and starts again if the loader ends sooner.
        micro_batches: Per rank and update; or a clock for the strategies that overlap. Others then have the clock's
            minimum.
        batches: Micro-batches to time.
        bucket_bytes: As in the job's `Options`; None is the default of the device.
        allow_loss: Nats of held-out loss that the choice may cost, by measurement.

    Raises:
        ConfigError: The loader ends too soon, or the model is sharded.
        CommunicationError: The ranks did not connect, or another rank has failed.
    """
    if any(map(is_dtensor, model.parameters())):
        raise ConfigError(
            "choose: expected a whole model on every rank, found one that fully_shard has sharded; stretto "
            "plan --shard prices a recipe whose model is sharded inside nodes"
        )
    fixed = micro_batches if isinstance(micro_batches, int) else micro_batches.minimum
    device = next(model.parameters(), torch.empty(0)).device
    join_launched_group(device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Choice(parse_arm("zero1"), fixed, None)
    ranks = Ranks(device, Options())
    with ranks.together():
        machine = _measured(ranks, model, optimizer, loss_function, loader, batches)
        ranking = rank_by_time(
            machine,
            micro_batches=fixed,
            clock="auto" if isinstance(micro_batches, int) else micro_batches,
            bucket_bytes=bucket_bytes,
            allow_loss=allow_loss,
            prices_all=False,
        )
        # Prices of other processors might differ in a last bit, so rank 0's choice is everybody's.
        arms = sorted(one.arm for one in ranking.prices)
        chosen = ranks.gather([arms.index(ranking.choice.arm)])[0]
    arm = parse_arm(arms[int(chosen)])
    return Choice(arm, arm.settings.get("clock", fixed), ranking)


def _measured(
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_function: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    batches: int,
) -> Machine:
    """Measure a copy, and restore the random states."""
    states = random_states(ranks.device)
    try:
        model, optimizer = copy.deepcopy((model, optimizer))
        task = Task(
            model=model,
            optimizer=optimizer,
            scheduler=None,
            loader=loader,  # type: ignore[arg-type]  # only iterated
            loss=lambda model, batch: Loss(loss_function(model, batch), 1.0, 1),
            evaluate=lambda model: math.nan,
        )
        return measure_task(ranks, task, batches, launched_per_node(), Stages(is_shown=False))
    finally:
        restore_random_states(states, ranks.device)
