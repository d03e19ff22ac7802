"""Public calls in any order, from anywhere: each ends right, or in one line of the library's errors."""

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint
from stretto.errors import Finished, StrettoError
from tests.draws import FIRST_SEED, draws
from tests.processes import run_ranks

STRATEGIES: dict[str, Callable[[], Any]] = {
    "zero1": st.ZeRO1,
    "ddp": st.DDP,
    "acco": st.ACCO,
    "wp": st.WeightPrediction,
    "dpu": st.DPU,
    "local": lambda: st.LocalSGD(rate=0.5),
    "diloco": lambda: st.DiLoCo(interval=2),
}
AS_PLAIN = ("zero1", "ddp")
"""Strategies under which every sequence of calls has a plain loop that it equals."""
MICRO_BATCHES = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


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
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
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
        momenta = [dict(self.optimizer.state[one]) for one in self.model.parameters()]
        copies = [{key: value.clone() for key, value in one.items()} for one in momenta]
        self.saved = [one.detach().clone() for one in self.model.parameters()], copies, self.steps

    def load(self) -> None:
        values, momenta, self.steps = self.saved
        for parameter, value, state in zip(self.model.parameters(), values, momenta, strict=True):
            parameter.data.copy_(value)
            self.optimizer.state[parameter] = {key: one.clone() for key, one in state.items()}


class Job:
    """A job, its data, and the plain loop that does the same."""

    def __init__(self, strategy: str, folder: Path, rank: int = 0) -> None:
        self.model, self.schedule, self.plain, self.folder = network(), Turned(), Plain(), folder
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parallel = st.DataParallel(
            self.model,
            self.optimizer,
            STRATEGIES[strategy](),
            micro_batches=MICRO_BATCHES,
            scheduler=self.schedule,
            options=st.Options(timeout_seconds=60),
        )
        self._draws = torch.Generator().manual_seed(1 + rank)

    def batch(self) -> Tensor:
        return torch.randn(4, 4, generator=self._draws)

    def loss(self, batch: Tensor) -> Tensor:
        output: Tensor = self.model(batch)
        return output.square().mean()


# Calls that a plain loop has too


def backward(job: Job) -> None:
    batch = job.batch()
    job.parallel.backward(job.loss(batch))
    job.plain.micro_batch(batch)


def weighed(job: Job) -> None:
    batch = job.batch()
    job.parallel.backward(job.loss(batch), weight=3.0)
    job.plain.micro_batch(batch, 3.0)


def micro_batch(job: Job) -> None:
    batch = job.batch()
    job.parallel.micro_batch(job.loss, batch)
    job.plain.micro_batch(batch)


def counted(job: Job) -> None:
    batch = job.batch()
    job.loss(batch).backward()
    job.parallel.count_micro_batch(loss=torch.ones(()))
    job.plain.micro_batch(batch)


def counted_as_nothing(job: Job) -> None:
    job.parallel.count_micro_batch(0.0)
    job.plain.micro_batch(job.batch(), 0.0)


def looked_at(job: Job) -> None:
    with torch.no_grad():
        job.loss(job.batch())


def looked_at_settled(job: Job) -> None:
    with job.parallel.settled():
        job.model.state_dict()


def dropped_graph(job: Job) -> None:
    job.loss(job.batch())


def own_gradients(job: Job) -> None:
    torch.autograd.grad(job.loss(job.batch()), list(job.model.parameters()))


def discard(job: Job) -> None:
    job.parallel.discard()


def commit(job: Job) -> None:
    job.parallel.commit()
    job.plain.commit()


def fed(job: Job) -> None:
    for batch in job.parallel.feed([job.batch() for _ in range(3)]):
        job.parallel.backward(job.loss(batch))
        job.plain.micro_batch(batch)
    job.plain.commit()


def left(job: Job) -> None:
    for batch in job.parallel.feed([job.batch() for _ in range(4)]):
        job.parallel.backward(job.loss(batch))
        job.plain.micro_batch(batch)
        break


def saved(job: Job) -> None:
    checkpoint.save(job.parallel, job.folder)
    job.plain.save()


def loaded(job: Job) -> None:
    if job.plain.saved is not None:
        checkpoint.load(job.parallel, job.folder)
        job.plain.load()


def taken_and_loaded(job: Job) -> None:
    job.parallel.load_state_dict(job.parallel.state_dict())


# Calls that a job refuses, or that end it


def zero_grad(job: Job) -> None:
    job.optimizer.zero_grad()


def step(job: Job) -> None:
    job.optimizer.step()


def stop(job: Job) -> None:
    job.parallel.stop()


def finish(job: Job) -> None:
    job.parallel.finish()
    job.plain.commit()


def leave(job: Job) -> None:
    job.parallel.leave()


def fail(job: Job) -> None:
    job.parallel.fail(ValueError("given up"))


def wrapped_again(job: Job) -> None:
    st.DataParallel(job.model, torch.optim.SGD(job.model.parameters(), lr=0.1))


def trained_settled(job: Job) -> None:
    with job.parallel.settled():
        backward(job)


def fed_inside(job: Job) -> None:
    for _ in job.parallel.feed([job.batch() for _ in range(3)]):
        fed(job)


AS_IN_PLAIN = (
    *(backward, backward, weighed, micro_batch, counted, counted_as_nothing, looked_at, looked_at_settled),
    *(dropped_graph, own_gradients, discard, commit, fed, left, saved, loaded, taken_and_loaded),
)
OTHERS = (zero_grad, step, stop, finish, leave, fail, wrapped_again, trained_settled, fed_inside)

# Where a call may stand

Call = Callable[[Job], None]


def by_itself(job: Job, call: Call) -> None:
    call(job)


def on_a_thread(job: Job, call: Call) -> None:
    """The caller waits for it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call(job)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def between(job: Job, call: Call) -> None:
    """Between a forward pass and its backward pass."""
    loss = job.loss(job.batch())
    call(job)
    job.parallel.backward(loss)


def in_loss_function(job: Job, call: Call) -> None:
    def loss_function(batch: Tensor) -> Tensor:
        call(job)
        return job.loss(batch)

    job.parallel.micro_batch(loss_function, job.batch())


def in_forward_pass(job: Job, call: Call) -> None:
    handle = job.model[0].register_forward_hook(lambda *_: (handle.remove(), call(job), None)[-1])
    job.parallel.backward(job.loss(job.batch()))


def in_backward_pass(job: Job, call: Call) -> None:
    @torch.enable_grad()
    def hook(_: Tensor) -> None:
        handle.remove()
        call(job)

    handle = job.model[0].weight.register_hook(hook)
    job.parallel.backward(job.loss(job.batch()))


def in_schedule(job: Job, call: Call) -> None:
    def turned() -> None:
        job.schedule.call = lambda: None
        call(job)

    job.schedule.call = turned


def in_settled(job: Job, call: Call) -> None:
    with job.parallel.settled():
        call(job)


def in_body(job: Job, call: Call) -> None:
    for index, batch in enumerate(job.parallel.feed([job.batch() for _ in range(4)])):
        if index == 1:
            call(job)
        job.parallel.backward(job.loss(batch))


def in_loader(job: Job, call: Call) -> None:
    def loader() -> Any:
        yield job.batch()
        call(job)
        yield job.batch()

    for batch in job.parallel.feed(loader()):
        job.parallel.backward(job.loss(batch))


def in_on_update(job: Job, call: Call) -> None:
    calls = [call]

    def on_update(_: st.Update) -> None:
        if calls:
            calls.pop()(job)

    for batch in job.parallel.feed([job.batch() for _ in range(4)], on_update=on_update):
        job.parallel.backward(job.loss(batch))


INSIDE = (
    *(between, in_loss_function, in_forward_pass, in_backward_pass, in_schedule, in_settled, in_body),
    *(in_loader, in_on_update),
)
Sequence = tuple[str, list[tuple[Callable[[Job, Call], None], Call]]]


def plain_sequences(count: int, seed: int) -> list[Sequence]:
    """Draw sequences that a plain loop can follow."""
    draw = random.Random(seed)
    return [
        (
            draw.choice([*STRATEGIES, *AS_PLAIN]),
            [
                (draw.choice([by_itself, by_itself, by_itself, on_a_thread]), draw.choice(AS_IN_PLAIN))
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
        before = [(by_itself, draw.choice(AS_IN_PLAIN)) for _ in range(draw.randint(0, 5))]
        odd = [
            (draw.choice([by_itself, on_a_thread, *INSIDE, *INSIDE]), draw.choice([*AS_IN_PLAIN, *OTHERS]))
            for _ in range(draw.randint(1, 2))
        ]
        after = [(by_itself, draw.choice(AS_IN_PLAIN)) for _ in range(draw.randint(1, 3))]
        found.append((draw.choice([*STRATEGIES]), [*before, *odd, *after]))
    return found


def said(case: Sequence) -> str:
    return f"{case[0]}: " + ", ".join(f"{call.__name__} {where.__name__}" for where, call in case[1])


def run(job: Job, case: Sequence) -> StrettoError | None:
    """Do the calls, then finish; return what has ended it."""
    try:
        for where, call in case[1]:
            where(job, call)
        job.parallel.finish()
        job.plain.commit()
    except StrettoError as error:
        return error
    return None


def check(case: Sequence, folder: Path, rank: int = 0) -> bool:
    """Return whether the sequence came to its end."""
    job = Job(case[0], folder, rank)
    error = run(job, case)
    if error is not None:
        told = str(error)
        assert len(told.splitlines()) == 1, (said(case), told)
        # The job has ended, or can still be finished.
        with contextlib.suppress(Finished):
            job.parallel.finish()
        with pytest.raises(Finished):
            job.parallel.backward(torch.ones((), requires_grad=True))
    assert [one for one in job.model.parameters() if not one.isfinite().all()] == [], said(case)
    return error is None


def check_plain(case: Sequence, folder: Path) -> bool:
    """Compare with the plain loop; return whether the sequence came to its end."""
    job = Job(case[0], folder)
    error = run(job, case)
    if error is not None:
        assert len(str(error).splitlines()) == 1, (said(case), str(error))
        return False
    if case[0] in AS_PLAIN:
        pairs = zip(job.model.parameters(), job.plain.model.parameters(), strict=True)
        assert [
            (one, other) for one, other in pairs if not torch.allclose(one, other, rtol=1e-05, atol=1e-07)
        ] == [], said(case)
        assert job.parallel.steps == job.plain.steps, said(case)
    return True


def test_calls_that_a_plain_loop_has_too_come_to_what_it_comes_to(tmp_path: Path) -> None:
    cases = plain_sequences(len(draws(160)), seed=FIRST_SEED)
    ended = [check_plain(case, tmp_path / str(index)) for index, case in enumerate(cases)]
    assert sum(ended) > len(cases) / 3


def test_calls_out_of_order_end_well_or_in_one_line(tmp_path: Path) -> None:
    """Some come from inside the job's own calls: its hooks, callbacks, loaders and schedules."""
    for index, case in enumerate(odd_sequences(len(draws(200)), seed=FIRST_SEED + 1)):
        check(case, tmp_path / str(index))


def of_two_ranks(rank: int, folder: str) -> None:
    cases = [
        *odd_sequences(len(draws(40)), seed=FIRST_SEED + 2),
        *plain_sequences(len(draws(20)), seed=FIRST_SEED + 3),
    ]
    for index, case in enumerate(cases):
        check(case, Path(folder, str(index)), rank)


def test_on_two_ranks_too(tmp_path: Path) -> None:
    run_ranks(2, of_two_ranks, str(tmp_path))
