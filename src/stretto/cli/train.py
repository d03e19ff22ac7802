"""`stretto train RECIPE`: train a recipe on local workers, or as a rank of a launcher."""

import dataclasses
from collections.abc import Sequence

from stretto.cli.launcher import find_ranks, is_joined
from stretto.cli.options import parse_options
from stretto.cli.telling import tell
from stretto.errors import ConfigError
from stretto.recipes import TaskConfig
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig
from stretto.train.outcome import Outcome
from stretto.train.restarts import train_on
from stretto.train.run_folder import new_run_folder, prepare_run_folder


def train_command(words: Sequence[str]) -> None:
    """Run the command.

    Args:
        words: What follows its name.
    """
    recipe, run = parse_options("train", words, _configure)
    run = _complete(recipe, run)
    ranks = find_ranks(run.workers)
    if ranks.is_first:
        prepare_run_folder(run)
    outcome = train_on(ranks, run, tell)
    if ranks.is_first:
        _print_outcome(outcome, run)


def _configure(task: TaskConfig) -> RunConfig[TaskConfig]:
    return RunConfig(task=task)


def _complete(recipe: str, run: RunConfig[TaskConfig]) -> RunConfig[TaskConfig]:
    """Fill in what the command line may leave open, and apply what the strategy's text sets."""
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
    return arm.configure(run)


def _print_outcome(outcome: Outcome, run: RunConfig[TaskConfig]) -> None:
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
