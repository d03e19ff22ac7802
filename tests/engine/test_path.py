"""What one steady update passes: few files and functions, and nothing that the job does not use."""

import functools
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import stretto

SOURCES = Path(stretto.__file__).parents[1]
MOST = {
    "acco": (stretto.ACCO(), {}, 1, 17, 118),
    "acco on int8": (stretto.ACCO(), {"wire": "int8"}, 1, 24, 144),
    "zero1": (stretto.ZeRO1(), {}, 1, 18, 101),
    "diloco with a delay": (stretto.DiLoCo(interval=3, delay=1), {}, 6, 27, 169),
    "zero1 with guards": (stretto.ZeRO1(), {"guards": "standard"}, 1, 36, 251),
}
"""Strategy, settings, updates that are watched, and how many files and functions the README's loop may enter, those
of comprehensions and generators included. Lines are no measure: most of them are never run by an update, and moving
them next door would lower it."""
NOT_USED = (
    "stretto_lab/",
    "stretto/guards/",
    "stretto/averaging/",
    "stretto/continuation.py",
    "stretto/dealing.py",
    "stretto/share.py",
    "stretto/engine/noisy.py",
    "stretto/noise.py",
)
"""What a job without guards and noise passes nothing of, whose ranks hold the same and whose strategy stays."""


@functools.cache
def in_sources(file: str) -> str:
    """The path of a file of ours; nothing for other files."""
    path = Path(file)
    of_ours = any(path.is_relative_to(SOURCES / package) for package in ("stretto", "stretto_lab"))
    return str(path.relative_to(SOURCES)) if of_ours else ""


class Passed:
    """The functions of ours that were called, on any thread."""

    def __init__(self) -> None:
        self.functions: set[str] = set()

    @property
    def files(self) -> set[str]:
        return {function.partition(":")[0] for function in self.functions}

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()  # jobs of other tests end when they are collected: not now
        gc.disable()
        threading.setprofile_all_threads(self._note) if hasattr(threading, "setprofile_all_threads") else None
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := in_sources(frame.f_code.co_filename)):
            self.functions.add(f"{file}:{frame.f_code.co_qualname}")


def job(strategy: stretto.Strategy, **settings: Any) -> tuple[nn.Module, stretto.DataParallel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, stretto.DataParallel(model, optimizer, strategy, micro_batches=2, **settings)


def train(model: nn.Module, parallel: stretto.DataParallel, updates: int) -> None:
    """Train with `backward`; the lane of an overlapping strategy is seen from its first round on."""
    for _ in range(2 * updates):
        parallel.backward(model(torch.ones(3, 8)).square().mean())


@pytest.mark.parametrize("name", MOST)
def test_the_readmes_loop_enters_few_files_and_functions(name: str) -> None:
    strategy, settings, updates, most_files, most_functions = MOST[name]
    passed, warm_up = Passed(), 2 * 6
    with passed.watching():  # the lane's thread starts in here, so that its calls are seen too
        model, parallel = job(strategy, **settings)
        for number, batch in enumerate(parallel.feed([torch.ones(3, 8)] * (warm_up + 2 * updates + 4))):
            if number == warm_up:
                passed.functions.clear()
            if number == warm_up + 2 * updates:
                functions, files = set(passed.functions), passed.files
            parallel.backward(model(batch).square().mean())
    parallel.finish()
    assert any(one.startswith("stretto/engine/comm_lane.py:CommLane.advance") for one in functions)
    assert len(files) <= most_files, sorted(files)
    assert len(functions) <= most_functions, sorted(functions)


def test_updates_without_guards_pass_no_guard_and_one_is_seen_where_there_is_one() -> None:
    for strategy in (stretto.ACCO(), stretto.ZeRO1(), stretto.DDP()):
        passed = Passed()
        with passed.watching():
            model, parallel = job(strategy)
            passed.functions.clear()
            train(model, parallel, 100)
            parallel.finish()
        assert [name for name in passed.functions if name.startswith(NOT_USED)] == []
    with passed.watching():
        model, parallel = job(stretto.ZeRO1(), guards="standard")
        train(model, parallel, 1)
        parallel.finish()
    assert any(name.startswith("stretto/guards/") for name in passed.functions)
