"""A rank that is slow on purpose takes as many times as long, by any clock, and the run says so."""

import json
import random
from pathlib import Path

import pytest
import torch

from stretto.engine import Clock
from stretto_lab.cli import main
from stretto_lab.observe import read_json_lines
from stretto_lab.train.comparison import compare
from stretto_lab.train.configuration import CompareConfig, RunConfig
from stretto_lab.train.launch import Ranks
from stretto_lab.train.outcome import Outcome, prepare_run_folder
from stretto_lab.train.rank import RankContext, train_at
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup, parse_network
from tests.train.runs import tiny_run
from tests.train.tiny import Tiny

TINY = f"{Path(__file__).parent / 'tiny.py'}:Tiny"


def trained(run: RunConfig[Tiny], world_size: int, compute: Compute) -> tuple[list[Outcome], list[list[int]]]:
    """Train in virtual time, in which waiting takes time too; return outcomes and counts by update."""
    prepare_run_folder(run)

    def program(rank: int, group: VirtualGroup) -> Outcome:
        context = RankContext(
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            group=group,
            now=lambda: group.now_ns / 1e9,
            wait=lambda seconds: group.charge_ns(round(seconds * 1e9)),
        )
        return train_at(context, run, 2)

    cluster = VirtualCluster(world_size, parse_network("20mbit,1ms"), compute)
    outcomes = list(cluster.run(program).values)
    return outcomes, [
        one["micro_batches"] for one in read_json_lines(Path(str(run.run_dir), "updates.jsonl"))
    ]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_waits_is_as_slow_as_one_whose_work_takes_longer(seed: int) -> None:
    """Strategies that overlap hand nothing over before a micro-batch is counted, and steps take no time here."""
    draws = random.Random(seed)
    world_size = draws.choice([2, 3, 4])
    slow = {rank: draws.uniform(1, 5) for rank in draws.sample(range(world_size), draws.choice([1, 2]))}
    micro_batch_ns = 1000 * draws.randint(100, 20_000)
    clock = draws.choice([None, Clock(minimum=1, maximum=draws.randint(2, 20))])
    settings = {
        "strategy": draws.choice(["acco", "wp", "dpu"]),
        "clock": clock,
        "updates": 8,
        "evaluate_every": None,
        "checkpoint_every": None,
    }
    waits = trained(
        tiny_run("waits", slow=slow, **settings), world_size, Compute(micro_batch_ns=micro_batch_ns)
    )
    works = trained(
        tiny_run("works", **settings), world_size, Compute(micro_batch_ns=micro_batch_ns, slowness=slow)
    )
    assert waits[1] == works[1]
    # A wait is rounded to a nanosecond.
    assert waits[0][0].training_seconds == pytest.approx(works[0][0].training_seconds, rel=1e-6)
    assert waits[0][0].heldout_loss == works[0][0].heldout_loss


def test_the_run_says_which_ranks_are_slow(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--updates", "2", "--no-tensorboard", "--run-dir", "run", "--slow", "1=1.5"]
    assert main(["train", TINY, *words]) == 0
    assert "zero1 on 2 workers (cpu), slow 1=1.5, run" in capfd.readouterr().out
    assert json.loads(Path("run", "config.json").read_text())["slow"] == {"1": 1.5}


def test_a_comparison_slows_every_arm_down_and_its_records_say_so() -> None:
    comparison = CompareConfig(
        task=Tiny(), strategies=("zero1", "acco:clock=1,4"), updates=4, slow={1: 2.0}, evaluate_every=None
    )
    compare(comparison, Ranks.local(2), lambda line: None)
    assert json.loads(Path("runs/comparison/compare.json").read_text())["comparison"]["slow"] == {"1": 2.0}
