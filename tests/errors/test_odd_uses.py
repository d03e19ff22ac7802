"""Whatever is handed over, and wherever a call stands: it ends well or in one of the library's own errors.

And the job is usable and right after that, or says that it has ended.
"""

import contextlib
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint
from stretto.errors import Finished, StrettoError, UsageError
from tests.bits import unequal
from tests.draws import FIRST_SEED, draws
from tests.errors.tiny import EVERY, TinyJob
from tests.processes import run_ranks

ONES = torch.ones(2, 4)
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "a huge integer": lambda: 10**400,
    "a word": lambda: "many",
    "no word": lambda: "",
    "bytes": lambda: b"x",
    "an object": object,
    "a list": lambda: [],
    "a list of lists": lambda: [[1, "a"]],
    "a dict": lambda: {"a": 1},
    "a set": lambda: {1},
    "a class": lambda: nn.Linear,
    "a module": lambda: nn.Linear(2, 2),
    "a number": lambda: torch.tensor(1.0),
    "an integer": lambda: torch.tensor(3),
    "a vector": lambda: torch.ones(3, requires_grad=True),
    "no elements": lambda: torch.ones(0),
    "complex": lambda: torch.ones((), dtype=torch.complex64, requires_grad=True),
    "on meta": lambda: torch.ones((), device="meta", requires_grad=True),
    "a NumPy number": lambda: np.float64(1.0),
    "an array": lambda: np.ones(3),
    "a path": lambda: Path("nowhere/at/all"),
    "an iterator": lambda: iter([]),
    "an exception": lambda: ValueError("of nobody"),
    "an optimizer": lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1),
}


class Job(TinyJob):
    """A job, with the data of its rank; the same every time."""

    def __init__(self, strategy: str, rank: int = 0) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        super().__init__(strategy, model=model, rank=rank, options=st.Options(timeout_seconds=60))
        self.data = [self.batch() for _ in range(14)]

    def train(self, visit: Callable[["Job"], None] = lambda _: None, at: int = 0) -> list[Tensor]:
        """Train to the end, and visit before a micro-batch; return the parameters."""
        for number, batch in enumerate(self.data):
            if number == at:
                visit(self)
            self.parallel.backward(self.loss(batch))
        self.parallel.finish()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def recorded(job: Job, call: Callable[[st.Recorder], None]) -> None:
    """Call with a recorder whose files are closed after it, also where it has taken the odd value."""
    with st.Recorder("records", job.parallel) as records:
        call(records)


def loaded(part: str, name: str | None = None) -> Callable[[Job, Any], None]:
    """Return a call that loads the job's own state with one entry replaced."""

    def load(job: Job, odd: Any) -> None:
        state = job.parallel.state_dict()
        job.parallel.load_state_dict({**state, part: odd if name is None else {**state[part], name: odd}})

    return load


def made(**odd: Any) -> None:
    """Make a job with an odd argument, and end it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizer": optimizer, **odd}
    st.DataParallel(**given).finish()


def echo_state_with(name: str, value: Any) -> None:
    loader: Any = st.EchoLoader([torch.ones(1)], st.Even(2))
    loader.load_state_dict({**loader.state_dict(), name: value})


CALLS: dict[str, Callable[[Job, Any], Any]] = {
    "backward": lambda job, odd: job.parallel.backward(odd),
    "backward(weight)": lambda job, odd: job.parallel.backward(job.loss(ONES), weight=odd),
    "backward(samples)": lambda job, odd: job.parallel.backward(job.loss(ONES), samples=odd),
    "micro_batch(weight)": lambda job, odd: job.parallel.micro_batch(job.loss, job.data[0], weight=odd),
    "micro_batch(samples)": lambda job, odd: job.parallel.micro_batch(job.loss, job.data[0], samples=odd),
    "micro_batch: loss": lambda job, odd: job.parallel.micro_batch(lambda _: odd, job.data[0]),
    "micro_batch: pair": lambda job, odd: job.parallel.micro_batch(
        lambda _: (job.loss(ONES), odd), job.data[0]
    ),
    "micro_batch: weight": lambda job, odd: job.parallel.micro_batch(
        lambda _: (job.loss(ONES), odd, 2), job.data[0]
    ),
    "micro_batch: samples": lambda job, odd: job.parallel.micro_batch(
        lambda _: (job.loss(ONES), 1.0, odd), job.data[0]
    ),
    "count_micro_batch(weight)": lambda job, odd: job.parallel.count_micro_batch(odd),
    "count_micro_batch(loss)": lambda job, odd: (
        job.loss(ONES).backward(),
        job.parallel.count_micro_batch(loss=odd),
    ),
    "feed": lambda job, odd: next(job.parallel.feed(odd), None),
    "feed(updates)": lambda job, odd: next(job.parallel.feed(job.data, updates=odd)),
    "feed(until)": lambda job, odd: next(job.parallel.feed(job.data, until=odd)),
    "feed: batch": lambda job, odd: next(job.parallel.feed([odd, odd])),
    "fail": lambda job, odd: job.parallel.fail(odd),
    "load_state_dict": lambda job, odd: job.parallel.load_state_dict(odd),
    "load_state_dict: model": loaded("model"),
    "load_state_dict: parameter": loaded("model", "0.weight"),
    "load_state_dict: buffer": loaded("model", "1.running_mean"),
    "load_state_dict: optimizer": loaded("optimizer"),
    "load_state_dict: moment": loaded("optimizer", "state.0.weight.exp_avg"),
    "load_state_dict: counts": loaded("job"),
    "save": lambda job, odd: checkpoint.save(odd, "folder"),
    "save(directory)": lambda job, odd: checkpoint.save(job.parallel, odd),
    "save(loader)": lambda job, odd: checkpoint.save(job.parallel, "folder", loader=odd),
    "save(extra)": lambda job, odd: checkpoint.save(job.parallel, "folder", extra=odd),
    "save(keep)": lambda job, odd: checkpoint.save(job.parallel, "folder", keep=odd),
    "save(async_save)": lambda job, odd: checkpoint.wait(
        (checkpoint.save(job.parallel, "folder", async_save=odd), job.parallel)[1]
    ),
    "load": lambda job, odd: checkpoint.load(odd, "folder"),
    "load(source)": lambda job, odd: checkpoint.load(job.parallel, odd),
    "load: shares": lambda job, odd: checkpoint.load(job.parallel, [checkpoint.hold(job.parallel), odd]),
    "hold": lambda job, odd: checkpoint.hold(odd),
    "hold(loader)": lambda job, odd: checkpoint.hold(job.parallel, loader=odd),
    "continued": lambda job, odd: checkpoint.continued(odd, lambda: job.parallel),
    "continued: returns": lambda job, odd: checkpoint.continued(job.parallel, lambda: odd),
    "wait": lambda job, odd: checkpoint.wait(odd),
    "check": lambda job, odd: checkpoint.check(odd),
    "latest": lambda job, odd: checkpoint.latest(odd),
    "newest_first": lambda job, odd: checkpoint.newest_first(odd),
    "Recorder": lambda job, odd: st.Recorder(odd, job.parallel),
    "Recorder(job)": lambda job, odd: st.Recorder("records", odd),
    "Recorder(settings)": lambda job, odd: st.Recorder("records", job.parallel, settings=odd),
    "Recorder: update": lambda job, odd: recorded(job, lambda records: records(odd)),
    "Recorder.evaluated": lambda job, odd: recorded(job, lambda records: records.evaluated(odd)),
    "Recorder.evaluated(step)": lambda job, odd: recorded(job, lambda records: records.evaluated(1.0, odd)),
    "EchoLoader": lambda job, odd: next(iter(st.EchoLoader(odd, st.Even(2))), None),
    "EchoLoader(plan)": lambda job, odd: st.EchoLoader(job.data, odd),
    "EchoLoader(options)": lambda job, odd: st.EchoLoader(job.data, options=odd),
    "EchoLoader.load_state_dict": lambda job, odd: st.EchoLoader(job.data).load_state_dict(odd),
    "EchoLoader: version": lambda job, odd: echo_state_with("version", odd),
    "EchoLoader: seed": lambda job, odd: echo_state_with("seed", odd),
    "diagnose": lambda job, odd: st.diagnose(odd, lambda _: None, batches=2, skip=0),
    "diagnose: update": lambda job, odd: st.diagnose(job.data, lambda _: odd, batches=2, skip=0),
    "Total": lambda job, odd: st.Total(odd),
    "Noise": lambda job, odd: st.Noise(odd),
    **{
        f"DataParallel({name})": lambda job, odd, name=name: made(**{name: odd})
        for name in (
            *("model", "optimizer", "strategy", "micro_batches", "scheduler", "wire", "guards", "group"),
            *("ranks", "mesh", "options"),
        )
    },
}
NEEDS_UPDATE = ("load_state_dict", "save", "load", "hold", "continued")
"""What is refused anyway in the middle of an update."""


def odd_calls(count: int, seed: int) -> list[tuple[str, str, str, int]]:
    """Draw calls, values, strategies and moments."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        call = draw.choice([*CALLS])
        at = 2 * draw.randint(0, 6) if call.startswith(NEEDS_UPDATE) else draw.randint(0, 13)
        found.append((call, draw.choice([*VALUES]), draw.choice([*EVERY]), at))
    return found


def ends_well(job: Job, call: Callable[[Job], Any], at: int, where: Any) -> list[Tensor] | None:
    """Call at a moment of a training; return its outcome if nothing has been refused, or the job has gone on."""

    def visit(job: Job) -> None:
        with contextlib.suppress(StrettoError):
            call(job)

    told: list[StrettoError] = []
    try:
        return job.train(visit, at)
    except StrettoError as error:
        told.append(error)
    assert len(str(told[0]).splitlines()) == 1, where
    with pytest.raises(Finished):
        job.parallel.backward(torch.ones((), requires_grad=True))
    return None


TRAINS = ("backward", "micro_batch", "count", "feed", "load", "continued")
"""What may train, and so change the outcome."""


def check(cases: list[tuple[str, str, str, int]], rank: int) -> None:
    plain = {strategy: Job(strategy, rank).train() for strategy in {case[2] for case in cases}}
    for case in cases:
        call, value, strategy, at = case
        outcome = ends_well(
            Job(strategy, rank),
            lambda job, call=call, value=value: CALLS[call](job, VALUES[value]()),
            at,
            case,
        )
        if outcome is not None and not call.startswith(TRAINS):
            assert unequal(outcome, plain[strategy]) == [], case


def test_odd_arguments_end_well_or_in_an_error_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(odd_calls(len(draws(160)), seed=FIRST_SEED), rank=0)


def of_two_ranks(rank: int) -> None:
    check(
        [
            case
            for case in odd_calls(len(draws(40)), seed=FIRST_SEED + 1)
            if not case[0].startswith("DataParallel")
        ],
        rank,
    )


def test_on_two_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(2, of_two_ranks)


@pytest.mark.parametrize(
    "name", ["step", "module", "no_sync", "train", "parameters", "clip_grad_norm_", "prepare"]
)
def test_what_other_wrappers_have_says_what_to_write(name: str) -> None:
    parallel: Any = Job("acco").parallel
    with pytest.raises(UsageError, match=r"rank 0, after step 0: .* as other wrappers have: "):
        getattr(parallel, name)
    with pytest.raises(UsageError, match="call the model itself"):
        parallel(torch.ones(2, 3))
    assert not hasattr(parallel, name)
