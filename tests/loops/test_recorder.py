"""A loop of one's own leaves the folder that `stretto train` leaves: records, curves, a page."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch.distributed import ProcessGroup

import stretto
from stretto import ACCO, Average, Recorder, ZeRO1
from stretto.errors import ConfigError, UsageError
from stretto.json_lines import read_json_lines
from stretto_lab.virtual import VirtualCluster
from tests.docs.pages import DOCS, code_blocks
from tests.loops.habits import batches, job, mean_square, network
from tests.page.pages import page_of, points

STRATEGIES = [ZeRO1(), ACCO(), Average(2)]


def trained(folder: Path, strategy: stretto.Strategy, *, tensorboard: bool = False) -> list[stretto.Update]:
    """The updates that a loop has heard of beside its recorder."""
    heard: list[stretto.Update] = []
    parallel = job(network(), strategy)
    with Recorder(folder, parallel, tensorboard=tensorboard, settings={"width": 8}) as recorder:

        def both(update: stretto.Update) -> None:
            recorder(update)
            heard.append(update)
            if update.step % 2 == 0:
                with recorder.held(), parallel.settled(), torch.no_grad():
                    recorder.evaluated(float(mean_square(parallel.model, batches()[0])))

        for batch in parallel.feed(batches(), on_update=both):
            parallel.backward(mean_square(parallel.model, batch))
        parallel.finish()
    return heard


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_records_are_the_updates_and_the_page_draws_them(strategy: stretto.Strategy, tmp_path: Path) -> None:
    heard = trained(tmp_path / "run", strategy)
    records = read_json_lines(tmp_path / "run" / "updates.jsonl")
    assert [{**one, "training_seconds": None} for one in records] == [
        {**json.loads(json.dumps(update.as_json())), "training_seconds": None} for update in heard
    ]
    seconds = [one["training_seconds"] for one in records]
    assert seconds == sorted(seconds)
    assert [one["step"] for one in read_json_lines(tmp_path / "run" / "evaluations.jsonl")] == [2, 4]
    page = page_of(tmp_path / "run", out=str(tmp_path / "page.html"))
    assert [at for at, *_ in points(page, "run")] == [2, 4]
    assert repr(strategy).partition("(")[0] in page
    assert "width 8" in page


def test_tensorboard_has_the_same_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    heard = trained(tmp_path / "run", ZeRO1(), tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = [event.value for event in events.Scalars("train/loss")]
    assert found == pytest.approx([update.loss for update in heard])


def on_ranks(rank: int, group: ProcessGroup, folder: str) -> bool:
    model = network()
    parallel = job(model, group=group)
    with Recorder(f"{folder}/{rank}", parallel) as recorder:
        for batch in parallel.feed(batches()[rank::2], on_update=recorder):
            parallel.backward(mean_square(model, batch))
        parallel.finish()
    return Path(folder, str(rank)).exists()


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    assert VirtualCluster(2).run(lambda rank, group: on_ranks(rank, group, str(tmp_path))).values == (
        True,
        False,
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_goes_on_from_a_checkpoint_goes_on_in_the_records(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    saved = draws.randint(1, 6)
    ended = draws.randint(saved, 7)
    folder, checkpoints = tmp_path / "run", tmp_path / "checkpoints"

    def course(until: int, *, goes_on: bool) -> None:
        parallel = job(network(), draws.choice(STRATEGIES))
        if goes_on:
            assert stretto.checkpoint.load(parallel, checkpoints).step == saved
        with Recorder(folder, parallel) as recorder:

            def both(update: stretto.Update) -> None:
                recorder(update)
                if update.step == saved and not goes_on:
                    stretto.checkpoint.save(parallel, checkpoints)

            for batch in parallel.feed(batches(32), until, on_update=both):
                parallel.backward(mean_square(parallel.model, batch))
            parallel.finish()

    course(ended, goes_on=False)
    before = read_json_lines(folder / "updates.jsonl")
    course(8, goes_on=True)
    after = read_json_lines(folder / "updates.jsonl")
    assert [one["step"] for one in after] == list(range(1, 9))
    assert after[:saved] == before[:saved]
    assert after[saved]["training_seconds"] > before[saved - 1]["training_seconds"]


def test_a_job_that_begins_anew_begins_the_records_anew(tmp_path: Path) -> None:
    for _ in range(2):
        trained(tmp_path / "run", ZeRO1())
    steps = [one["step"] for one in read_json_lines(tmp_path / "run" / "updates.jsonl")]
    assert steps == [1, 2, 3, 4]


def test_an_evaluation_of_nobody_knows_what_is_refused_and_so_is_a_record_after_the_end(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "run")
    with pytest.raises(UsageError, match="expected step="):
        recorder.evaluated(1.0)
    recorder.evaluated(1.0, step=0)
    recorder.close()
    with pytest.raises(UsageError, match="was closed"):
        recorder.evaluated(1.0, step=1)


TRACKERS = code_blocks(DOCS / "loops.md", "tests/loops/test_recorder.py")


class Tracker:
    """A stand-in for a tracker's module: it is told numbers, and sends nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def init(self, **_: object) -> "Tracker":
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.told.append((step, numbers))

    log_metrics = log

    def start_run(self) -> None:
        """Begin."""

    finish = end_run = start_run


@pytest.mark.parametrize("index", range(2))
def test_a_tracker_of_the_page_hears_of_every_update(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(__import__("sys").modules, name, tracker)
    model = network()
    parallel = job(model)
    found = {
        "model": model,
        "parallel": parallel,
        "loader": batches(),
        "loss_function": lambda output: output.mean(),
    }
    exec(compile(TRACKERS[index], "loops.md", "exec"), found)
    assert [step for step, _ in tracker.told] == [1, 2, 3, 4]
    assert [
        numbers
        for _, numbers in tracker.told
        if not {"loss", "learning_rate", "gradient_norm"} <= set(numbers)
    ] == []


def test_batches_that_cannot_come_again_are_no_loader_whose_position_is_saved(tmp_path: Path) -> None:
    loader = (batch for batch in batches())
    parallel = job(network())
    for call in (
        lambda: stretto.checkpoint.save(parallel, tmp_path, loader=loader),
        lambda: stretto.checkpoint.load(parallel, tmp_path, loader=loader),
        lambda: stretto.checkpoint.hold(parallel, loader=loader),
    ):
        with pytest.raises(ConfigError, match="cannot begin again: expected a DataLoader"):
            call()
    parallel.finish()
