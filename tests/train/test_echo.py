"""Runs that echo: what is recorded, and that they resume to the bit in the middle of a batch's uses."""

import dataclasses
from typing import Any

import pytest

from stretto_lab.train.slow_loader import SlowLoader, SlowStore
from tests.draws import part
from tests.train.runs import model_bits, records, tiny_run, train
from tests.train.tiny import Tiny


def uses(written: list[dict[str, Any]]) -> list[int]:
    """The use index of every batch."""
    return [use for record in written for use in record["uses"]]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "zero1",
        "dpu",
        "wp",
        "acco",
        "local:rate=0.5",
        "diloco:interval=2",
        "paft-sync:interval=2",
        "torch-ddp",
    ],
)
def test_every_method_records_the_uses_of_its_batches(strategy: str) -> None:
    run = tiny_run("run", strategy=strategy, echo="even:uses=2", updates=6, checkpoint_every=None)
    (outcome, _) = train(run)
    written = records("run")
    # Nothing has landed when the second update of the late ones begins: a second use would change nothing.
    late = strategy in ("dpu", "wp")
    assert uses(written) == ([1, 1] + [1, 1, 2, 2] * 2 + [1, 1] if late else [1, 1, 2, 2] * 3)
    assert [record["fresh"] + record["echoed"] for record in written] == [
        len(record["uses"]) for record in written
    ]
    assert (outcome.fresh_batches, outcome.echoed_batches) == ((8, 4) if late else (6, 6))
    assert [record for record in written if record["fresh"] if not record["first_use_loss"] > 0] == []


def test_one_use_is_the_run_without_an_echo_to_the_bit() -> None:
    train(tiny_run("bare"))
    train(tiny_run("echo", echo="even:uses=1"))
    assert model_bits("bare") == model_bits("echo")
    assert [record["loss"] for record in records("bare")] == [record["loss"] for record in records("echo")]


@pytest.mark.parametrize("echo", part(["ready", "auto:window=2:skip=0"]))
def test_plans_that_go_by_time_train_over_a_slow_loader(echo: str) -> None:
    (outcome, other) = train(tiny_run("run", echo=echo, slow_loader="2,jitter=0.5", micro_batches=4))
    assert outcome.updates == other.updates == 10
    assert outcome.fresh_batches + outcome.echoed_batches == 40


def test_a_run_that_echoes_resumes_at_another_world_size_with_what_is_unseen() -> None:
    run = tiny_run("run", strategy="zero1", echo="even:uses=2", updates=6)
    train(run)
    again = dataclasses.replace(run, updates=10, resume=True, micro_batches=4, workers=1)
    (outcome,) = train(again, world_size=1)
    assert outcome.updates == 10
    assert uses(records("run")[6:]) == ([1] * 4 + [2] * 4) * 2


def test_a_slow_loader_takes_its_time_and_is_the_loader_it_slows_down() -> None:
    loader = Tiny().build(0, 1, 0, None).loader
    slow = SlowLoader(loader, SlowStore(milliseconds=1), seed=0)
    next(iter(slow))
    assert slow.state_dict() == loader.state_dict()
    durations = SlowStore(milliseconds=20, jitter=0.5).durations(0)
    drawn = [next(durations) for _ in range(2000)]
    # The standard error of the mean is 20 ms * 0.5 / sqrt(2000) = 0.22 ms.
    assert sum(drawn) / 2000 == pytest.approx(0.02, abs=0.0011)


@pytest.mark.parametrize(
    ("text", "store"),
    [
        ("none", None),
        ("30", SlowStore(milliseconds=30)),
        ("2.5,decode", SlowStore(milliseconds=2.5, decodes=True)),
        ("30,decode,jitter=0.5", SlowStore(milliseconds=30, decodes=True, jitter=0.5)),
    ],
)
def test_slow_loaders_are_read_from_one_word(text: str, store: SlowStore | None) -> None:
    assert SlowStore.parse(text) == store
