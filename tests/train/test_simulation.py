"""A recipe on the virtual cluster: the files of a real run, with virtual times, and the same for the same seed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.errors import ConfigError
from stretto.groups.collectives import Call
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import Task
from stretto_lab.train.rank import RankContext, train_at
from stretto_lab.train.simulation import SimulateConfig, simulate
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import part
from tests.train.runs import evaluations, model_bits, records, tiny_run, train
from tests.train.tiny import Tiny


def simulation(folder: str | None = None, **settings: Any) -> SimulateConfig[Tiny]:
    chosen = {
        "ranks": 3,
        "updates": 6,
        "micro_batches": 2,
        "network": "100mbit,1ms",
        "jitter": 0.2,
        **settings,
    }
    return SimulateConfig(task=Tiny(), run_dir=folder, **chosen)


EVALUATED: list[float] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(Tiny):
    """Notes every evaluation."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        task = Tiny.build(self, rank, world_size, seed, updates)

        def evaluate(model: nn.Module) -> float:
            EVALUATED.append(task.evaluate(model))
            return EVALUATED[-1]

        return dataclasses.replace(task, evaluate=evaluate)


@pytest.mark.parametrize("strategy", ["zero1", "acco", "local", "diloco"])
def test_virtual_ranks_evaluate_once_together(strategy: str) -> None:
    EVALUATED.clear()
    settings = simulation(strategy=strategy, evaluate_every=2)
    outcomes = simulate(dataclasses.replace(settings, task=Counted())).values
    for outcome in outcomes:
        assert [one.heldout_loss for one in outcome.evaluations] == EVALUATED
    assert len(EVALUATED) > 2


@pytest.mark.parametrize("echo", part(["none", "ready:max_uses=64"]))
def test_two_runs_of_one_seed_write_the_same_records_byte_for_byte(echo: str) -> None:
    """Also where what is used again depends on when batches come."""
    slow_loader = "none" if echo == "none" else "250,jitter=1"
    for folder, seed in (("one", 0), ("two", 0), ("three", 1)):
        simulate(simulation(folder, seed=seed, echo=echo, slow_loader=slow_loader))
    for name in ("updates.jsonl", "evaluations.jsonl", "trace.jsonl"):
        one, two, three = (Path(folder, name).read_bytes() for folder in ("one", "two", "three"))
        assert one == two
        assert one != three
    records = read_json_lines(Path("one", "updates.jsonl"))
    assert len(records) == 6
    assert any(record["echoed"] for record in records) == (echo != "none")


@pytest.mark.parametrize("strategy", part(["ddp", "acco"]))
def test_a_simulated_run_trains_what_real_workers_train(strategy: str) -> None:
    simulate(simulation("virtual", ranks=2, strategy=strategy, evaluate_every=2))
    train(tiny_run("real", updates=6, micro_batches=2, strategy=strategy, evaluate_every=2))
    assert records("virtual") == records("real")
    assert evaluations("virtual") == evaluations("real")
    assert model_bits("virtual") == model_bits("real")


def test_what_cannot_be_simulated_is_refused() -> None:
    for settings, words in (
        ({"strategy": "torch-ddp"}, "torch-ddp runs on real workers only"),
        ({"slow_loader": "30,decode"}, "not modelled"),
    ):
        with pytest.raises(ConfigError, match=words):
            simulate(simulation(**settings))
    simulate(simulation("run", ranks=1, updates=2))
    with pytest.raises(ConfigError, match="holds a run already"):
        simulate(simulation("run"))


def test_a_slow_loader_takes_virtual_time_and_an_echo_hides_it() -> None:
    settings = {"jitter": 0.0, "micro_batch_ms": 10.0, "updates": 20, "strategy": "zero1", "network": "free"}

    def seconds(**more: Any) -> float:
        return simulate(simulation(**settings, **more)).values[0].training_seconds

    assert seconds() == pytest.approx(40 * 0.010)
    # Every read is waited for; of the last one's, only the step is left to do.
    assert seconds(slow_loader="25") == pytest.approx(40 * 0.025 + 0.010)
    # The first update waits for both of its batches. While they are used again the third one is read, and the fourth
    # has to be waited for, once: from there on the loader is as fast as the steps.
    first = 0.025 + 0.015
    assert seconds(slow_loader="25", echo="even:uses=2.5") == pytest.approx(first + 0.010 + 40 * 0.010)
    assert seconds(slow_loader="25", echo="ready") == pytest.approx(first + 40 * 0.010)


class BufferedGroup(VirtualGroup):
    """A group whose broadcasts leave rank 0 at once, and come to the others a minute later, as on a slow link."""

    def perform(self, call: Call) -> dist.Work:
        work = super().perform(call)
        if call.operation.name == "broadcast" and self.rank() != 0:
            self.charge_ns(60 * 10**9)
        return work

    def private(self) -> VirtualGroup:
        return BufferedGroup(self._matcher.sibling(self.rank()), self._time)


@pytest.mark.parametrize("strategy", ["zero1", "diloco:interval=4"])
def test_ranks_begin_together_so_no_update_pays_for_a_slow_start(strategy: str) -> None:
    run = simulation(strategy=strategy, ranks=2).as_run()

    def program(rank: int, group: VirtualGroup) -> float:
        late = BufferedGroup(group._matcher, group._time)
        context = RankContext(
            rank=rank,
            world_size=2,
            device=torch.device("cpu"),
            group=late,
            now=lambda: group.now_ns / 1e9,
        )
        seconds = train_at(context, run, 0).training_seconds
        assert group.now_ns > 60 * 10**9  # it was a slow start
        return seconds

    assert [seconds for seconds in VirtualCluster(2).run(program).values if not seconds < 60] == []
