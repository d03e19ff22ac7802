"""The results that commands print at their end."""

import math
import shlex
from collections.abc import Sequence

from stretto.echo import Diagnosis
from stretto.echo.text import plan_text
from stretto.groups import Link
from stretto.strategies.ledger import ledger_of
from stretto_lab.cli.options import shown
from stretto_lab.cli.run_folder import resume_command
from stretto_lab.evidence import SMALL
from stretto_lab.observe import speed_text
from stretto_lab.patience import fold
from stretto_lab.plan import UNEQUAL, Machine, Price, Ranking
from stretto_lab.recipes import TaskConfig
from stretto_lab.recipes.task import loss_unit, tokens_per_sample
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.simulation import SimulateConfig

_BOTTLENECK = 0.2
"""Share of the training time spent waiting for communication, from which the link counts as the bottleneck."""


def print_run(outcome: Outcome, run: RunConfig[TaskConfig], *, is_on_a_link: bool) -> None:
    """Print the outcome of a run, and what to do next.

    Args:
        outcome: Of rank 0.
        run: The run.
        is_on_a_link: Whether a network could be the bottleneck; local workers only wait for each other.
    """
    if outcome.sample is not None:
        print(f"a sample:\n{fold(outcome.sample)}\n")
    print(f"{outcome.updates} updates in {outcome.training_seconds:.1f} s{_since(outcome, run.task)}")
    print(_heldout(outcome, run.task))
    if outcome.accuracy is not None:
        print(f"held-out accuracy {outcome.accuracy:.1%}")
    if outcome.echoed_batches or run.slow_loader != "none":
        text = (
            f"rank 0 took {outcome.fresh_batches} batches, used {outcome.echoed_batches} again and waited "
            f"{outcome.wait_seconds:.1f} s for data{_behind(outcome)}"
        )
        print(fold(text))
    if is_on_a_link and (hint := advice(outcome, run)):
        print(fold(hint))
    print()
    print(f"the run is in   {run.run_dir}")
    if run.checkpoint_every is not None:
        lengths = {"--seconds": run.seconds, "--samples": run.samples}
        given = {option: length for option, length in lengths.items() if length is not None}
        option, length = next(iter(given.items()), ("--updates", outcome.updates))
        print(f"to continue     {resume_command(run, option, f'{2 * length:.15g}')}")
    if run.tensorboard:
        print(f"look at it      {shlex.join(['tensorboard', '--logdir', str(run.run_dir)])}")


def _heldout(outcome: Outcome, task: TaskConfig) -> str:
    unit = loss_unit(task)
    return f"held-out loss {outcome.heldout_before:.4f}{unit} before, {outcome.heldout_loss:.4f}{unit} after"


def _since(outcome: Outcome, task: TaskConfig) -> str:
    """Return memory and the rate of this process's updates; of a resumed run, also the number of the first of them."""
    speed = outcome.samples_per_second
    text = "" if speed is None else f", {speed_text(speed, tokens_per_sample(task))}"
    text += f", {outcome.peak_bytes / 1e6:,.0f} MB of memory"
    if not outcome.resumed_from:
        return text
    here = outcome.updates - outcome.resumed_from
    return f"; {here} of them here, in {outcome.training_seconds - outcome.seconds_before:.1f} s{text}"


def _behind(outcome: Outcome) -> str:
    """Return the update from which a resumed run counts; empty for a new run."""
    return f" since update {outcome.resumed_from}" if outcome.resumed_from else ""


def advice(outcome: Outcome, run: RunConfig[TaskConfig]) -> str:
    """Return the advice to overlap communication, if the link was the bottleneck; otherwise nothing."""
    exposed, seconds = outcome.exposed_seconds, outcome.training_seconds - outcome.seconds_before
    if parse_arm(run.strategy).overlaps or not exposed or exposed < _BOTTLENECK * seconds:
        return ""
    return (
        f"The link was the bottleneck: {exposed / seconds:.0%} of the time{_behind(outcome)} waited for communication. "
        "`stretto plan` says which strategy and wire would wait less."
    )


def _megabytes(num_bytes: float) -> str:
    sent = num_bytes / 1e6
    return f"{sent:,.1f}" if sent >= 1 or not sent else f"{sent:.2g}"


def print_simulation(outcome: Outcome, simulation: SimulateConfig[TaskConfig], recipe: str) -> None:
    """Print the outcome of a simulated run of a recipe, whose times are virtual, and what to do next."""
    speed, seconds = outcome.samples_per_second, outcome.training_seconds
    print(
        f"{outcome.updates} updates in {seconds:.3f} virtual s"
        + ("" if speed is None else f", {speed_text(speed, tokens_per_sample(simulation.task))}")
    )
    if outcome.exposed_seconds is not None and seconds:
        print(f"rank 0 waited for communication {outcome.exposed_seconds / seconds:.1%} of the time")
    if simulation.slow_loader != "none" and seconds:
        text = f"rank 0 waited for data {outcome.wait_seconds / seconds:.1%} of the time"
        print(fold(f"{text}: {outcome.fresh_batches} fresh micro-batches, {outcome.echoed_batches} echoed"))
    print(_heldout(outcome, simulation.task))
    if simulation.run_dir is not None:
        print(f"records, trace and the model are in {simulation.run_dir}")
    if simulation.nodes is None:  # a plan takes links of ranks
        words = ["stretto", "plan", recipe, "--ranks", str(simulation.ranks), "--network", simulation.network]
        if simulation.slow:
            words += ["--slow", shown(simulation.slow)]
        print(f"what to take   {shlex.join(words)}")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the measured times and the conclusion."""
    rows = {
        "to load a batch, nothing else": (diagnosis.load_seconds, diagnosis.load_variation),
        "to train on a loaded batch": (diagnosis.step_seconds, diagnosis.step_variation),
        "both, as the loop does it": (diagnosis.period_seconds, diagnosis.period_variation),
    }
    for name, (seconds, variation) in rows.items():
        print(f"{name:32} {1000 * seconds:11,.2f} ms +- {variation:.0%}")
    waiting = f"{1000 * diagnosis.exposed_seconds:,.2f} ms"
    print(f"of training, {waiting} wait for other ranks (+- is the standard deviation)")
    print(fold(diagnosis.summary))
    for line in diagnosis.advice[1:]:
        print(fold(f"  or {line}", indent=4))
    if diagnosis.plan is not None:
        print(f"on the command line: --echo {plan_text(diagnosis.plan)}")


def _limit(choice: Price, machine: Machine) -> str:
    """Return a note if a processor core, and not the link, limits the choice's exchange; otherwise nothing."""
    arm, rate = parse_arm(choice.arm), machine.link.bits_per_second
    wire, ledger = arm.wire, ledger_of(arm.strategy())
    core, link = machine.exchange_seconds[wire] * ledger.rounds, 8 * choice.sent_bytes / rate if rate else 0.0
    if core <= link or machine.cores == math.inf or machine.ranks == 1 or ledger.local:
        return ""
    return (
        f"a core limits exchanges on {wire}, not the link: per update the core packs, adds and copies for "
        f"{core:.2g} s, and the link sends for {link:.2g} s"
    )


def print_plan(rankings: Sequence[Ranking]) -> None:
    """Print the choice for each number of ranks, then the table behind the last choice."""
    for ranking in rankings:
        print(fold(recommendation(ranking), indent=2))
    last = rankings[-1]
    machine, choice = last.machine, last.choice
    print(
        fold(
            f"\nmicro-batch {_micro_batches_of(machine)} ms, optimizer {1000 * machine.step_seconds:.1f} ms, loader "
            f"{1000 * machine.load_seconds:.1f} ms, link {_rate(machine.link)}, {machine.parameters:,} parameters, "
            f"{_ranks_of(machine)}, {last.micro_batches} micro-batches per rank and update"
        )
    )
    if machine.shards > 1:
        text = (
            f"parameters, link and the columns below are for one rank, which holds one of {machine.shards} shards and "
            "exchanges it with other nodes; the time of a micro-batch includes FSDP2's exchange inside a node"
        )
        print(fold(text))
    if machine.ranks_per_node > 1:
        text = (
            f"on nodes of {machine.ranks_per_node} ranks: the link is between nodes, and a rank inside a node "
            f"has {_rate(machine.inside)}; gradients are added up inside first, except in rows of one level"
        )
        print(fold(text))
    if text := _limit(choice, machine):
        print(fold(text))
    print(f"\n{'':32}{'s/update':>9}{'waits':>6}{'MB sent':>8}{'MB held':>8}")
    for one in last.prices:
        print(
            f"{_row_of(one, last):32}{one.seconds:9.4f}{one.exposed_seconds / one.seconds:6.0%}"
            f"{_megabytes(one.sent_bytes):>8}{one.memory_bytes / 1e6:8,.0f}  {last.why_not(one)}"
        )
    print(
        fold(
            "waits: share of an update that waits for other ranks. MB sent: by a rank per update. MB held: by a rank, "
            "for model, gradients, optimizer and the wire's buffers. too close: within 2 % of the choice, too close "
            f"to call. Nats: of held-out loss per byte, measured with a small GPT; {SMALL} of them are too close to "
            "call, since seeds differ by as much."
        )
    )
    if any(_has_clock(one.arm) for one in last.prices):
        print("(xN) by the clock, with N times as large a batch in the mean")
    slower = machine.load_seconds / machine.micro_batch_seconds
    if slower > 1.02:
        text = (
            f"the loader takes {slower:.1f} times as long as a micro-batch: stretto diagnose measures the gain of "
            "an echo"
        )
        print(fold(text, indent=2))


def _ranks_of(machine: Machine) -> str:
    if machine.shards == 1:
        return f"{machine.ranks} ranks"
    return f"{machine.ranks * machine.shards} ranks on nodes of {machine.shards} shards"


def _row_of(one: Price, ranking: Ranking) -> str:
    """Return an arm's label in the table; on nodes, an arm on one level is labelled so."""
    name, by_node, _ = (
        one.arm.replace(":worker=node", " by node").replace(":wire=", " ").partition(":ranks_per_node=")
    )
    growth = f" (x{ranking.growth(one):.1f})" if _has_clock(one.arm) else ""
    return (
        f"{name}{growth}" if by_node or ranking.machine.ranks_per_node == 1 else f"{name}{growth}, one level"
    )


def _has_clock(arm: str) -> bool:
    return "clock" in parse_arm(arm).settings


def _micro_batches_of(machine: Machine) -> str:
    """Return the milliseconds of a micro-batch, from the fastest to the slowest rank."""
    fastest, slowest = (
        1000 * machine.micro_batch_seconds * factor
        for factor in (min(machine.slowness, default=1.0), machine.slowest)
    )
    is_alike = machine.slowest < UNEQUAL * min(machine.slowness, default=1.0)
    return f"{slowest:.1f}" if is_alike else f"{fastest:.1f} to {slowest:.1f}"


def recommendation(ranking: Ranking) -> str:
    """Return the recommended strategy and wire, and the reason."""
    choice, base = ranking.choice, ranking.base
    arm = parse_arm(choice.arm)
    wire = arm.wire
    options = f"--shard {ranking.machine.shards} " if ranking.machine.shards > 1 else ""
    options += f"--strategy {arm.own_text}" + ("" if wire == "fp32" else f" --wire {wire}")
    if (each := arm.settings.get("ranks_per_node")) is not None:
        options += f" --ranks-per-node {each}"
    if (clock := arm.settings.get("clock")) is not None:
        options += f" --clock {shown(clock)}"
    gain = base.seconds_per_micro_batch / choice.seconds_per_micro_batch
    evidence = ranking.evidence_of(choice.arm)
    loss = (
        f"{evidence.nats:+.3f} nats per byte (measured with {evidence.source})"
        if evidence.source
        else "exact"
    )
    if wire == "bf16":
        loss += ", but for the rounding of bf16"
    if clock is not None:
        loss += ", with fixed counts"
    base_wire = parse_arm(base.arm).wire
    default = f"{base.arm.replace(f':wire={base_wire}', '')} on {base_wire}"
    per_sample = " per sample" if clock is not None else ""
    faster = (
        "and nothing is faster" if choice == base else f"{gain:.2f} times as fast{per_sample} as {default}"
    )
    seconds = f"{choice.seconds:.4f} s per update"
    text = f"{_ranks_of(ranking.machine)}: use {options}: {seconds}, {faster}; {loss}"
    if clock is not None:
        text += (
            f". The batch grows: {choice.micro_batches:.1f} micro-batches per rank and update instead of "
            f"{ranking.micro_batches}, so {ranking.growth(choice):.1f} times fewer updates for as many samples"
        )
    return text


def _rate(link: Link) -> str:
    if link.bits_per_second is None:
        return "free"
    return f"{link.bits_per_second / 1e6:,.0f} Mbit/s and {1e3 * link.latency_seconds:,.2f} ms"
