"""TensorBoard events, read back with TensorBoard."""

import sys
from pathlib import Path

import pytest

from stretto.errors import MissingExtra
from stretto.recorder import Curves
from tests.observe.updates import update


def curve(name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("events").Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_resumed_run_continues_the_curves() -> None:
    before = Curves(Path("events"), resumed_from=None)
    for step in range(1, 5):
        before.updated(update(step, loss=float(step)), training_seconds=1.0)
    before.evaluated(4, 2.5, training_seconds=1.0)
    before.close()
    after = Curves(Path("events"), resumed_from=2)
    after.updated(update(3, loss=30.0), training_seconds=1.0)
    after.close()
    assert curve("train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_what_averages_have_found_is_drawn_where_there_was_one() -> None:
    board = Curves(Path("events"), resumed_from=None)
    board.updated(update(1, interval=4), training_seconds=1.0)
    board.updated(update(2, interval=8, noise=0.5, divergence=2.0), training_seconds=1.0)
    board.close()
    assert curve("averages/noise") == [(2, 0.5)]
    assert curve("averages/divergence") == [(2, 2.0)]
    assert curve("averages/interval") == [(1, 4.0), (2, 8.0)]


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"pip install 'stretto\[cli\]'"):
        Curves(Path("events"), resumed_from=None)
