"""`stretto simulate RECIPE`: train a recipe on a virtual cluster of many ranks."""

from collections.abc import Sequence

from stretto.cli.options import parse_options
from stretto.recipes import TaskConfig
from stretto.train.outcome import Outcome
from stretto.train.simulation import SimulateConfig, simulate


def simulate_command(words: Sequence[str]) -> None:
    """Run the command.

    Args:
        words: What follows its name.
    """
    _, simulation = parse_options("simulate", words, _configure)
    results = simulate(simulation)
    _print_outcome(results.values[0], simulation)


def _configure(task: TaskConfig) -> SimulateConfig[TaskConfig]:
    return SimulateConfig(task=task)


def _print_outcome(outcome: Outcome, simulation: SimulateConfig[TaskConfig]) -> None:
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
