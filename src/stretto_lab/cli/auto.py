"""The strategy that `auto` chooses for a run: the run's earlier choice, or the choice of a plan."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto_lab.cli.options import TASK, named_as_options
from stretto_lab.cli.run_folder import CONFIG, command_of
from stretto_lab.cli.screens import recommendation
from stretto_lab.plan import PlanConfig, Ranking, plan
from stretto_lab.recipes import TaskConfig
from stretto_lab.train.arms import AUTO, parse_arm
from stretto_lab.train.configuration import Job, RunConfig, part_of
from stretto_lab.train.handle import check_run
from stretto_lab.train.launch import Ranks
from stretto_lab.train.outcome import check_folder


def chosen_before(run: RunConfig[TaskConfig]) -> str | None:
    """Return the strategy that was chosen last for the run, which continues with it; None for a new run."""
    folder = Path(str(run.run_dir))
    check_folder(folder, resume=run.resume)  # before anything is measured
    options = command_of(folder)["options"] if (folder / CONFIG).exists() else []
    if not is_auto(options):
        return None
    chosen: str = options[len(options) - options[::-1].index("--strategy")]
    return chosen


def is_auto(options: Sequence[str]) -> bool:
    """Return whether a run's options ask for `auto`."""
    return list(options) != without_auto(options)


def without_auto(options: Sequence[str]) -> list[str]:
    """Return the options of a run without those of `auto`."""
    kept = list(options)
    for index in reversed(range(len(kept))):
        if kept[index : index + 2] == ["--strategy", AUTO]:
            del kept[index : index + 2]
        elif kept[index] == f"--strategy={AUTO}":
            del kept[index]
    return kept


def choose(run: RunConfig[TaskConfig], ranks: Ranks, log: Callable[[str], None]) -> str:
    """Return the strategy that a plan chooses, the same on all ranks; `log` receives the reason."""
    with named_as_options(run):
        job: PlanConfig[TaskConfig] = PlanConfig(**part_of(run, Job))
    (ranking,) = rankings(job, ranks, prices_all=False)
    log(recommendation(ranking))
    return ranking.choice.arm


def rankings(job: PlanConfig[TaskConfig], ranks: Ranks, *, prices_all: bool = True) -> list[Ranking]:
    """Measure a job on all ranks, and rank the strategies it could use, as `stretto_lab.plan.plan` does."""
    with named_as_options(job), named_as_options(job.task, TASK):
        arm = parse_arm("zero1")
        here = dataclasses.replace(job, slow={})  # ranks of the plan, perhaps more than there are here
        check_run(here.fitted_to(arm).run_of(arm), ranks.world_size)
    return plan(job, ranks, prices_all=prices_all)
