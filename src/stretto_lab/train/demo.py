"""A slow link, a slow loader and silent faults strike one small job together; then each remedy is left out in turn.

    clean        no hazard and no remedy: what the job would be in a perfect world
    all off      every hazard, no remedy
    all on       every hazard, every remedy
    no REMEDY    every hazard, every remedy but one

All arms of a seed begin with the same parameters, read the same data in the same order and make equally many updates.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from stretto.errors import ConfigError
from stretto.fields import check_at_least
from stretto.machine import describe_environment
from stretto_lab.faults import Fault, faults_text, parse_faults
from stretto_lab.observe import read_json_lines, replace_json
from stretto_lab.recipes import StdlibGPT, TaskConfig
from stretto_lab.recipes.optimizers import Schedule
from stretto_lab.recipes.task import loss_unit
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.comparison import left
from stretto_lab.train.configuration import Job, RunConfig, part_of
from stretto_lab.train.handle import check_run
from stretto_lab.train.launch import STEADY_AFTER, Ranks
from stretto_lab.train.loop import seconds_to_loss
from stretto_lab.train.outcome import Outcome, new_run_folder, prepare_run_folder
from stretto_lab.train.rank import train_rank
from stretto_lab.train.workers import device_of

RESULTS = "demo.json"
CLEAN, ALL_OFF, ALL_ON = "clean", "all off", "all on"
NO_HAZARD: Mapping[str, Any] = MappingProxyType({"link": "none", "slow_loader": "none", "faults": ()})
"""What a run without hazards has set."""
WITHOUT: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "overlap": {"strategy": "zero1", "estimates": None},
        "packed wire": {"wire": "fp32", "changes": None, "estimates": None},
        "echoing": {"echo": "none"},
        "guards": {"guards": (), "verified": False},
    }
)
"""What a run without a remedy has set, by remedy."""
_STARTING_SECONDS = 5.0
"""Of a run: processes start, and the model is evaluated."""
TARGET_AT = 2 / 3
"""Share of the clean run's updates; its held-out loss there is the target."""
FAULTS = parse_faults(
    "masters:rank=0:instant=10:lasts=sticky:rate=0.1:extent=chunk:pattern=power,"
    "gathered-values:rank=1:instant=10:lasts=sticky:rate=0.1:extent=chunk:pattern=power"
)
"""From the tenth round on, one round in ten: 4 KiB of rank 0's masters, and one bucket in ten: 4 KiB of what arrives at
rank 1. The values are multiplied by 256, which is what one wrong bit of the exponent does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig(Job[TaskConfig]):
    """A small job, the hazards that strike it, and the remedies, which are on but for what an arm leaves out."""

    task: TaskConfig = dataclasses.field(
        default_factory=lambda: StdlibGPT(
            layers=2, width=128, heads=4, evaluation_windows=32, schedule=Schedule(warmup=5, floor=1.0)
        )
    )
    """Model, data and optimizer: 450,000 parameters, and a constant learning rate."""
    out: str | None = None
    """Folder for demo.json, the page and the runs, instead of a new one in runs/."""
    seeds: int = 1
    """How often all arms run; the seed grows by one each time."""
    updates: int | None = 48
    """Updates of every arm."""
    evaluate_every: int | None = 4
    """Updates between evaluations of the held-out loss, with the clock stopped."""
    link_slowness: float = 3.0
    """How much longer than an update of the clean run the link is busy with what that update sends; 0 for a free link.
    A rate in --link counts instead."""
    loader_slowness: float = 2.0
    """How much longer than a micro-batch of the clean run loading one takes; 0 for a fast loader. What --slow-loader
    says counts instead."""
    faults: tuple[Fault, ...] = FAULTS
    """Silent faults; those of train, in the page guards."""
    strategy: str = "acco"
    """First remedy of a slow link, hidden communication; without it the strategy is zero1."""
    wire: str = "int4"
    """Second remedy of a slow link, a packed wire; without it fp32."""
    echo: str = "even:uses=2"
    """Remedy of a slow loader; updates use the batches of the one before again."""
    guards: tuple[str, ...] = ("standard",)
    """Remedy of faults."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the model lives; slow links and faults are those of processors alone."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, seeds=1, updates=3, link_slowness=0, loader_slowness=0)
        if self.updates is None or self.evaluate_every is None:
            raise ConfigError(
                f"updates={self.updates}, evaluate_every={self.evaluate_every}: expected two numbers, because arms are "
                "compared along equally many updates"
            )
        if not parse_arm(self.strategy).is_ours:
            raise ConfigError(f"strategy={self.strategy}: expected a strategy of train, not a stock method")


def arms_of(config: DemoConfig) -> dict[str, RunConfig[TaskConfig]]:
    """Return the run of every arm by name, in their order, with the hazards that `config` names.

    A remedy that `config` does not have needs no arm without it.
    """
    arm = parse_arm(config.strategy)
    whole = RunConfig(
        **{**part_of(config, Job), "wire": arm.settings.get("wire", config.wire)},
        strategy=config.strategy,
        faults=config.faults,
        checkpoint_every=None,
        tensorboard=False,
    ).run_of(arm)
    nothing = {name: value for settings in WITHOUT.values() for name, value in settings.items()}
    without = {f"no {remedy}": dataclasses.replace(whole, **settings) for remedy, settings in WITHOUT.items()}
    return {
        CLEAN: dataclasses.replace(whole, **nothing, **NO_HAZARD),
        ALL_OFF: dataclasses.replace(whole, **nothing),
        ALL_ON: whole,
        **{name: run for name, run in without.items() if run != whole},
    }


def demonstrate(config: DemoConfig, ranks: Ranks, log: Callable[[str], None]) -> dict[str, Any]:
    """Run all arms with every seed and return what demo.json holds, which is written anew after every run.

    Args:
        config: Job, hazards and remedies.
        ranks: Local ones.
        log: Called with one line of text before and after every run.

    Raises:
        ConfigError: Settings contradict each other, or the folder is not new; no run has begun.
        WorkerFailed: A rank failed.
    """
    for run in arms_of(config).values():
        check_run(run, ranks.world_size)
    out = Path(config.out or new_run_folder("demo"))
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out={out}: expected a folder that is new or empty; name another one")
    log(
        f"{len(arms_of(config)) * config.seeds} runs of {config.updates} updates; after the first one, which meets no "
        "hazard, there is an estimate of how long all take"
    )
    device = device_of(config.device, 0, ranks.local_world_size)
    content: dict[str, Any] = {
        "out": str(out),
        "runs": [],
        "environment": {**describe_environment(device), "workers": ranks.world_size},
        "demo": dataclasses.asdict(config),
    }
    for seed in range(config.seed, config.seed + config.seeds):
        for record in _records(dataclasses.replace(config, seed=seed), ranks, device, out, log):
            content["runs"].append(record)
            replace_json(out / RESULTS, content)
    return content


def _records(
    config: DemoConfig, ranks: Ranks, device: torch.device, out: Path, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield the record of every arm of one seed; the clean run, which is the first, sets hazards and target."""
    hazards: dict[str, Any] = {}
    target: float | None = None
    since, done, arms = 0.0, 0, arms_of(config)
    for name, arm in arms.items():
        folder = out / f"seed-{config.seed}" / name.replace(" ", "-")
        run = dataclasses.replace(arm, run_dir=str(folder), **hazards)
        log(f"seed {run.seed}: {name}{'' if target is None else left(since, done, len(arms) - 1)}")
        prepare_run_folder(run, device=device)
        outcomes = ranks.call(train_rank, run, STEADY_AFTER, True, True)
        if target is None:
            target = _target(outcomes[0])
            hazards = _hazards(config, outcomes[0])
            since = time.monotonic()
        else:
            done += 1
        yield _record(name, run, outcomes, target)
        log(f"  {outcomes[0].updates} updates in {outcomes[0].training_seconds:.1f} s")
        if name == CLEAN:
            log(
                f"  the other {len(arms) - 1} runs take about {_expected(config, outcomes[0], len(arms) - 1)} together"
            )


def _expected(config: DemoConfig, clean: Outcome, runs: int) -> str:
    """Return how long so many runs with hazards take, if these cost half of what nothing hides."""
    waits = config.link_slowness + config.loader_slowness
    each = clean.training_seconds * (1 + waits / 2) + _STARTING_SECONDS
    return f"{math.ceil(runs * each / 60)} minutes"


def _target(clean: Outcome) -> float:
    """Return the held-out loss of the clean run at its first evaluation after `TARGET_AT`."""
    return next(one.heldout_loss for one in clean.evaluations if one.step >= TARGET_AT * clean.updates)


def _hazards(config: DemoConfig, clean: Outcome) -> dict[str, Any]:
    """Return the slow link and the slow loader, in relation to what the clean run took on this machine."""
    seconds = clean.training_seconds / clean.updates
    link, loader = config.link, config.slow_loader
    if link == "none" and config.link_slowness:
        bits = 8 * clean.sent_bytes / clean.updates
        link = f"{bits / (config.link_slowness * seconds) / 1e6:.3f}mbit"
    if loader == "none" and config.loader_slowness:
        loader = f"{1000 * config.loader_slowness * seconds / config.micro_batches:.1f}"
    return {"link": link, "slow_loader": loader}


def _record(
    name: str, run: RunConfig[TaskConfig], outcomes: Sequence[Outcome], target: float
) -> dict[str, Any]:
    """Return what is known of a run: its outcome on rank 0, and faults and findings of all ranks."""
    measured = dataclasses.asdict(outcomes[0])
    del measured["sample"], measured["accuracy"]
    return {
        "arm": name,
        **{
            field: getattr(run, field)
            for field in ("seed", "link", "slow_loader", "strategy", "wire", "echo", "guards")
        },
        "resolved_strategy": parse_arm(run.strategy).resolved,
        "loss_unit": loss_unit(run.task).strip(),
        "faults": faults_text(run.faults),
        "target": target,
        "seconds": measured.pop("training_seconds"),
        **measured,
        "seconds_to_loss": seconds_to_loss(outcomes[0].evaluations, target),
        "faults_struck": sum(outcome.faults_struck for outcome in outcomes),
        "incidents": read_json_lines(Path(str(run.run_dir), "incidents.jsonl")),
    }
