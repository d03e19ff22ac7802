"""The live display: plain lines where there is no terminal, a panel where there is."""

import dataclasses
import io
import math
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from stretto.records import Incident
from stretto_lab.observe import Header, Progress, Stages
from stretto_lab.observe.progress import CURVE_WIDTH, LANDING, Curve
from stretto_lab.patience import clock
from tests.draws import seeds
from tests.observe.updates import update
from tests.terminal import print_on_a_terminal

HEADER = Header(title="acco on 2 workers", updates=10, seconds=None)


def test_without_a_terminal_it_prints_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert end == ("update 5/10  loss 3.5000  50 samples/s  exposed 12.5%  lane 25%  12.0 Mbit/s  0:10 left")


def test_an_incident_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    incident = Incident(
        step=2,
        guard="verified",
        site="contribution",
        part="bucket 0",
        ranks=(1,),
        link=(1, 0),
        action="sent again",
    )
    progress = Progress(HEADER)
    progress.updated(update(2, incidents=(incident,)), 1.0)
    assert capsys.readouterr().out.splitlines()[0] == (
        "update 2: contribution damaged (bucket 0; rank 1, on the way from rank 1 to rank 0): sent again"
    )


def test_an_evaluation_stands_behind_its_update(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(HEADER)
    progress.updated(update(1), 1.0)
    progress.updated(update(2), 2.0)
    progress.evaluated(2, 1.5, 2.0)
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("update 2/10")
    assert lines[-1] == "held-out loss 1.5000 after 2 updates"


@pytest.mark.parametrize(("seconds", "left"), [(90.0, "  1:10 left"), (7290.0, "  2:01:10 left")])
def test_a_run_that_time_ends_shows_the_time_left(
    seconds: float, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(Header(title="", updates=None, seconds=seconds))
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
    progress = Progress(Header(title="", updates=None, seconds=None, samples=500_000))
    progress.lasts(lambda: spent[-1])
    for step in range(1, draw.randint(2, 20)):
        spent.append(spent[-1] + draw.uniform(0, 0.025))
        seconds.append(seconds[-1] + draw.uniform(0.1, 20))
        progress.updated(update(step + 1), seconds[-1])
    progress.close()
    console = Console(file=io.StringIO(), width=80)
    console.print(progress)
    line = capsys.readouterr().out.splitlines()[-1]
    share = f"update {step + 1}, {spent[-1]:.0%} of 500,000 samples"
    assert line.startswith(share)
    if step > 1:
        left = (1 - spent[-1]) * (seconds[-1] - seconds[1]) / (spent[-1] - spent[1])
        assert f"{clock(left)} left" in line
        assert f"{spent[-1]:.0%} of 500,000 samples, {clock(left)} left" in console.file.getvalue()


def test_the_panel_shows_loss_speed_exposure_the_lane_and_the_time_left() -> None:
    progress = Progress(HEADER)
    for step in range(1, 4):
        progress.updated(update(step), training_seconds=2.0 * step)
    console = Console(file=io.StringIO(), width=90)
    console.print(progress)
    shown = console.file.getvalue()
    for part in ("3/10, 0:14 left", "2.0000", "50 samples/s", "12.5% of the time", "25% busy, 12.0 Mbit/s"):
        assert part in shown


def drawn(losses: list[float], **console: Any) -> str:
    progress = Progress(HEADER)
    for step, loss in enumerate(losses, start=1):
        progress.updated(update(step, loss=loss), training_seconds=2.0 * step)
    screen = Console(**{"file": io.StringIO(), "width": 80, **console})
    screen.print(progress)
    (curve,) = re.findall(r" loss +\S+(.*).$", screen.file.getvalue(), re.MULTILINE)
    return curve.strip()


def test_the_panel_draws_the_losses_where_there_is_room() -> None:
    falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert drawn(falling) == "█▇▆▅▄▃▂▁"
    assert drawn([2.0, math.nan, 1.0]) == "█ ▁"
    assert drawn([2.0, 2.0]) == "▁▁"
    assert drawn(falling, width=70) == ""
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    latin.getvalue = lambda: (latin.flush(), latin.buffer.getvalue().decode("latin-1"))[1]
    assert drawn(falling, file=latin) == ""


def test_the_curve_of_a_long_run_keeps_its_ends_and_fits() -> None:
    for count in (47, 48, 49, 1000, 12345):
        curve = Curve()
        for step in range(count):
            curve.append(count - step)
        bars = str(curve)
        assert CURVE_WIDTH / 2 <= len(bars) < CURVE_WIDTH
        assert (bars[0], bars[-1]) == ("█", "▁")
        assert sorted(bars, reverse=True) == list(bars)


def test_a_terminal_that_cannot_draw_again_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    progress = Progress(HEADER)
    progress.updated(update(1), 1.0)
    assert capsys.readouterr().out.startswith("update 1/10")


def test_the_panel_leaves_room_for_the_echo_of_ctrl_c() -> None:
    console = Console(file=io.StringIO(), width=90)
    console.print(Progress(HEADER), end="")
    assert {len(line.rstrip()) for line in console.file.getvalue().splitlines()} == {88}


@pytest.mark.parametrize("kind", ["run", "stages"])
def test_a_title_of_any_length_leaves_the_frame_as_wide_as_it_is(kind: str) -> None:
    draw = random.Random(kind)
    for _ in range(100):
        width, title = draw.randint(20, 120), "[x]/y z"[draw.randint(0, 6) :] * draw.randint(1, 40)
        header = dataclasses.replace(HEADER, title=title)
        console = Console(file=io.StringIO(), width=width)
        console.print(Progress(header) if kind == "run" else Stages(title), end="")
        first, *lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert {len(line) for line in (first, *lines)} == {width - 2}
        shown = first[3:-3].rstrip("─ ")
        assert shown.startswith(title[: width - 10].rstrip("─ ")), (title, first)


@pytest.mark.parametrize("seed", seeds(20))
def test_the_panel_of_a_stage_says_what_is_done_and_how_far(seed: int) -> None:
    draw = random.Random(seed)
    what = " ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(1, 20)))
    stages = Stages("plan", is_shown=False)
    stages.begin(what, draw.randint(0, 5))
    console = Console(file=io.StringIO(), width=draw.randint(40, 100))
    console.print(stages, end="")
    text = console.file.getvalue()
    assert " ".join(text.replace("│", " ").partition("╮")[2].replace("━", " ").split()).startswith(
        f"{what}: 0"
    )


def test_a_stop_and_an_update_that_takes_long_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], [False]
    monkeypatch.setattr("stretto_lab.observe.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(HEADER)
    progress.lands_when(lambda: asked[0])

    def shown() -> str:
        console = Console(file=io.StringIO(), width=80)
        console.print(progress)
        assert {len(line.rstrip()) for line in console.file.getvalue().splitlines()} == {78}
        return console.file.getvalue()

    now[0] += 12
    assert "waiting for the first one, 0:12 so far" in shown()
    progress.updated(update(1), training_seconds=2.0)
    assert "update    1/10 " in shown()
    assert "loss      2.0000 " in shown()
    for step in range(2, 4):
        progress.updated(update(step), training_seconds=2.0 * step)
    assert "3/10, 0:14 left " in shown()
    now[0] += 12
    assert "3/10, 0:14 left, 0:12 since then" in shown()
    assert LANDING not in shown()
    asked[0] = True
    assert LANDING in shown()
    asked[0] = False
    progress.updated(update(10), training_seconds=20.0)
    assert "10/10, 0:00 left " in shown()
    now[0] += 12
    assert "10/10, last evaluation and save, 0:12 since then" in shown()
    progress.close()
    assert "10/10, 0:00 left " in shown()
    now[0] += 12
    assert "10/10, 0:00 left " in shown()


def test_a_stop_is_told_after_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("stretto_lab.observe.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(HEADER)
    progress.lands_when(lambda: True)
    progress.updated(update(1), training_seconds=2.0)
    now[0] += 12
    assert progress._still() == f"{LANDING}: 0:12 since then"


def test_a_run_that_waits_for_data_without_echo_does_not_speak_of_echo(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(HEADER)
    for step in range(1, 4):
        progress.updated(update(step, fresh=4, wait_seconds=0.5), 2.0 * step)
    progress.close()
    console = Console(file=io.StringIO(), width=90)
    console.print(progress)
    shown = capsys.readouterr().out + console.file.getvalue()
    assert "wait 25.0%" in shown
    assert "25.0% of the time waits" in shown
    assert "fresh" not in shown
    assert "nan" not in shown


def test_the_loss_of_first_uses_is_left_out_where_no_update_had_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(HEADER)
    for step in range(1, 4):
        progress.updated(update(step, echoed=4), 2.0 * step)
    progress.close()
    assert capsys.readouterr().out.splitlines()[-1].endswith("left  0% fresh batches")


def test_echoes_and_waits_have_a_place_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(HEADER)
    for step in range(1, 4):
        progress.updated(update(step, fresh=1, echoed=3, first_use_loss=3.0, wait_seconds=0.5), 2.0 * step)
    progress.close()
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("left  25% fresh batches, loss on them 3.0000  wait 25.0%")
    )
