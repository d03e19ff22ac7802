"""The lines that show a run."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest

from stretto.records import Incident
from stretto_lab.observe import Header, Progress
from stretto_lab.observe.progress import STOPPING
from stretto_lab.patience import clock
from tests.draws import seeds
from tests.observe.updates import update

HEADER = Header(updates=10, seconds=None)


def test_it_prints_a_line_at_the_first_and_at_the_last_update(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(HEADER)
    progress.doing("building the model")
    progress.evaluated(0, 5.5, 0.0)
    for step in range(1, 6):
        progress.updated(update(step, loss=float(step)), training_seconds=2.0 * step)
    progress.close()
    first, evaluation, begin, end = capsys.readouterr().out.splitlines()
    assert first == "building the model"
    assert evaluation == "held-out loss 5.5000 after 0 updates"
    assert begin == "update 1/10  loss 1.0000"
    # Over the four updates after the first, of two seconds of training each; five updates are left.
    assert end == ("update 5/10  loss 3.5000  50 samples/s  waiting 12%  network 25%  0:10 left")


def test_losses_of_tokens_have_their_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    for unit, loss in (
        (" nats per token", 3.1864),
        (" nats per byte", 3.1864),
        (" nats per token", math.inf),
    ):
        Progress(dataclasses.replace(HEADER, loss_unit=unit)).evaluated(5, loss, 0.0)
    assert capsys.readouterr().out.splitlines() == [
        "held-out loss 3.1864 nats per token (perplexity 24.2) after 5 updates",
        "held-out loss 3.1864 nats per byte after 5 updates",
        "held-out loss inf nats per token after 5 updates",
    ]


def test_an_incident_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "step": 2,
        "guard": "verified",
        "site": "contribution",
        "part": "bucket 0",
        "action": "sent again",
    }
    incident = Incident(**found, ranks=(1,), link=(1, 0))
    progress = Progress(HEADER)
    progress.updated(update(2, incidents=(incident,)), 1.0)
    assert capsys.readouterr().out.splitlines()[0] == (
        "update 2: contribution damaged (bucket 0; rank 1, on the way from rank 1 to rank 0): sent again"
    )


@pytest.mark.parametrize(("seconds", "left"), [(90.0, "  1:10 left"), (7290.0, "  2:01:10 left")])
def test_a_run_that_time_ends_shows_the_time_left(
    seconds: float, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(Header(updates=None, seconds=seconds))
    progress.updated(update(1), 10.0)
    progress.updated(update(2), 20.0)
    progress.close()
    assert capsys.readouterr().out.splitlines()[-1].endswith(left)


@pytest.mark.parametrize("seed", seeds(20))
def test_a_run_that_data_end_shows_their_share_and_the_time_left_by_its_rate(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under a clock or an echo an update takes of them what it takes: their rate is that of the last updates."""
    draw = random.Random(seed)
    spent, seconds = [draw.uniform(0, 0.5)], [draw.uniform(0, 99)]  # a resumed run has spent some
    progress = Progress(Header(updates=None, seconds=None, samples=500_000))
    progress.follows(is_stopped=bool, share=lambda: spent[-1])
    for step in range(1, draw.randint(2, 20)):
        spent.append(spent[-1] + draw.uniform(0, 0.025))
        seconds.append(seconds[-1] + draw.uniform(0.1, 20))
        progress.updated(update(step + 1), seconds[-1])
    progress.close()
    line = capsys.readouterr().out.splitlines()[-1]
    share = f"update {step + 1}, {spent[-1]:.0%} of 500,000 samples"
    assert line.startswith(share)
    if step > 1:
        left = (1 - spent[-1]) * (seconds[-1] - seconds[1]) / (spent[-1] - spent[1])
        assert f"{clock(left)} left" in line


def test_a_stop_is_told_after_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("stretto_lab.observe.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(HEADER)
    progress.follows(is_stopped=lambda: True, share=float)
    progress.updated(update(1), training_seconds=2.0)
    now[0] += 12
    assert progress._still() == f"{STOPPING}: 0:12 since then"


ENDS: list[tuple[dict[str, float], str]] = [
    ({"fresh": 4, "wait_seconds": 0.5}, "left  waiting for data 25%"),
    ({"echoed": 4}, "left  0% fresh batches"),  # no update had a first use
    (
        {"fresh": 1, "echoed": 3, "first_use_loss": 3.0, "wait_seconds": 0.5},
        "left  25% fresh batches, loss on them 3.0000  waiting for data 25%",
    ),
]


def test_echoes_and_waits_have_a_place_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    for different, end in ENDS:
        progress = Progress(HEADER)
        for step in range(1, 4):
            progress.updated(update(step, **different), 2.0 * step)
        progress.close()
        assert capsys.readouterr().out.splitlines()[-1].endswith(end)
