"""A run that is killed at any moment and resumed is the run that nobody disturbed, to the bit."""

import dataclasses
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from stretto import checkpoint
from stretto.errors import WorkerFailed
from stretto_lab.observe import read_json_lines
from tests.draws import part
from tests.train.runs import (
    model_bits,
    records,
    tiny_run,
    train,
    train_until_hit_in_write,
    train_until_killed,
    written,
)
from tests.train.tiny import Tiny

SHARDS = {"workers": 4, "shard": 2, "task": Tiny(normed=False)}
KILLED: dict[str, dict[str, Any]] = {
    "acco": {"strategy": "acco"},
    "acco, at another moment": {"strategy": "acco"},
    "wp": {"strategy": "wp"},
    "dpu": {"strategy": "dpu"},
    "zero1": {"strategy": "zero1"},
    "ddp": {"strategy": "ddp"},
    "averages": {"strategy": "local:rate=0.3"},
    "between two uses of a batch": {"strategy": "acco", "echo": "even:uses=2.5"},
    "with drawn uses": {"strategy": "zero1", "echo": "bernoulli:p=linear(1,0.3)"},
    "acco on shards": {"strategy": "acco:wire=int4", **SHARDS},
    "averages of shards": {"strategy": "diloco:interval=2:fragments=1", **SHARDS},
}


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_resumes_to_the_bit(name: str) -> None:
    run, draw = tiny_run("killed", **KILLED[name]), random.Random(name)
    ranks = run.workers or 2
    calls = train(dataclasses.replace(run, run_dir="whole"), ranks, train_until_killed, 0, -1)
    victim = draw.randrange(ranks)
    # From the second quarter on: by then there is a checkpoint, or half of one.
    call = draw.randrange(calls[victim] // 4, calls[victim])
    with pytest.raises(
        WorkerFailed, match=f"rank {victim} of {ranks} local workers failed: .* killed by SIGKILL"
    ):
        train(run, ranks, train_until_killed, victim, call)
    train(dataclasses.replace(run, resume=True), ranks)
    assert written("killed") == written("whole")


@pytest.mark.parametrize("strategy", part(["zero1", "ddp", "acco", "wp", "average:2"]))
def test_a_stop_signal_to_any_rank_lands_and_saves_and_the_run_goes_on(strategy: str) -> None:
    run = tiny_run("stopped", strategy=strategy)
    victims = random.Random(strategy).choice([(0,), (1,), (0, 1)])
    outcomes = train(run, 2, train_until_hit_in_write, victims, signal.SIGTERM, 1)
    (updates,) = {outcome.updates for outcome in outcomes}
    assert 3 <= updates < 10
    last, *_ = checkpoint.complete(Path("stopped", "checkpoints"))
    assert last.name.endswith(f"-step-{updates}")
    assert [one["step"] for one in read_json_lines(Path("stopped", "updates.jsonl"))] == list(
        range(1, updates + 1)
    )
    assert not Path("stopped", "model.pt").exists()
    (outcome, _) = train(dataclasses.replace(run, resume=True))
    assert (outcome.updates, outcome.resumed_from) == (10, updates)
    if strategy in ("zero1", "ddp"):  # nothing was in flight, so nothing ended early
        train(tiny_run("whole", strategy=strategy))
        assert [one["loss"] for one in records("stopped")] == [one["loss"] for one in records("whole")]
        assert model_bits("stopped") == model_bits("whole")


def test_a_finished_run_that_is_resumed_is_finished() -> None:
    run = tiny_run("done")
    train(run)
    before = written("done")
    (outcome, _) = train(dataclasses.replace(run, resume=True))
    assert written("done") == before
    assert (outcome.updates, outcome.heldout_before) == (10, before[1][0][1])


def test_a_damaged_checkpoint_is_passed_over_and_told() -> None:
    run = tiny_run("run", strategy="zero1")
    train(run)
    whole = written("run")
    last, *_ = checkpoints = list(checkpoint.complete(Path("run", "checkpoints")))
    content = bytearray((last / "0.share").read_bytes())
    content[len(content) // 2] ^= 1
    (last / "0.share").write_bytes(content)
    train(dataclasses.replace(run, resume=True))
    assert written("run") == whole
    (incident,) = read_json_lines(Path("run", "incidents.jsonl"))
    assert (incident["guard"], incident["part"]) == ("checkpoint", last.name)
    assert incident["action"] == f"went back to {checkpoints[1].name}"


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew() -> None:
    run = tiny_run("run", strategy="zero1")
    train(run)
    for path in checkpoint.complete(Path("run", "checkpoints")):
        file = path / "0.share"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(WorkerFailed, match="TornCheckpoint"):
        train(dataclasses.replace(run, resume=True))


@pytest.mark.long
def test_a_run_resumes_at_another_world_size_with_the_same_samples() -> None:
    # Without dropout, whose draws belong to ranks.
    whole = tiny_run("two", strategy="zero1", task=Tiny(dropout=0.0))
    train(whole)
    half = dataclasses.replace(whole, run_dir="one", updates=6)
    train(half)
    train(dataclasses.replace(half, updates=10, resume=True, micro_batches=4, workers=1), world_size=1)
    two, one = records("two"), records("one")
    assert [record["samples"] for record in one] == [record["samples"] for record in two]
    # The same micro-batches, summed in another order of fp32: a few units in the last place per update.
    assert [record["loss"] for record in one] == pytest.approx([record["loss"] for record in two], rel=1e-4)
