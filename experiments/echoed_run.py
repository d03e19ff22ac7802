"""One run with echoed batches on two ranks of a virtual cluster: its held-out loss, and what it loaded and sent.

How long it would have taken with a slow loader and a slow link is computed afterwards from a model of time, so that
nothing depends on how busy the machine was:

    read(k) = max(read(k - 1), taken(k - ahead)) + load
    end(t)  = max(end(t - 1), read(k) if use t takes the fresh batch k) + step + (exposed if an exchange is made)

A loader reads one batch after the other, at most `AHEAD` beyond those taken, and one more for every further micro-batch
of an update; a use that needs a fresh one waits for it.
An exchange runs beside nothing, as in `DDP` and `LocalSGD`. On the clock of an ideal `DDP` gradients are exchanged
beside the backward pass, which is taken as two thirds of a step; averages of replicas still run beside nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

from stretto import DataParallel, EchoLoader, EchoOptions, LocalSGD
from stretto.echo import Plan
from stretto.echo.plans import epoch_length
from stretto.errors import NonFinite
from stretto.strategies import Strategy
from stretto_lab.recipes import TaskConfig
from stretto_lab.recipes.task import Task
from stretto_lab.virtual import VirtualCluster, VirtualGroup

RANKS = 2
POINTS = 10
"""Evaluations along a run."""
AHEAD = 2
"""Batches that the modelled loader reads ahead."""
BACKWARD = 2 / 3
"""Share of a step beside which the gradients of an ideal `DDP` travel."""
CLOCKS = {"seconds": (1e10, 0.0), "slow_link_seconds": (1e8, 0.0), "hidden_seconds": (1e8, BACKWARD)}
"""The axes of time: bits per second of the link, and the share of a step beside which gradients travel."""
AXES = ("updates", "fresh_samples", *CLOCKS, "megabytes")
"""What a run costs, in six ways."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How a run takes and uses its batches."""

    plan: Plan
    loads: int
    """Fresh batches of each rank."""
    strategy: Strategy
    micro_batches: int = 1
    """Uses per update."""

    @property
    def sums_gradients(self) -> bool:
        """Whether its exchanges are of gradients, not of replicas."""
        return not isinstance(self.strategy, LocalSGD)

    def uses(self, seed: int) -> int:
        """Return how many batches each rank uses, fresh and echoed."""
        return epoch_length(self.plan.selector(seed), self.loads, 0, self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The machine of the model of time."""

    step_seconds: float
    """A rank's own work on one batch."""
    load_seconds: float
    """Reading a fresh batch."""


def train(config: TaskConfig, arm: Arm, seed: int) -> dict[str, Any]:
    """Train once, and return rank 0's losses and, for every use, whether its batch was fresh and an exchange followed.

    Raises:
        NonFinite: The run diverged.
    """
    results = VirtualCluster(RANKS, seed=seed).run(
        lambda rank, group: _train_rank(config, arm, seed, rank, group)
    )
    return results.values[0]


def _train_rank(config: TaskConfig, arm: Arm, seed: int, rank: int, group: VirtualGroup) -> dict[str, Any]:
    updates = arm.uses(seed) // arm.micro_batches
    task = config.build(rank, RANKS, seed, updates)
    task.loader.micro_batches = arm.loads * RANKS
    # Read on the training thread: a virtual cluster has no other time than its own.
    loader = EchoLoader(task.loader, arm.plan, options=EchoOptions(seed=seed, ahead=0))
    parallel = DataParallel(
        task.model, task.optimizer, arm.strategy, micro_batches=arm.micro_batches, group=group
    )
    curve: list[dict[str, float]] = []
    fresh, exchanged = "", ""
    sent = []
    for batch in parallel.feed(loader):
        loss = task.loss(task.model, batch)
        update = parallel.backward(loss.value, loss.weight, loss.samples)
        fresh += "1" if loader.is_fresh else "0"
        exchanged += "1" if update and update.gap == 0 else "0"
        if update is None:
            continue
        task.scheduler.step()
        if update.gap == 0:
            sent.append(update.sent_bytes)
        if update.step * POINTS // updates > (update.step - 1) * POINTS // updates:
            with parallel.settled():
                curve.append({"use": len(fresh), **(_measured(task) if rank == 0 else {})})
        if update.step == updates:
            break
    parallel.finish()
    # The least, because an evaluation of replicas sends an average of its own.
    return {"micro_batches": arm.micro_batches, "fresh": fresh, "exchanged": exchanged,
            "exchange_bytes": min(sent), "curve": curve}  # fmt: skip


def _measured(task: Task) -> dict[str, float]:
    loss = task.evaluate(task.model)
    if not math.isfinite(loss):
        raise NonFinite(f"the held-out loss is {loss}")
    return {
        "heldout_loss": loss,
        **({} if task.accuracy is None else {"accuracy": task.accuracy(task.model)}),
    }


def costs(run: dict[str, Any], arm: Arm, model: Model, batch: int) -> list[dict[str, float]]:
    """Return what a run had cost after each of its uses, on all `AXES`.

    Args:
        run: Returned by `train`.
        arm: What was trained.
        model: The machine of the model of time.
        batch: Samples per rank and use.
    """
    fresh = [letter == "1" for letter in run["fresh"]]
    exchanged = [letter == "1" for letter in run["exchanged"]]
    times = {}
    for axis, (bits, hiding) in CLOCKS.items():
        exchange = 8 * run["exchange_bytes"] / bits
        hidden = hiding * model.step_seconds if arm.sums_gradients else 0.0
        times[axis] = timeline(
            fresh, exchanged, model, max(0.0, exchange - hidden), AHEAD + run["micro_batches"] - 1
        )
    loads, exchanges = 0, 0
    found = []
    for use, (is_fresh, is_exchanged) in enumerate(zip(fresh, exchanged, strict=True)):
        loads += is_fresh
        exchanges += is_exchanged
        found.append({"updates": (use + 1) // run["micro_batches"], "fresh_samples": loads * batch * RANKS,
                      "megabytes": exchanges * run["exchange_bytes"] / 1e6,
                      **{axis: ends[use] for axis, ends in times.items()}})  # fmt: skip
    return found


def timeline(
    fresh: list[bool], exchanged: list[bool], model: Model, exposed: float, ahead: int = AHEAD
) -> list[float]:
    """Return the modelled second at which every use ends; see the module's equations.

    Args:
        fresh: Whether a use takes a fresh batch.
        exchanged: Whether it ends with an exchange.
        model: What steps and loads take.
        exposed: Seconds of an exchange beside which nothing runs.
        ahead: Batches that the loader reads beyond those taken.
    """
    now, read = 0.0, 0.0
    taken: list[float] = []
    ends = []
    for is_fresh, is_exchanged in zip(fresh, exchanged, strict=True):
        if is_fresh:
            read = max(read, taken[-ahead] if len(taken) >= ahead else 0.0) + model.load_seconds
            now = max(now, read)
            taken.append(now)
        now += model.step_seconds + (exposed if is_exchanged else 0.0)
        ends.append(now)
    return ends
