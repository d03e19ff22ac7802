"""Checkpoints in folders of machines: all processes end, machines are lost, and the job is started again."""

import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import stretto as st
from experiments.numbered import Numbered
from stretto.errors import CheckpointError, ConfigError, OutOfTurn, TornCheckpoint
from stretto.survive.shares import named
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.survive.lived import Built, batch_of, digest
from tests.survive.test_virtually import STRATEGIES, TOTAL

UPDATES = 20


@dataclass
class Life:
    """One rank's, from one start to its end."""

    begin: int
    """Committed updates at the start."""
    model: str
    sent_bytes: int
    given: list[int] = field(default_factory=list)
    """Numbers of micro-batches."""


@dataclass(frozen=True)
class Job:
    """A job whose machines have a folder each."""

    folder: Path
    strategy: st.Strategy = field(default_factory=st.ZeRO1)
    wire: str = "fp32"
    every: int | None = 3
    data: int = 0
    """Number of the first micro-batch."""

    def live(self, machines: Sequence[str], until: int, *, begins: bool = False) -> list[Life]:
        """Start ranks on these machines, and let their processes end after an update, without a word."""

        def program(rank: int, group: VirtualGroup) -> Life:
            parts, samples = Built(), Numbered(rank, len(machines), TOTAL)
            parallel = st.DataParallel(
                parts.model, parts.optimizer, self.strategy, micro_batches=TOTAL,
                scheduler=parts.scheduler, wire=self.wire, group=group,
            )  # fmt: skip
            local = st.LocalCheckpoints(
                self.folder / machines[rank], every=self.every, machine=machines[rank]
            )
            restored = local.go_on(parallel, loader=samples, begin=(lambda: None) if begins else None)
            if restored is not None and len(restored.loader_states) != len(machines):
                samples.deal(restored.loader_states)
            begin = parallel.steps

            def on_update(update: st.Update) -> None:
                local.keep(parallel, loader=samples)

            with parallel:
                for number in parallel.feed(samples, updates=until, on_update=on_update):
                    inputs, targets = batch_of(self.data + number)
                    parallel.backward((parts.model(inputs) - targets).square().mean(), samples=len(inputs))
                parallel.finish()
            return Life(begin, digest(parts.model), parallel.sent_bytes, samples.given)

        return VirtualCluster(len(machines), seed=1).run(program).values

    def lose(self, machine: str) -> None:
        shutil.rmtree(self.folder / machine)

    def files(self, machine: str) -> list[Path]:
        """The shares on a machine, the newest last."""
        found = {path: named(path.name) for path in (self.folder / machine).iterdir()}
        return sorted((path for path, one in found.items() if one), key=lambda path: found[path] or ())


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", range(len(STRATEGIES)))
def test_after_the_loss_of_a_machine_the_others_bring_the_state_and_the_job_ends_with_the_same_bits(
    seed: int, tmp_path: Path
) -> None:
    """Every strategy, drawn wires and machines of one to three ranks; a process ends at any update, twice."""
    rng = random.Random(seed)
    strategy, wire = STRATEGIES[seed], rng.choice(["fp32", "bf16", "int8"])
    machines = [f"m{number}" for number in range(rng.choice([2, 3])) for _ in range(rng.choice([1, 2]))]
    whole = Job(tmp_path / "whole", strategy, wire).live(machines, UPDATES)
    job = Job(tmp_path / "lost", strategy, wire)
    begun, until = 0, 0
    for _ in range(2):
        until = rng.randint(until + 1, until + UPDATES // 2)
        lives = job.live(machines, until)
        assert [life for life in lives if not life.begin == lives[0].begin >= begun] == []
        begun = lives[0].begin
        job.lose(rng.choice(machines))
    lives = job.live(machines, UPDATES)
    assert begun <= lives[0].begin <= until
    assert [life.model for life in lives] == [life.model for life in whole]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", range(6))
def test_on_other_machines_and_as_many_of_them_as_there_are_every_sample_counts_once(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    job = Job(tmp_path, rng.choice([st.DDP(), st.ZeRO1(), st.ACCO(), st.DPU()]))
    before = [f"m{number}" for number in range(rng.choice([2, 3])) for _ in range(rng.choice([1, 2]))]
    job.live(before, rng.randint(8, 14))
    gone = rng.choice(before)
    job.lose(gone)
    after = [machine for machine in before if machine != gone] + ["new"] * rng.choice([0, 2])
    rng.shuffle(after)
    after = after if len(after) != len(before) else [*after, "newest"]
    lives = job.live(after, UPDATES)
    given = sorted(number for life in lives for number in life.given)
    assert lives[0].begin >= 3
    assert given == list(range(given[0], given[0] + len(given)))
    assert given[0] == lives[0].begin * TOTAL.micro_batches or isinstance(job.strategy, st.ACCO | st.DPU)
    assert len({life.model for life in lives}) == 1


def test_a_file_that_is_cut_or_damaged_or_half_written_is_not_read(tmp_path: Path) -> None:
    """The newest state lies there twice: of each share one is spoilt, and then both of one."""
    job, machines = Job(tmp_path, every=2), ["a", "b", "c"]
    job.live(machines, 9)
    begin = max(one[0] for path in job.files("a") if (one := named(path.name))).step
    for machine in machines:
        own = job.files(machine)[-1]
        content = bytearray(own.read_bytes())
        content[len(content) // 2] ^= 1
        own.write_bytes(content[: -1 if machine == "b" else None])
        (tmp_path / machine / f"{own.name}.ab12cd34.part").write_bytes(content)
    lives = job.live(machines, 9)
    assert begin > lives[0].begin > 0
    assert not list(tmp_path.glob("*/*.part"))


def test_a_job_whose_copies_are_lost_with_their_owners_says_so_and_begins_only_where_it_is_told_how(
    tmp_path: Path,
) -> None:
    job, machines = Job(tmp_path), ["a", "b", "c"]
    job.live(machines, 9)
    for machine in "ab":
        job.lose(machine)
    with pytest.raises(TornCheckpoint, match=r"no generation .* is whole.*removed on all machines"):
        job.live(machines, UPDATES)
    assert [life.begin for life in job.live(machines, 9, begins=True)] == [0, 0, 0]
    assert job.live(machines, UPDATES)[0].begin > 0


@pytest.mark.long
def test_a_machine_that_was_away_brings_nothing_that_passes_for_what_others_have_kept_meanwhile(
    tmp_path: Path,
) -> None:
    """It went on by itself, as it were, and counts as the others do: the same term, the same updates, other bits."""
    ends = []
    for comes_back in (True, False):
        job = Job(tmp_path / str(comes_back))
        job.live(["a", "b", "c"], 6)
        for machine in "ab":
            shutil.copytree(job.folder / machine, job.folder / f"{machine} before")
        dataclasses.replace(job, data=1000).live(["a", "b", "c"], 12)
        for machine in "ab":
            job.lose(machine)
            shutil.move(job.folder / f"{machine} before", job.folder / machine)
        job.live(["a", "b", "d"], 12)
        if not comes_back:
            job.lose("c")
        ends.append([(life.begin, life.model) for life in job.live(["a", "b", "c"], UPDATES)])
    assert ends[0] == ends[1]


def test_a_process_that_ends_before_the_first_state_is_whole_costs_nothing(tmp_path: Path) -> None:
    job, machines = Job(tmp_path), ["a", "b"]
    job.live(machines, 1)
    for path in job.files("b"):
        path.unlink()
    for path in job.files("a")[1:]:
        path.unlink()
    (tmp_path / "a" / "stretto-was-whole").unlink(missing_ok=True)
    assert [life.begin for life in job.live(machines, UPDATES)] == [0, 0]


def test_what_is_left_on_one_machine_alone_lies_on_another_one_as_soon_as_a_job_has_gone_on(
    tmp_path: Path,
) -> None:
    """Two ranks of that machine have it, and are lost at once."""
    job = Job(tmp_path)
    job.live(["a", "a", "b"], 10)
    job.lose("b")
    begin = job.live(["a", "a", "c"], 1)[0].begin
    job.lose("a")
    assert [life.begin for life in job.live(["c", "c"], UPDATES)] == [begin, begin]
    assert begin > 0


def test_on_one_machine_nothing_is_copied_and_two_states_lie_there(tmp_path: Path) -> None:
    job = Job(tmp_path / "one")
    (first, *_) = job.live(["a"] * 3, UPDATES)
    (apart, *_) = Job(tmp_path / "three").live(["a", "b", "c"], UPDATES)
    assert first.sent_bytes < apart.sent_bytes - 5000
    states: dict[int, list[int]] = {}
    for path in job.files("a"):
        generation, owner, *_ = named(path.name) or pytest.fail("no share")
        states.setdefault(generation.step, []).append(owner)
    assert states == {15: [0, 1, 2], 18: [0, 1, 2]}
    assert job.live(["a"] * 3, UPDATES)[0].begin == 18


def test_a_job_that_is_done_leaves_nothing_there(tmp_path: Path) -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        parts = Built()
        parallel = st.DataParallel(parts.model, parts.optimizer, st.ZeRO1(), group=group)
        local = st.LocalCheckpoints(tmp_path / str(rank // 2), every=1, machine=str(rank // 2))
        with pytest.raises(OutOfTurn, match="before go_on"):
            local.keep(parallel)
        assert local.go_on(parallel, extra=lambda: "begun") is None
        with parallel:
            for number in range(3):
                inputs, targets = batch_of(number)
                parallel.backward((parts.model(inputs) - targets).square().mean())
                local.keep(parallel, extra={"number": number})
            parallel.finish()
        local.remove()

    VirtualCluster(4).run(program)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder in the machine's memory that has room for a few shares."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a file system")
def test_a_folder_without_room_is_said_with_what_is_missing_and_the_job_can_go_on(
    small: Path, tmp_path: Path
) -> None:
    machines = [str(small), str(tmp_path / "large")]

    def program(rank: int, group: VirtualGroup) -> list[str]:
        parts, said = Built(), []
        parallel = st.DataParallel(parts.model, parts.optimizer, st.ZeRO1(), group=group)
        local = st.LocalCheckpoints(machines[rank], every=1, machine=machines[rank])
        local.go_on(parallel)
        with parallel:
            for number in range(6):
                inputs, targets = batch_of(number)
                parallel.backward((parts.model(inputs) - targets).square().mean())
                try:
                    local.keep(parallel)
                except CheckpointError as error:
                    said.append(str(error))
            parallel.finish()
        return said

    for said in VirtualCluster(2).run(program).values:
        assert said
        assert [
            one
            for one in said
            if not re.search("small: a share of .* MB cannot be written \\(No space left", one)
        ] == []


def test_a_folder_that_is_removed_while_a_job_trains_comes_again(tmp_path: Path) -> None:
    """Some systems tidy up what lies in the memory of a machine."""

    def program(rank: int, group: VirtualGroup) -> None:
        parts, folder = Built(), tmp_path / str(rank)
        parallel = st.DataParallel(parts.model, parts.optimizer, st.ZeRO1(), group=group)
        local = st.LocalCheckpoints(folder, every=1, machine=str(rank))
        local.go_on(parallel)
        with parallel:
            for number in range(8):
                if number in (2, 5) and rank == number % 2:
                    shutil.rmtree(folder)
                inputs, targets = batch_of(number)
                parallel.backward((parts.model(inputs) - targets).square().mean())
                local.keep(parallel)
            parallel.finish()

    VirtualCluster(2).run(program)
    job = Job(tmp_path)
    # Two states, of which the last one's copy is still on its way.
    assert {len(job.files(str(rank))) for rank in range(2)} == {3}


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="no folder for states of this machine"):
        st.LocalCheckpoints(tmp_path / "file" / "folder")


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder: expected the path of a folder, found 3"):
        st.LocalCheckpoints(3)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="every=0: expected a number of updates, from 1"):
        st.LocalCheckpoints(tmp_path, every=0)
    for name in ("a\0b", "a\ud800"):
        with pytest.raises(ConfigError, match="folder: expected the path of a folder, found"):
            st.LocalCheckpoints(str(tmp_path / name))
    for machine in (-1, 3.5, object(), [1], ""):
        with pytest.raises(ConfigError, match=r"machine=.*: expected its name, as a text"):
            st.LocalCheckpoints(tmp_path, machine=machine)  # type: ignore[arg-type]  # what is refused
