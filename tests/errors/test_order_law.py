"""Public calls in any order, from anywhere: each ends right, or in one line of the library's errors."""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto as st
from stretto import checkpoint
from stretto.errors import Finished, StrettoError
from tests.draws import FIRST_SEED, draws
from tests.errors.tiny import MICRO_BATCHES, TinyJob, tiny_model
from tests.processes import run_ranks

STRATEGIES = ("zero1", "ddp", "acco", "wp", "dpu", "local", "diloco")
AS_PLAIN = ("zero1", "ddp")
"""Strategies under which every sequence of calls has a plain loop that it equals."""
SGD = functools.partial(torch.optim.SGD, momentum=0.9)


class Turned:
    """A schedule that calls whatever is due when the library turns it."""

    def __init__(self) -> None:
        self.last_epoch, self.call = 0, lambda: None

    def step(self) -> None:
        self.last_epoch += 1
        self.call()

    def state_dict(self) -> dict[str, int]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last_epoch = state["last_epoch"]


class Plain:
    """The plain loop beside a job: what is counted, and the step of a whole or of a short accumulation."""

    def __init__(self) -> None:
        self.model = tiny_model()
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.weight, self.counted, self.steps = 0.0, 0, 0
        self.saved: Any = None

    def micro_batch(self, batch: Tensor, weight: float = 1.0) -> None:
        if weight:
            (self.model(batch).square().mean() * weight).backward()
        self.weight, self.counted = self.weight + weight, self.counted + 1
        if self.counted == MICRO_BATCHES:
            self.step()

    def step(self) -> None:
        if self.weight:
            for parameter in self.model.parameters():
                parameter.grad.div_(self.weight)
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad()
        self.weight, self.counted = 0.0, 0

    def commit(self) -> None:
        if self.counted:
            self.step()

    def save(self) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict(), self.steps
        self.saved = copy.deepcopy(states)

    def load(self) -> None:
        values, momenta, self.steps = copy.deepcopy(self.saved)
        self.model.load_state_dict(values)
        self.optimizer.load_state_dict(momenta)


class Job(TinyJob):
    """A job and the plain loop that does the same."""

    def __init__(self, strategy: str, folder: Path, rank: int = 0) -> None:
        self.schedule, self.plain, self.folder = Turned(), Plain(), folder
        super().__init__(
            strategy,
            optimizer=SGD,
            learning_rate=0.1,
            rank=rank,
            scheduler=self.schedule,
            options=st.Options(timeout_seconds=60),
        )

    def next(self, use: Callable[[Tensor], object], weight: float = 1.0) -> None:
        """Use the next micro-batch, and train the plain loop on it."""
        batch = self.batch()
        use(batch)
        self.plain.micro_batch(batch, weight)

    def feed(self, count: int) -> Iterator[Tensor]:
        return self.parallel.feed([self.batch() for _ in range(count)])

    def backward(self, batch: Tensor) -> None:
        self.parallel.backward(self.loss(batch))


Call = Callable[[Job], object]


def counted(job: Job) -> None:
    def use(batch: Tensor) -> None:
        loss = job.loss(batch)
        (3 * loss).backward()
        job.parallel.count_micro_batch(3.0, loss)

    job.next(use, 3.0)


def looked_at_settled(job: Job) -> None:
    with job.parallel.settled():
        job.model.state_dict()


def commit(job: Job) -> None:
    job.parallel.commit()
    job.plain.commit()


def fed(job: Job) -> None:
    for batch in job.feed(3):
        job.backward(batch)
        job.plain.micro_batch(batch)
    job.plain.commit()


def left(job: Job) -> None:
    for batch in job.feed(4):
        job.backward(batch)
        job.plain.micro_batch(batch)
        break


def saved(job: Job) -> None:
    checkpoint.save(job.parallel, job.folder)
    job.plain.save()


def loaded(job: Job) -> None:
    if job.plain.saved is not None:
        checkpoint.load(job.parallel, job.folder)
        job.plain.load()


AS_IN_PLAIN: dict[str, Call] = {
    "backward": lambda job: job.next(job.backward),
    "backward of 3": lambda job: job.next(
        lambda batch: job.parallel.backward(job.loss(batch), weight=3.0), 3.0
    ),
    "micro_batch": lambda job: job.next(lambda batch: job.parallel.micro_batch(job.loss, batch)),
    "own backward of 3": counted,
    "count_micro_batch of 0": lambda job: job.next(lambda _: job.parallel.count_micro_batch(0.0), 0.0),
    "look": lambda job: torch.no_grad()(job.loss)(),
    "settled": looked_at_settled,
    "forward alone": TinyJob.loss,
    "autograd.grad": lambda job: torch.autograd.grad(job.loss(), list(job.model.parameters())),
    "discard": lambda job: job.parallel.discard(),
    "commit": commit,
    "feed": fed,
    "feed and leave": left,
    "save": saved,
    "load": loaded,
    "load_state_dict": lambda job: job.parallel.load_state_dict(job.parallel.state_dict()),
}


def trained_settled(job: Job) -> None:
    with job.parallel.settled():
        job.next(job.backward)


def fed_inside(job: Job) -> None:
    for _ in job.feed(3):
        fed(job)


OTHERS: dict[str, Call] = {
    "zero_grad": lambda job: job.optimizer.zero_grad(),
    "step": lambda job: job.optimizer.step(),
    "stop": lambda job: job.parallel.stop(),
    "finish": lambda job: job.parallel.finish(),
    "leave": lambda job: job.parallel.leave(),
    "fail": lambda job: job.parallel.fail(ValueError("given up")),
    "wrap again": lambda job: TinyJob(model=job.model),
    "train settled": trained_settled,
    "feed inside feed": fed_inside,
}
"""Calls that a job refuses, or that end it."""
CALLS = AS_IN_PLAIN | OTHERS

# Where a call may stand


def by_itself(job: Job, call: Call) -> None:
    call(job)


def on_a_thread(job: Job, call: Call) -> None:
    """The caller waits for it."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call, job).result()


def between(job: Job, call: Call) -> None:
    """Between a forward pass and its backward pass."""
    loss = job.loss()
    call(job)
    job.parallel.backward(loss)


def in_loss_function(job: Job, call: Call) -> None:
    job.parallel.micro_batch(lambda batch: (call(job), job.loss(batch))[-1], job.batch())


def in_forward_pass(job: Job, call: Call) -> None:
    handle = job.model[0].register_forward_hook(lambda *_: (handle.remove(), call(job), None)[-1])
    job.micro_batch()


def in_backward_pass(job: Job, call: Call) -> None:
    @torch.enable_grad()
    def hook(_: Tensor) -> None:
        handle.remove()
        call(job)

    handle = job.model[0].weight.register_hook(hook)
    job.micro_batch()


def in_schedule(job: Job, call: Call) -> None:
    def turned() -> None:
        job.schedule.call = lambda: None
        call(job)

    job.schedule.call = turned


def in_settled(job: Job, call: Call) -> None:
    with job.parallel.settled():
        call(job)


def in_body(job: Job, call: Call) -> None:
    for index, batch in enumerate(job.feed(4)):
        if index == 1:
            call(job)
        job.backward(batch)


def in_loader(job: Job, call: Call) -> None:
    def loader() -> Any:
        yield job.batch()
        call(job)
        yield job.batch()

    for batch in job.parallel.feed(loader()):
        job.backward(batch)


def in_on_update(job: Job, call: Call) -> None:
    calls = [call]

    def on_update(_: st.Update) -> None:
        if calls:
            calls.pop()(job)

    for batch in job.parallel.feed([job.batch() for _ in range(4)], on_update=on_update):
        job.backward(batch)


INSIDE = (
    *(between, in_loss_function, in_forward_pass, in_backward_pass, in_schedule, in_settled, in_body),
    *(in_loader, in_on_update),
)
Sequence = tuple[str, list[tuple[Callable[[Job, Call], None], str]]]
"""A strategy, and calls by where they stand and by name."""


def plain_sequences(count: int, seed: int) -> list[Sequence]:
    """Draw sequences that a plain loop can follow."""
    draw = random.Random(seed)
    return [
        (
            draw.choice([*STRATEGIES, *AS_PLAIN]),
            [
                (draw.choice([by_itself, by_itself, by_itself, on_a_thread]), draw.choice([*AS_IN_PLAIN]))
                for _ in range(draw.randint(4, 14))
            ],
        )
        for _ in range(count)
    ]


def odd_sequences(count: int, seed: int) -> list[Sequence]:
    """Draw sequences with calls that come back into the job, that are refused, or that come after the end."""
    draw = random.Random(seed)
    found: list[Sequence] = []
    for _ in range(count):
        before = [(by_itself, draw.choice([*AS_IN_PLAIN])) for _ in range(draw.randint(0, 5))]
        odd = [
            (draw.choice([by_itself, on_a_thread, *INSIDE, *INSIDE]), draw.choice([*CALLS]))
            for _ in range(draw.randint(1, 2))
        ]
        after = [(by_itself, draw.choice([*AS_IN_PLAIN])) for _ in range(draw.randint(1, 3))]
        found.append((draw.choice(STRATEGIES), [*before, *odd, *after]))
    return found


def said(case: Sequence) -> str:
    return f"{case[0]}: " + ", ".join(f"{call} {where.__name__}" for where, call in case[1])


def check(case: Sequence, folder: Path, rank: int = 0, *, as_plain: bool = False) -> bool:
    """Return whether the sequence came to its end; compare with the plain loop where it is `as_plain`."""
    job = Job(case[0], folder, rank)
    error = None
    try:
        for where, call in case[1]:
            where(job, CALLS[call])
        job.parallel.finish()
        job.plain.commit()
    except StrettoError as raised:
        error = raised
    if error is not None:
        assert len(str(error).splitlines()) == 1, (said(case), str(error))
        # The job has ended, or can still be finished.
        with contextlib.suppress(Finished):
            job.parallel.finish()
        with pytest.raises(Finished):
            job.parallel.backward(torch.ones((), requires_grad=True))
    elif as_plain and case[0] in AS_PLAIN:
        pairs = zip(job.model.parameters(), job.plain.model.parameters(), strict=True)
        assert [
            (one, other) for one, other in pairs if not torch.allclose(one, other, rtol=1e-05, atol=1e-07)
        ] == [], said(case)
        assert job.parallel.steps == job.plain.steps, said(case)
    assert [one for one in job.model.parameters() if not one.isfinite().all()] == [], said(case)
    return error is None


def test_calls_that_a_plain_loop_has_too_come_to_what_it_comes_to(tmp_path: Path) -> None:
    cases = plain_sequences(len(draws(100)), seed=FIRST_SEED)
    ended = [check(case, tmp_path / str(index), as_plain=True) for index, case in enumerate(cases)]
    assert sum(ended) > len(cases) / 3


def test_calls_out_of_order_end_well_or_in_one_line(tmp_path: Path) -> None:
    """Some come from inside the job's own calls: its hooks, callbacks, loaders and schedules."""
    for index, case in enumerate(odd_sequences(len(draws(120)), seed=FIRST_SEED + 1)):
        check(case, tmp_path / str(index))


def of_two_ranks(rank: int, folder: str) -> None:
    cases = [
        *odd_sequences(len(draws(24)), seed=FIRST_SEED + 2),
        *plain_sequences(len(draws(12)), seed=FIRST_SEED + 3),
    ]
    for index, case in enumerate(cases):
        check(case, Path(folder, str(index)), rank)


def test_on_two_ranks_too(tmp_path: Path) -> None:
    run_ranks(2, of_two_ranks, str(tmp_path))
