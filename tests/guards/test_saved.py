"""Guards with checkpoints and echoes: nothing damaged is written, and what comes back is watched like before."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto as st
from stretto import checkpoint
from stretto.errors import PeerFailed, StateCorrupt
from stretto_lab.faults import Fault
from stretto_lab.faults.injector import alias_of
from stretto_lab.observe import read_json_lines
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import part
from tests.guards.watched import Job, Seen, apart, seen_of
from tests.train.runs import model_bits, tiny_run, train

RANKS, STRUCK = 2, 1
STRATEGIES = pytest.mark.parametrize(
    "strategy", [st.ZeRO1(), st.DPU(), st.ACCO(), st.DDP()], ids=lambda strategy: strategy.name
)


class Struck:
    """A job on one rank, whose optimizer state can be damaged from outside."""

    def __init__(self, rank: int, group: VirtualGroup, strategy: st.Strategy, width: int = 19) -> None:
        options = st.Options(bucket_bytes=2**17)
        self.job = Job(strategy, rank, width=width, group=group, guards=(st.AtRest(),), options=options)
        self.parallel = self.job.parallel
        self.rank = rank
        self.updates: list[st.Update] = []

    def train_to(self, step: int) -> None:
        """Train until `step` updates are committed; ends right after one."""
        while self.parallel.steps < step:
            if update := self.job.micro_batch():
                self.updates.append(update)

    def damage(self, words: int) -> None:
        """Flip a bit in the first words of a moment, on one of the ranks: unlike masters, nobody else holds it."""
        if self.rank == STRUCK:
            owner = self.parallel.job.sharded
            moment = owner.optimizer.state[owner.segments[0].master]["exp_avg"]
            alias_of(moment).view(torch.int32)[:words] ^= 1 << 21

    def end(self) -> Seen:
        self.updates += self.parallel.finish()
        return dataclasses.replace(seen_of(self.job.model, self.updates), losses=[], draw=0.0)


def on_all(program: Callable[[int, VirtualGroup], Any]) -> list[Any]:
    return list(VirtualCluster(RANKS).run(program).values)


@pytest.mark.long(keep=1)
@STRATEGIES
@pytest.mark.parametrize("moment", ["before", "behind"])
def test_what_is_damaged_right_before_a_save_or_behind_a_load_is_mended(
    strategy: st.Strategy, moment: str, tmp_path: Path
) -> None:
    """Before it is written; and what comes from a checkpoint is sealed anew."""

    def train(rank: int, group: VirtualGroup, damaged: bool) -> tuple[Seen, Seen]:
        folder = tmp_path / str(damaged)
        whole = Struck(rank, group, strategy)
        whole.train_to(2)
        whole.damage(1 if damaged and moment == "before" else 0)
        checkpoint.save(whole.parallel, folder)
        drawn = whole.job._generator.get_state()
        whole.train_to(4)
        whole_seen = whole.end()
        resumed = Struck(rank, group, strategy)
        checkpoint.load(resumed.parallel, folder)
        resumed.job._generator.set_state(drawn)
        resumed.damage(1 if damaged and moment == "behind" else 0)
        resumed.train_to(4)
        return whole_seen, resumed.end()

    clean, struck = (
        on_all(lambda rank, group, d=damaged: train(rank, group, d)) for damaged in (False, True)
    )
    expected = [("optimizer state", (STRUCK,), "mended")]
    for (whole, resumed), (whole_struck, resumed_struck) in zip(clean, struck, strict=True):
        assert apart([resumed, whole_struck, resumed_struck], [whole] * 3) == []
        assert whole.incidents == resumed.incidents == []
        found = [
            [(one.site, one.ranks, one.action) for one in seen.incidents]
            for seen in (whole_struck, resumed_struck)
        ]
        assert found == ([expected, []] if moment == "before" else [[], expected])


def test_what_cannot_be_mended_is_not_written(tmp_path: Path) -> None:
    def train(rank: int, group: VirtualGroup) -> type[Exception]:
        run = Struck(rank, group, st.ZeRO1(), width=9000)
        run.train_to(1)
        checkpoint.save(run.parallel, tmp_path)
        run.train_to(2)
        run.damage(20_000)
        try:
            checkpoint.save(run.parallel, tmp_path)
        except (StateCorrupt, PeerFailed) as error:
            return type(error)
        return type(None)

    assert on_all(train) == [PeerFailed, StateCorrupt]
    # What rank 0 has begun is no checkpoint, and cleared away by the next one.
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["000001-step-1"]


@pytest.mark.parametrize("strategy", part(["zero1", "acco"]))
def test_a_repaired_run_over_echoed_batches_is_the_clean_one(strategy: str) -> None:
    faults = (
        Fault(site="masters", rank=1, instant=3),
        Fault(site="optimizer state", rank=0, instant=5),
        Fault(site="contribution", rank=1, instant=2),
        Fault(site="gathered values", rank=0, instant=9),
    )
    run = tiny_run("clean", strategy=strategy, echo="even:uses=2.5", guards=("rest",), verified=True)
    train(run)
    train(dataclasses.replace(run, run_dir="struck", faults=faults))
    assert model_bits("clean") == model_bits("struck")
    assert read_json_lines(Path("clean", "incidents.jsonl")) == []
    sites = {one["site"] for one in read_json_lines(Path("struck", "incidents.jsonl"))}
    assert sites == {"masters", "optimizer state", "contribution", "gathered values"}
    (echoed,) = {
        sum(one["echoed"] for one in read_json_lines(Path(folder, "updates.jsonl")))
        for folder in ("clean", "struck")
    }
    assert echoed > 0


def test_a_frozen_parameter_is_watched_behind_a_loaded_checkpoint_too(tmp_path: Path) -> None:
    def train(rank: int, group: VirtualGroup, loads: bool) -> list[tuple[str, tuple[int, ...], str]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4).requires_grad_(False), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = st.DataParallel(model, optimizer, st.DDP(), group=group, guards=(st.ReplicaGuard(),))
        if loads:
            checkpoint.load(parallel, tmp_path)
        else:
            checkpoint.save(parallel, tmp_path)
        found = []
        for step in range(3):
            if (rank, step) == (STRUCK, 1):
                alias_of(model[0].weight)[0] += 1
            update = parallel.backward(model(torch.ones(2, 3)).square().mean())
            found += [(one.site, one.ranks, one.action) for one in update.incidents] if update else []
        return found

    for loads in (False, True):
        results = VirtualCluster(3).run(lambda rank, group, loads=loads: train(rank, group, loads)).values
        assert results[0] == [("fixed", (STRUCK,), "copied from rank 0")]
