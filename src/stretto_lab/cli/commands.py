"""The commands of `stretto`: each reads the words after its name, does its work, and prints the result."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stretto.errors import ConfigError, UnknownName
from stretto_lab.cli.auto import (
    choose,
    chosen_before,
    is_auto,
    rankings,
    without_auto,
)
from stretto_lab.cli.environment import find_ranks, is_joined
from stretto_lab.cli.options import (
    TASK,
    going_on,
    named_as_options,
    parse_alone,
    parse_options,
    whole_command,
)
from stretto_lab.cli.report import show_page
from stretto_lab.cli.run_folder import check_recipe, command_of, run_folder
from stretto_lab.cli.screens import (
    print_diagnosis,
    print_plan,
    print_run,
    print_simulation,
)
from stretto_lab.estimate import EstimateConfig
from stretto_lab.observe import print_comparison
from stretto_lab.page import ReportConfig
from stretto_lab.patience import fold
from stretto_lab.plan import PlanConfig
from stretto_lab.recipes import OverFiles, TaskConfig, recipe
from stretto_lab.train.arms import AUTO, parse_arm
from stretto_lab.train.comparison import compare, diagnose_rank
from stretto_lab.train.configuration import CompareConfig, DiagnoseConfig, RunConfig
from stretto_lab.train.handle import check_run
from stretto_lab.train.launch import Ranks
from stretto_lab.train.meet import MeetConfig, meet
from stretto_lab.train.outcome import Outcome, new_run_folder
from stretto_lab.train.rank import title_of
from stretto_lab.train.restarts import train_on
from stretto_lab.train.simulation import SimulateConfig, simulate
from stretto_lab.train.workers import described_device, device_of

CONFIGURE: Mapping[str, Callable[[TaskConfig], Any]] = MappingProxyType(
    {
        "train": lambda task: RunConfig(task=task),
        "resume": lambda task: RunConfig(task=task),
        "compare": lambda task: CompareConfig(task=task),
        "simulate": lambda task: SimulateConfig(task=task),
        "report": lambda _: ReportConfig(),
        "diagnose": lambda task: DiagnoseConfig(task=task),
        "plan": lambda task: PlanConfig(task=task),
        "estimate": lambda _: EstimateConfig(),
        "meet": lambda _: MeetConfig(),
    }
)
"""By command: the function that makes its configuration from a recipe's."""


def run_command(name: str, words: Sequence[str]) -> int:
    """Run the command `name` and return the process's exit code."""
    commands: Mapping[str, Callable[[Sequence[str]], int | None]] = {
        "train": train_command,
        "resume": resume_command,
        "compare": compare_command,
        "simulate": simulate_command,
        "diagnose": diagnose_command,
        "plan": plan_command,
        "meet": lambda words: meet(parse_alone("meet", words, MeetConfig()), _print_line),
    }
    if "--print-config" in words and name in ("train", "compare", "simulate", "diagnose", "plan"):
        given = [word for word in words if word != "--print-config"]
        named, _ = parse_options(name, given, CONFIGURE[name])  # refuses what cannot be
        print(json.dumps(whole_command(CONFIGURE[name](recipe(named)), named, given[1:]), indent=1))
        return 0
    return commands[name](words) or 0


def train_command(words: Sequence[str]) -> None:
    """Train a recipe on local workers, or as a rank of a launcher."""
    named, given = parse_options("train", words, CONFIGURE["train"])
    run, options = _with_folder(named, given), list(words[1:])
    ranks = find_ranks(run.workers, run.device)
    run, given = (dataclasses.replace(one, workers=ranks.world_size) for one in (run, given))
    if run.strategy == AUTO:
        # As it was given: with the run's folder in it, measuring would leave a tokenizer there.
        chosen = chosen_before(run) or choose(given, ranks, _log(ranks))
        run = dataclasses.replace(run, strategy=chosen)
        options += ["--strategy", chosen]  # the last one counts, also for `resume`
    _train(named, options, run, ranks)


def resume_command(words: Sequence[str]) -> None:
    """Continue with the run in a folder, with its options and the new ones.

    A recipe named after the folder replaces the one that the folder names.
    """
    if not words or words[0].startswith("-"):
        raise UnknownName("resume needs the folder of a run first: stretto resume FOLDER")
    folder, *given = words
    before = command_of(Path(folder))
    named = before["recipe"]
    if given and not given[0].startswith("-"):
        named, *given = given
    else:
        check_recipe(Path(folder), before)
    options = going_on(before["options"], given)
    _, run = parse_options("train", [named, *options, "--run-dir", folder, "--resume"], CONFIGURE["train"])
    run = _with_folder(named, run)
    ranks = find_ranks(run.workers, run.device)
    run = dataclasses.replace(run, workers=ranks.world_size)
    if any(word.startswith("--strategy") for word in given):  # what was chosen before no longer counts
        options = going_on(without_auto(before["options"]), given)
    if run.strategy == AUTO:
        chosen = choose(run, ranks, _log(ranks))
        run, options = dataclasses.replace(run, strategy=chosen), [*options, "--strategy", chosen]
    _train(named, options, run, ranks)


def _with_folder(named: str, run: RunConfig[TaskConfig]) -> RunConfig[TaskConfig]:
    """Choose a folder where the user has not."""
    if run.run_dir is None:
        if is_joined():
            raise ConfigError(
                "ranks of a launcher need --run-dir: they cannot agree on the name of a new folder"
            )
        run = dataclasses.replace(run, run_dir=new_run_folder(_short(named)))
    if isinstance(run.task, OverFiles):
        run = dataclasses.replace(run, task=run.task.kept_in(str(run.run_dir)))
    return run


def _short(named: str) -> str:
    """Return a recipe's name as a part of a folder's name; for a user's own recipe, the name of its function."""
    return named.rpartition(":")[2]


def _train(named: str, options: Sequence[str], run: RunConfig[TaskConfig], ranks: Ranks) -> None:
    outcome = _train_once(named, options, run, ranks)
    if ranks.is_first:
        print_run(outcome, run, is_on_a_link=run.link != "none" or is_joined())
        show_page(run.run_dir)


def _train_once(named: str, options: Sequence[str], run: RunConfig[TaskConfig], ranks: Ranks) -> Outcome:
    arm = parse_arm(run.strategy)
    if not arm.is_ours:
        raise ConfigError(
            f"{arm.name} runs only in a comparison: stretto compare {named} --strategies {arm.name},..."
        )
    with named_as_options(run), named_as_options(run.task, TASK):
        run = (run.fitted_to(arm) if is_auto(options) else run).run_of(arm)
        check_run(run, ranks.world_size)
    if not ranks.is_first:
        return train_on(ranks, run, _log(ranks))
    device = device_of(run.device, 0, ranks.local_world_size)
    with run_folder(run, named, options, device):
        place = described_device(device, run.device, ranks.local_world_size)
        _print_line(title_of(run, ranks.world_size, place, is_whole=True))
        _print_line("starting the workers")  # they import PyTorch anew, which takes seconds
        return train_on(ranks, run, _print_line)


def compare_command(words: Sequence[str]) -> None:
    """Run strategies side by side on the same link."""
    _, comparison = parse_options("compare", words, CONFIGURE["compare"])
    ranks = find_ranks(comparison.workers, comparison.device)
    with named_as_options(comparison), named_as_options(comparison.task, TASK):
        runs = compare(comparison, ranks, _log(ranks))
    if ranks.is_first:
        print_comparison(runs)
        show_page(comparison.out)


def _print_line(line: str) -> None:
    print(fold(line), flush=True)  # a pipe, too, shall see it at once


def _log(ranks: Ranks) -> Callable[[str], None]:
    """Return a function that prints a line on the first rank only."""
    return _print_line if ranks.is_first else lambda _: None


def simulate_command(words: Sequence[str]) -> None:
    """Train a recipe on a virtual cluster of many ranks."""
    recipe, simulation = parse_options("simulate", words, CONFIGURE["simulate"])
    _print_line(
        f"{simulation.strategy} on {simulation.ranks} virtual ranks, network {simulation.network}, seed "
        f"{simulation.seed}"
    )
    with named_as_options(simulation), named_as_options(simulation.task, TASK):
        results = simulate(simulation, shows_progress=True)
    print_simulation(results.values[0], simulation, recipe)
    show_page(simulation.run_dir)


def diagnose_command(words: Sequence[str]) -> None:
    """Measure whether the input is the bottleneck, and what an echo would gain."""
    _, job = parse_options("diagnose", words, CONFIGURE["diagnose"])
    ranks = find_ranks(job.workers, job.device)
    with named_as_options(job), named_as_options(job.task, TASK):
        check_run(job.run_of(parse_arm(job.strategy)), ranks.world_size)
    found = ranks.call(diagnose_rank, job)
    if ranks.is_first:
        # All ranks wait for the slowest loader.
        print_diagnosis(max(found, key=lambda diagnosis: diagnosis.free_uses))


def plan_command(words: Sequence[str]) -> None:
    """Measure a recipe, and print which strategy and wire to use."""
    _, job = parse_options("plan", words, CONFIGURE["plan"])
    ranks = find_ranks(job.workers, job.device)
    found = rankings(job, ranks)
    if ranks.is_first:
        print_plan(found)
