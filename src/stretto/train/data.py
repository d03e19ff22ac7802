"""The micro-batches of a run: the task's own, slowed down and echoed where the run says so."""

from collections.abc import Sequence
from typing import Any, cast

from torch import distributed as dist

from stretto.echo import EchoLoader, EchoOptions, Even, Plan
from stretto.echo.text import parse_plan
from stretto.recipes import ResumableLoader, reshard
from stretto.recipes.task import Batch
from stretto.train.configuration import RunConfig, TaskT
from stretto.train.slow_loader import SlowLoader, SlowStore
from stretto.virtual import VirtualGroup, VirtualStore


def loader_of(
    run: RunConfig[TaskT],
    loader: ResumableLoader[Batch],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> ResumableLoader[Batch]:
    """Return what the run reads on this rank.

    A slow loader is read ahead in the background also where nothing is echoed, as loaders with workers are: what an
    echo gains is measured against a loop that overlaps already.

    Args:
        run: What to do.
        loader: The task's.
        rank: This rank.
        group: Whose ranks train; on a virtual one a slow loader takes virtual time.
    """
    if run.echo == "none" and run.slow_loader == "none":
        return loader
    return EchoLoader(slowed(run, loader, rank, group), _plan(run), options=EchoOptions(seed=run.seed))


def slowed(
    run: RunConfig[TaskT],
    loader: ResumableLoader[Batch],
    rank: int,
    group: dist.ProcessGroup | None = None,
) -> ResumableLoader[Batch]:
    """Return the task's loader, slowed down where the run says so; the arguments are those of `loader_of`."""
    store = SlowStore.parse(run.slow_loader)
    if store is None:
        return loader
    seed = run.seed + rank
    if isinstance(group, VirtualGroup):
        # It has the loader's attributes, those of a state among them.
        return cast(ResumableLoader[Batch], VirtualStore(loader, group, store.durations(seed)))
    return SlowLoader(loader, store, seed)


def reshard_loader(states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return the loader state for `rank` of `world_size`, from those of all ranks of the saved run.

    As `recipes.reshard`; batches in hand are dropped, their remaining uses with them.
    """
    if "position" not in states[0]:
        return reshard(states, rank, world_size)
    after = reshard([state["after"] for state in states], rank, world_size)
    position = {**states[0]["position"], "in_epoch": False}
    return {**states[0], "position": position, "uses": [], "before": after, "after": after, "batches": None}


def _plan(run: RunConfig[TaskT]) -> Plan:
    return Even(1) if run.echo == "none" else parse_plan(run.echo, run.planned_steps)
