"""The handle of the training loop: `DataParallel`, or a stock method with the same interface."""

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stretto.engine import Clock, Options, Total
from stretto.errors import ConfigError
from stretto.exchange import check_nodes
from stretto.fields import field_types
from stretto.groups import Link, SoloGroup
from stretto.guards.text import parse_guards
from stretto.parallel import DataParallel
from stretto.schedules import Along, over
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.patience import waiting
from stretto_lab.peers import Peer, options_of
from stretto_lab.recipes import OverFiles
from stretto_lab.train.arms import Arm, parse_arm, peer_of
from stretto_lab.train.budget import Budget, budget_of
from stretto_lab.train.configuration import RunConfig, TaskT

Batch = TypeVar("Batch")


Handle = DataParallel | Peer
"""The training loop's handle; both classes have the same methods."""


def open_handle(
    run: RunConfig[TaskT],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    group: ProcessGroup | None = None,
    budget: Budget | None = None,
    mesh: Any = None,
    total: int | None = None,
) -> Handle:
    """Wrap a model as the run's configuration says; all ranks of `group`, or of the default group, must call it.

    Args:
        run: The configuration.
        model: The model to train.
        optimizer: Over its parameters.
        scheduler: Stepped at every committed update.
        group: The group of all ranks; None is PyTorch's default group.
        budget: Its length is used for averaging rates that name no steps.
        mesh: The mesh of `train.shards.placed`, if the model is sharded inside nodes.
        total: Micro-batches of all ranks together in an update, instead of `run.micro_batches` of each.

    Raises:
        ConfigError: Settings contradict each other, or do not fit the model or the optimizer.
    """
    arm = parse_arm(run.strategy)
    if not arm.is_ours:
        kind = peer_of(arm.name)
        return kind(
            model,
            optimizer,
            run.micro_batches,
            clip_norm=run.clip_norm,
            scheduler=scheduler,
            options=options_of(kind)(**arm.options),
        )
    micro_batches: int | Total | Clock = run.micro_batches if run.clock is None else run.clock
    if total is not None:
        micro_batches = Total(total // run.shard)  # a node takes one from each of its ranks
    return DataParallel(
        model,
        optimizer,
        strategy_of(arm, run, budget),
        micro_batches=micro_batches,
        scheduler=scheduler,
        group=group,
        mesh=None if mesh is None else mesh["node"],
        guards=parse_guards(run.guards, run.seed),
        options=_options(run),
    )


def strategy_of(arm: Arm, run: RunConfig[TaskT], budget: Budget | None) -> Strategy:
    """Return the strategy of an arm for its run.

    Raises:
        ConfigError: Its rate needs a length of the run that is not known.
    """
    options = dict(arm.options)
    if "seed" in field_types(STRATEGIES[arm.name]):
        options.setdefault("seed", run.seed)
    if "rate" in options:
        options["rate"] = over(options["rate"], None if budget is None else budget.updates)
        if isinstance(options["rate"], Along) and options.get("plan", "even") == "even":
            raise ConfigError(
                f"{arm.text}: even averages sum a rate from the first round on, and this rate follows a "
                "budget of samples: expected plan=bernoulli, or the number of updates as a third value"
            )
    return STRATEGIES[arm.name](**options)


def _options(run: RunConfig[TaskT]) -> Options:
    """Return the options of a run; noise without a seed uses the run's seed."""
    noise = run.noise
    if noise is not None and noise.seed is None:
        noise = dataclasses.replace(noise, seed=run.seed)
    finds = bool(run.guards) or run.verified  # without them there is nothing that strikes would count
    return dataclasses.replace(run.options, noise=noise, strikes=run.strikes if finds else None)


def check_run(run: RunConfig[TaskT], world_size: int) -> None:
    """Raise if settings of the run contradict each other, before there are workers, data or a folder.

    It wraps a model of one weight on a single rank, so that each part of the library checks its settings. A recipe with
    files of the user checks those too.

    Raises:
        ConfigError: Settings contradict each other.
    """
    _check_ranks(run, world_size)
    _check_shards(run, world_size)
    if run.ranks_per_node is not None:
        check_nodes(world_size, run.ranks_per_node)
    if isinstance(run.task, OverFiles):
        with waiting("reading the data"):
            run.task.check()
    arm = parse_arm(run.strategy)
    if not arm.is_ours and (run.faults or run.noise is not None):
        what = "faults strike" if run.faults else "noise hits"
        raise ConfigError(f"{arm.name}: {what} strategies of the library only; remove one of the two")
    if run.slow and not arm.is_ours:
        raise ConfigError(
            f"slow with strategy={arm.text!r}: a stock method does not report its micro-batches: expected a "
            "strategy of the library"
        )
    if arm.is_ours:
        model = nn.ParameterList([torch.zeros(1)])
        # Noise may be on ranks that only the real group has, and patterns fit buffers that only the real model has.
        alone = dataclasses.replace(run, noise=None, buffers=Options().buffers)
        with waiting("checking the settings"):  # the first optimizer imports much of PyTorch
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            budget = budget_of(run, world_size)
            open_handle(alone, model, optimizer, group=SoloGroup(), budget=budget).finish()


def _check_ranks(run: RunConfig[TaskT], world_size: int) -> None:
    """Raise ConfigError if faults, noise or slowness name ranks that the run does not have."""
    named = {fault.rank for fault in run.faults if fault.rank != "all"}
    if outside := sorted(rank for rank in named if not rank < world_size):
        raise ConfigError(
            f"faults name rank {', '.join(map(str, outside))}; the run has ranks 0 to {world_size - 1}"
        )
    if run.noise is not None:
        run.noise.check(world_size)
    if outside := sorted(rank for rank in run.slow if not 0 <= rank < world_size):
        raise ConfigError(f"slow names rank {outside[0]}; the run has ranks 0 to {world_size - 1}")


def _check_shards(run: RunConfig[TaskT], world_size: int) -> None:
    """Raise ConfigError if the run's settings do not allow a model that is sharded inside nodes."""
    if run.shard == 1:
        return
    if world_size % run.shard:
        raise ConfigError(f"shard={run.shard}: expected a divisor of the {world_size} ranks")
    unfit = {
        f"strategy={run.strategy!r}, a stock method": not parse_arm(run.strategy).is_ours,
        f"link={run.link!r}, which would slow links inside nodes too": not Link.parse(run.link).is_free,
        "faults": bool(run.faults),
        "ranks_per_node, whose ranks FSDP2 has already": run.ranks_per_node is not None,
        "noise": run.noise is not None,
    }
    if refused := [what for what, is_asked in unfit.items() if is_asked]:
        raise ConfigError(f"shard={run.shard} with {', '.join(refused)}: not built yet; remove one of them")
