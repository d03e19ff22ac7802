"""`stretto train --survive`: a worker dies, and the run goes on to its end."""

import dataclasses
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import stretto as st
from stretto.errors import ConfigError, LeftOut, StateCorrupt, WorkerFailed
from stretto.survive import Term, survives
from stretto_lab.faults import Fault
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import Loss, Task
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.launch import Ranks, train
from stretto_lab.train.outcome import prepare_run_folder
from stretto_lab.train.workers import host_store
from tests.draws import part
from tests.processes import Command, rank_outcomes, run_ranks
from tests.survive.lived import LONG, SILENT_SECONDS, Built, Job, Lived
from tests.train.tiny import Points, Tiny, quadrant_loss


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mortal(Tiny):
    """A task on one of whose ranks something happens in its n-th loss, once in all."""

    victim: int = 1
    n: int = 17
    raises: bool = False
    marker: str = "has-happened"

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        task = Tiny.build(self, rank, world_size, seed, updates)
        if rank != self.victim or Path(self.marker).exists():
            return task
        calls = 0

        def loss(model: nn.Module, points: Points) -> Loss:
            nonlocal calls
            calls += 1
            if calls == self.n:
                Path(self.marker).touch()
                if self.raises:
                    raise ArithmeticError("of the user's")
                os.kill(os.getpid(), signal.SIGKILL)
            return quadrant_loss(model, points)

        return dataclasses.replace(task, loss=loss)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Named(Tiny):
    """A task on whose rank 1 guards find damage that is its own."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        task, losses = Tiny.build(self, rank, world_size, seed, updates), itertools.count(1)

        def loss(model: nn.Module, points: Points) -> Loss:
            if rank == 1 and next(losses) == 17:
                raise StateCorrupt("rank 1: masters are damaged", ranks=[1])
            return quadrant_loss(model, points)

        return dataclasses.replace(task, loss=loss)


BUILT, CAME_IN = Path("built"), Path("came-in")
MORE_UPDATES = 20
PATIENCE_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Awaited(Mortal):
    """The same, and whoever is started again builds its task only once the others have committed updates without it.

    The loss is reached when it has come in.
    """

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        with BUILT.open("a") as file:
            file.write(f"{rank}\n")
        is_again = rank == self.victim and Path(self.marker).exists()
        if is_again:
            self._let_others_train()
        task = Mortal.build(self, rank, world_size, seed, updates)

        def loss(model: nn.Module, points: Points) -> Loss:
            if is_again:
                CAME_IN.touch()
            return task.loss(model, points)

        return dataclasses.replace(task, loss=loss, evaluate=lambda _: 0.0 if CAME_IN.exists() else 1.0)

    def _let_others_train(self) -> None:
        ends = time.monotonic() + PATIENCE_SECONDS
        until = self.n // 2 + MORE_UPDATES
        while all(record["step"] < until for record in read_json_lines(Path("run/updates.jsonl"))):
            if time.monotonic() > ends:
                raise AssertionError("the others wait until this process has built its task")
            time.sleep(0.01)


def mortal(
    task: type[Mortal] = Mortal, workers: int = 3, ranks_per_node: int | None = None, **settings: object
) -> RunConfig[Mortal]:
    run = RunConfig(
        task=task(**settings),
        run_dir="run",
        tensorboard=False,
        updates=30,
        micro_batches=2,
        evaluate_every=4,
        checkpoint_every=None,
        survive=True,
        workers=workers,
        ranks_per_node=ranks_per_node,
    )
    prepare_run_folder(run)
    return run


@pytest.mark.parametrize("victim", part([0, 1]))
def test_a_run_whose_worker_is_killed_goes_on_to_its_end(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_slow_link = {"link": "100mbit,1ms", "slow": {2: 1.5}} if victim else {}
    run = dataclasses.replace(mortal(victim=victim), **on_a_slow_link)
    outcome = train(Ranks.local(3), run, shows_progress=False)
    assert outcome.updates == 30
    assert [record["step"] for record in read_json_lines(Path("run/updates.jsonl"))] == list(range(1, 31))
    counts = [record["micro_batches"] for record in read_json_lines(Path("run/updates.jsonl"))]
    assert {sum(count * ranks for count, ranks in one) for one in counts} == {6}  # also by 2 ranks
    evaluated = [record["step"] for record in read_json_lines(Path("run/evaluations.jsonl"))]
    assert evaluated == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    printed = capfd.readouterr().out
    assert (
        f"worker {victim} is lost (the process was killed by SIGKILL): 2 continue; worker 3 replaces it"
        in printed
    )


@pytest.mark.long
def test_nobody_waits_for_what_a_new_process_builds_and_nobody_builds_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(mortal(Awaited), updates=None, samples=None, to_loss=0.5)
    train(Ranks.local(3), run, shows_progress=False)
    counts = [record["micro_batches"] for record in read_json_lines(Path("run/updates.jsonl"))]
    ranks = [sum(ranks for _, ranks in one) for one in counts]
    assert [count for count, _ in itertools.groupby(ranks)][-2:] == [2, 3]
    assert ranks.count(2) >= MORE_UPDATES
    assert sorted(BUILT.read_text().split()) == ["0", "1", "1", "2"]


@pytest.mark.long
@pytest.mark.parametrize("how", [{"ranks_per_node": 2}, {"shard": 2}], ids=str)
def test_a_node_that_has_lost_a_worker_comes_in_again_whole(
    how: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(mortal(Awaited, workers=4, victim=2, normed=False), **how)
    train(
        Ranks.local(4),
        dataclasses.replace(run, updates=None, samples=None, to_loss=0.5),
        shows_progress=False,
    )
    counts = [record["micro_batches"] for record in read_json_lines(Path("run/updates.jsonl"))]
    found = [[count for count, ranks in one for _ in range(ranks)] for one in counts]
    in_shards = "shard" in how  # where a node counts as one
    assert [len(one) for one, _ in itertools.groupby(found)][-2:] == ([1, 2] if in_shards else [2, 4])
    assert {sum(one) for one in found} == {8}
    assert in_shards or sorted(BUILT.read_text().split()) == ["0", "1", "2", "2", "3", "3"]
    assert (
        "worker 3 is lost (seat 3: the other members continue without this process" in capfd.readouterr().out
    )


@pytest.mark.long
def test_where_no_node_is_whole_any_more_the_run_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = dataclasses.replace(mortal(workers=2, ranks_per_node=2), restarts=0)
    with pytest.raises(WorkerFailed, match=r"no worker reached the end: .* no whole node; .* stretto resume"):
        train(Ranks.local(2), run, shows_progress=False)


def test_an_error_that_a_worker_raises_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerFailed, match=r"worker 1 failed: (.|\n)*ArithmeticError: of the user's"):
        train(Ranks.local(3), mortal(raises=True), shows_progress=False)


@pytest.mark.long
def test_a_worker_that_guards_name_is_left_out_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(Ranks.local(3), mortal(Named), shows_progress=False).updates == 30
    assert "worker 1 is removed (" in (printed := capfd.readouterr().out)
    assert "replaces it" not in printed
    counts = [record["micro_batches"] for record in read_json_lines(Path("run/updates.jsonl"))]
    ranks = [sum(ranks for _, ranks in one) for one in counts]
    assert ranks[-1] == 2
    (line,) = read_json_lines(Path("run/quarantine.jsonl"))
    told = ("left_out", "goes_on_with", "world_size", "named", "checkpoint", "error")
    assert [line[name] for name in told] == [[1], 2, 3, [1], "memory", "StateCorrupt"]


def test_what_needs_all_ranks_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError,
        match="survive does not work with faults and noise, which name ranks",
    ):
        RunConfig(
            task=Tiny(), survive=True, faults=(Fault(site="masters", rank=0),), noise=st.Noise(0.1, rank=1)
        )
    RunConfig(task=Tiny(), survive=True, noise=st.Noise(0.1))  # hits all


def comes_later(rank: int, port: int) -> list[tuple[int, int, int]]:
    """Ranks 0 to 2 train, 1 is killed, and 3 comes in its place; return terms, ranks and first updates."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    terms: list[tuple[int, int, int]] = []
    built = Built()

    def train_some(term: Term) -> None:
        job = Job(Lived(strategy=st.ACCO()), term.group, built)
        job.restored(term.go_on(job.parallel, loader=job.samples))
        first = job.parallel.steps
        terms.append((term.number, term.world_size, first))
        has_come = term.number > 0 and term.world_size == 3

        def on_update(update: st.Update) -> None:
            if rank == 1 and update.step == 6:
                store.set("killed", "")
                os.kill(os.getpid(), signal.SIGKILL)
            term.keep(job.parallel, loader=job.samples)
            if has_come and update.step == first + 4:
                job.parallel.stop()

        job.train(10**6, on_update)

    if rank == 3:
        store.wait(["killed"], LONG)
    survives(
        train_some,
        store=store,
        rank=1 if rank == 3 else rank,
        ranks=3,
        every=4,
        silent_seconds=SILENT_SECONDS,
    )
    return terms


@pytest.mark.long
def test_who_comes_later_comes_in_where_a_state_was_kept_and_nothing_is_done_again() -> None:
    store = host_store("127.0.0.1", 0)
    outcomes = rank_outcomes(4, comes_later, store.port, backend=None)
    errors = [one.error for one in outcomes if one.rank != 1 and one.error is not None]
    assert not errors, errors[0]
    first, *rest = outcomes[0].value
    assert first == (0, 3, 0)
    came_at = rest[-1]
    assert came_at[1] == 3
    assert outcomes[3].value == [came_at]
    assert outcomes[2].value == outcomes[0].value
    if len(rest) == 2:  # it was not there yet when the others agreed
        assert rest[0][1] == 2
        assert rest[1][2] > rest[0][2]


def leaves_with_notice(rank: int, port: int) -> tuple[list[tuple[int, int, int]], int, str]:
    """Rank 1 hears that its machine is taken away; return terms, ranks and first updates, the last one, and the end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
    terms: list[tuple[int, int, int]] = []
    built, last = Built(), [0]

    def train_some(term: Term) -> None:
        job = Job(Lived(strategy=st.ACCO()), term.group, built)
        job.restored(term.go_on(job.parallel, loader=job.samples))
        terms.append((term.number, term.world_size, first := job.parallel.steps))

        def on_update(update: st.Update) -> None:
            if rank == 1 and update.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            last[0] = update.step
            term.keep(job.parallel, loader=job.samples)
            if term.number and update.step == first + 4:
                job.parallel.stop()

        job.train(10**6, on_update)

    try:
        survives(train_some, store=store, rank=rank, ranks=3, every=10**6, leaves_at=[signal.SIGTERM])
    except LeftOut as error:
        return terms, last[0], str(error)
    return terms, last[0], ""


@pytest.mark.long
def test_one_that_is_told_to_leave_does_so_with_all_it_has_done() -> None:
    """No state was due: it is kept because of the signal, in all processes after the same update."""
    store = host_store("127.0.0.1", 0)
    (first, _, how), (left, at, why), (third, *_) = run_ranks(3, leaves_with_notice, store.port, backend=None)
    assert (how, why) == ("", "seat 1: this process left before term 1, on the signal that it received")
    assert left == [(0, 3, 0)]
    assert first == third == [(0, 3, 0), (1, 2, at)]
    assert at >= 6


def members_that_met(rank: int, address: str) -> tuple[int, ...]:
    return survives(lambda term: term.seats, store=address, rank=rank, ranks=2)


def test_ranks_meet_at_the_store_that_the_command_hosts() -> None:
    with Command("-m", "stretto", "meet", "--port", "0") as command:
        said = next(line for line in command.stdout if line.startswith("meeting at "))
        address = said.split()[2].rstrip(",")
        assert run_ranks(2, members_that_met, address, backend=None) == [(0, 1), (0, 1)]
