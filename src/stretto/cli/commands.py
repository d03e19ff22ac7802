"""The commands of `stretto`: each takes the words after its name, does its work, and prints what came of it."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.campaign import CampaignConfig, repeat_fault, run_campaign, small
from stretto.cli.environment import find_ranks, is_joined
from stretto.cli.options import parse_alone, parse_options
from stretto.doctor import Examination, Finding, Report, examine_rank
from stretto.echo import Diagnosis
from stretto.errors import ConfigError
from stretto.observe import print_campaign, print_comparison
from stretto.recipes import TaskConfig
from stretto.train.arms import parse_arm
from stretto.train.comparison import compare, diagnose_rank
from stretto.train.configuration import CompareConfig, DiagnoseConfig, RunConfig
from stretto.train.handle import check_run
from stretto.train.outcome import Outcome, describe_environment, new_run_folder, prepare_run_folder
from stretto.train.rank import title_of
from stretto.train.restarts import train_on
from stretto.train.simulation import SimulateConfig, simulate

CAMPAIGN_RECIPE = "stdlib-gpt"
"""What a campaign trains where no recipe is named."""
BROKEN = FAILED = 1
"""Exit codes: a promise was broken; the machine cannot be trusted."""


def train_command(words: Sequence[str]) -> None:
    """Train a recipe on local workers, or as a rank of a launcher."""
    recipe, run = parse_options("train", words, lambda task: RunConfig(task=task))
    run = _complete(recipe, run)
    ranks = find_ranks(run.workers)
    check_run(run, ranks.world_size)
    if ranks.is_first:
        prepare_run_folder(run)
        _print_line(title_of(run, ranks.world_size))  # at once: it takes seconds until the ranks have started
    outcome = train_on(ranks, run, _print_line)
    if ranks.is_first:
        _print_run(outcome, run)


def _complete(recipe: str, run: RunConfig[TaskConfig]) -> RunConfig[TaskConfig]:
    """Choose a folder where the user has not, and apply what the strategy's text sets for the run."""
    arm = parse_arm(run.strategy)
    if not arm.is_ours:
        raise ConfigError(
            f"{arm.name} is there to compare with: stretto compare {recipe} --strategies {arm.name},..."
        )
    if run.run_dir is None:
        if is_joined():
            raise ConfigError(
                "ranks of a launcher need --run-dir: they cannot agree on the name of a new folder"
            )
        run = dataclasses.replace(run, run_dir=new_run_folder(recipe))
    return run.run_of(arm)


def _print_run(outcome: Outcome, run: RunConfig[TaskConfig]) -> None:
    rate = outcome.samples_per_second
    print(
        f"{outcome.updates} updates in {outcome.training_seconds:.1f} s"
        + ("" if rate is None else f", {rate:,.0f} samples/s")
    )
    print(f"held-out loss {outcome.heldout_before:.4f} before, {outcome.heldout_loss:.4f} after")
    if outcome.echoed_batches or run.slow_loader != "none":
        print(
            f"rank 0 took {outcome.fresh_batches} batches, used {outcome.echoed_batches} again and waited "
            f"{outcome.wait_seconds:.1f} s for data"
        )
    if outcome.accuracy is not None:
        print(f"held-out accuracy {outcome.accuracy:.1%}")
    if outcome.sample is not None:
        print(f"a sample:\n{outcome.sample}")
    print(f"records, checkpoints and the model are in {run.run_dir}")


def compare_command(words: Sequence[str]) -> None:
    """Run strategies side by side on the same link."""
    _, comparison = parse_options("compare", words, lambda task: CompareConfig(task=task))
    ranks = find_ranks(comparison.workers)
    runs = compare(comparison, ranks, _print_line if ranks.is_first else _print_nothing)
    if ranks.is_first:
        print_comparison(runs)


def _print_line(line: str) -> None:
    print(line, flush=True)  # a pipe, too, shall see it at once


def _print_nothing(line: str) -> None:
    """Leave printing to the first rank."""


def simulate_command(words: Sequence[str]) -> None:
    """Train a recipe on a virtual cluster of many ranks."""
    _, simulation = parse_options("simulate", words, lambda task: SimulateConfig(task=task))
    results = simulate(simulation)
    _print_simulation(results.values[0], simulation)


def _print_simulation(outcome: Outcome, simulation: SimulateConfig[TaskConfig]) -> None:
    rate, seconds = outcome.samples_per_second, outcome.training_seconds
    print(
        f"{simulation.strategy} on {simulation.ranks} virtual ranks, network {simulation.network}, seed "
        f"{simulation.seed}"
    )
    print(
        f"{outcome.updates} updates in {seconds:.3f} virtual s"
        + ("" if rate is None else f", {rate:,.0f} samples/s")
    )
    if outcome.exposed_seconds is not None and seconds:
        print(f"rank 0 waited for communication {outcome.exposed_seconds / seconds:.1%} of the time")
    if simulation.slow_loader != "none" and seconds:
        print(
            f"rank 0 waited for data {outcome.wait_seconds / seconds:.1%} of the time: {outcome.fresh_batches} fresh "
            f"micro-batches, {outcome.echoed_batches} echoed"
        )
    print(f"held-out loss {outcome.heldout_before:.4f} before, {outcome.heldout_loss:.4f} after")
    if simulation.run_dir is not None:
        print(f"records, trace and the model are in {simulation.run_dir}")


def diagnose_command(words: Sequence[str]) -> None:
    """Measure whether the input is the bottleneck, and what an echo would gain."""
    _, job = parse_options("diagnose", words, lambda task: DiagnoseConfig(task=task))
    ranks = find_ranks(job.workers)
    check_run(job.run_of(parse_arm(job.strategy)), ranks.world_size)
    found = ranks.call(diagnose_rank, job)
    if ranks.is_first:
        # All ranks wait for the slowest loader.
        _print_diagnosis(max(found, key=lambda diagnosis: diagnosis.free_uses))


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    rows = {
        "L, the loader alone": diagnosis.load_seconds,
        "C + A, the step on a cached batch": diagnosis.step_seconds,
        "A, of it waiting for communication": diagnosis.exposed_seconds,
        "the loop as it is": diagnosis.period_seconds,
    }
    for name, seconds in rows.items():
        print(f"{name:36} {1000 * seconds:9.3f} ms per micro-batch")
    print(f"{'e* = L / (C + A), the free uses':36} {diagnosis.free_uses:9.3f}")
    print(diagnosis.summary)
    for advice in diagnosis.advice:
        print(f"  before an echo: {advice}")


def campaign_command(words: Sequence[str]) -> int:
    """Strike small jobs with seeded faults and see whether guards keep their promises.

    Returns:
        The process's exit code: 0 where every promise was kept, 1 where one was broken or an alarm was false.
    """
    named = bool(words) and not words[0].startswith("-")
    whole = list(words) if named else [CAMPAIGN_RECIPE, *words]
    _, campaign = parse_options("campaign", whole, lambda task: CampaignConfig(task=small(task)))
    if campaign.only is not None:
        return _repeat(campaign, campaign.only)
    report = run_campaign(campaign, _print_line)
    print_campaign(report)
    return _complain(report, whole)


def _complain(report: Mapping[str, Any], words: Sequence[str]) -> int:
    """Print every broken promise with the command that repeats it, and return the exit code."""
    for alarm in report["alarms"]:
        print(f"false alarm: {alarm}")
    for broken in report["broken"]:
        print(f"broken promise: {broken['story']}")
        print(f"replay: stretto campaign {shlex.join([*words, '--only', str(broken['number'])])}")
    return BROKEN if report["broken"] or report["alarms"] else 0


def _repeat(campaign: CampaignConfig[TaskConfig], number: int) -> int:
    judgement = repeat_fault(campaign, number)
    drawn = judgement.drawn
    print(f"fault {number}: {drawn.fault} in {drawn.job}, moment {drawn.moment:.3f}")
    print(f"promised: {drawn.promise.summary}")
    print(f"on {'real' if judgement.is_real else 'virtual'} workers, unguarded: {judgement.harm}")
    print(judgement.story)
    return 0 if judgement.violation is None else BROKEN


def doctor_command(words: Sequence[str]) -> int:
    """Find out whether this machine's arithmetic, memory and network can be trusted.

    Returns:
        The process's exit code: 0 where nothing disagrees, 1 where something does.
    """
    examination = parse_alone("doctor", words, Examination())
    ranks = find_ranks(examination.workers)
    report = ranks.call(examine_rank, examination)[0]
    if ranks.is_first:
        _print_report(report)
        if examination.out is not None:
            _write(report, Path(examination.out))
    return 0 if report.passed else FAILED


def _print_report(report: Report) -> None:
    for finding in report.findings:
        mark = "ok " if finding.passed else "BAD"
        print(f"{mark}  {finding.check:22} {_whom(finding):36} {finding.detail}")
    print(report.summary)


def _whom(finding: Finding) -> str:
    if finding.link is not None:
        return f"rank {finding.link[0]} to rank {finding.link[1]}"
    return "all ranks" if finding.rank is None else f"rank {finding.rank}, {finding.device}"


def _write(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**report.as_json(), "environment": describe_environment()}
    (folder / "doctor.json").write_text(json.dumps(content, indent=2) + "\n")
