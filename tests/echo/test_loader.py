"""What an echoed loader is to the loop around it: the same batches, errors that surface, nothing left behind."""

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from stretto import Bernoulli, EchoLoader, EchoOptions, Even, Ready, errors
from stretto.echo import Plan
from tests.echo.sources import Numbers, Squares, Stream, Tap


class Augmented(Squares):
    """Draws a number for every sample."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(3)


class Stuck(Squares):
    """From its second sample on it never answers."""

    def __init__(self) -> None:
        super().__init__(8)
        self.is_asked = multiprocessing.Event()

    def __getitem__(self, index: int) -> Tensor:
        if index > 0:
            self.is_asked.set()
            threading.Event().wait()
        return super().__getitem__(index)


OF_OTHERS: set[threading.Thread] = set()
"""Threads of tests in other files: a pass that an exception has left lives as long as its traceback."""


def readers() -> list[threading.Thread]:
    threads = [thread for thread in threading.enumerate() if thread.name == "stretto-reader"]
    return [thread for thread in threads if thread not in OF_OTHERS]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Iterator[None]:
    OF_OTHERS.update(readers())
    yield
    if readers():
        gc.collect()
    for thread in readers():
        thread.join()


def loaders() -> dict[str, Callable[[], Any]]:
    return {
        "map": lambda: DataLoader(Squares(23), batch_size=4, shuffle=True),
        "map, augmented": lambda: DataLoader(Augmented(23), batch_size=4, shuffle=True),
        "map, workers": lambda: DataLoader(Squares(23), batch_size=4, shuffle=True, num_workers=2),
        "map, workers that stay": lambda: DataLoader(
            Squares(23), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
        ),
        "iterable": lambda: DataLoader(Stream(23), batch_size=4),
        "iterable, worker": lambda: DataLoader(Stream(23), batch_size=4, num_workers=1),
        "list": lambda: list(torch.arange(23).split(4)),
        "generator": lambda: (torch.tensor([number]) for number in range(6)),
    }


@pytest.mark.parametrize("name", loaders())
def test_uses_are_those_of_the_bare_loader_one_after_the_other_to_the_bit(name: str) -> None:
    """Read by the caller, also where loop and data set draw from the same generator."""

    def passes(plan: Plan | None, ahead: int = 0, *, draws: bool = False) -> list[Any]:
        torch.manual_seed(7)
        bare, seen = loaders()[name](), []
        loader = bare if plan is None else EchoLoader(bare, plan, options=EchoOptions(ahead=ahead))
        for _ in range(2):
            for batch in loader:
                seen.append((batch.tolist(), float(torch.rand(())) if draws else None))
        return seen

    assert passes(Even(1), draws=True) == passes(None, draws=True)
    if name != "map, augmented":  # a thread that reads ahead races with the loop
        expected = passes(None)
        assert passes(Even(1), 1) == passes(Bernoulli(1.0), 3) == expected
        assert passes(Even(2), 1) == [batch for batch in expected for _ in range(2)]


# Errors


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_error_of_the_data_set_surfaces_with_its_traceback(ahead: int) -> None:
    data = DataLoader(Squares(20, fails_at=9), batch_size=4)
    loader = EchoLoader(data, Even(2), options=EchoOptions(ahead=ahead))
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 4))) == 4
    with pytest.raises(OSError, match="sample 9 cannot be read") as caught:
        next(batches)
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))


def test_a_worker_that_is_killed_surfaces_at_once() -> None:
    # At its first sample: later, the pipe may break while a batch travels, and PyTorch names that instead.
    data = DataLoader(Squares(20, dies_at=0), batch_size=4, num_workers=1)
    # What PyTorch says when it is told by the signal. Its own polling, every 5 s, finds a worker that "exited".
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* is killed by signal"):
        next(iter(EchoLoader(data, Even(2))))


def test_an_error_under_ready_surfaces_before_another_echo() -> None:
    tap = Tap()
    loader = EchoLoader(tap, Ready(max_uses=1))
    tap.pour("a", OSError("the store is gone"))
    batches = iter(loader)
    assert next(batches) == "a"
    with pytest.raises(OSError, match="the store is gone"):
        next(batches)


def test_an_interrupt_ends_a_wait_for_a_store_that_never_answers() -> None:
    asked, answers = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 1
        asked.wait()
        os.kill(os.getpid(), signal.SIGINT)
        answers.wait()

    batches = iter(EchoLoader(stuck(), Even(1)))
    next(batches)

    def ask() -> None:
        asked.set()
        next(batches)

    with pytest.raises(KeyboardInterrupt):
        ask()
    answers.set()  # only now: an end that waited for the read would never come


# In-place writes


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


def write_view(batch: dict[str, Any]) -> None:
    batch["pair"].inputs.detach()[0].mul_(2)


def write_item(batch: dict[str, Any]) -> None:
    batch["list"][1][0] = 5.0


@pytest.mark.parametrize(
    ("write", "named"), [(write_view, r"batch\['pair'\]\.inputs"), (write_item, r"batch\['list'\]\[1\]")]
)
def test_a_batch_that_is_written_in_place_is_not_used_again(write: Callable[[Any], None], named: str) -> None:
    data = [{"pair": Pair(torch.ones(2), torch.zeros(2)), "list": [torch.ones(1), torch.ones(1)], "id": "x"}]
    batches = iter(EchoLoader(data, Even(3)))
    next(batches)
    write(next(batches))
    with pytest.raises(errors.BatchChanged, match=f"step 2: .*{named}.* written in place 1 times"):
        next(batches)


def test_keys_taken_out_of_a_batch_are_there_again_at_its_next_use() -> None:
    data = [{"inputs": torch.ones(1), "lengths": [1, 2]}]
    places = set()
    for batch in EchoLoader(data, Even(2)):
        assert batch.pop("lengths").pop() == 2
        places.add(batch["inputs"].data_ptr())
    assert len(places) == 1  # uses share their tensors


# Placing and transforming


def test_batches_are_placed_once_and_transformed_at_every_use() -> None:
    placed: list[int] = []

    def place(batch: Tensor) -> Tensor:
        placed.append(int(batch))
        return batch.double()

    def augment(batch: Tensor) -> Tensor:
        return batch + torch.rand(1, dtype=torch.float64)

    uses = list(EchoLoader(Numbers(3), Even(2), place=place, transform=augment))
    assert placed == [0, 1, 2]
    assert [int(use) for use in uses] == [0, 0, 1, 1, 2, 2]
    assert len({float(use) for use in uses}) == 6
    assert {use.dtype for use in uses} == {torch.float64}


def test_a_transform_that_writes_into_its_argument_is_caught() -> None:
    with pytest.raises(errors.BatchChanged):
        list(EchoLoader([torch.ones(2)], Even(2), transform=lambda batch: batch.mul_(2)))


# The loader behind it


def test_attributes_are_those_of_the_loader() -> None:
    data = DataLoader(Squares(8), batch_size=4, shuffle=True)
    loader = EchoLoader(data)
    assert (loader.batch_size, loader.dataset, loader.sampler) == (4, data.dataset, data.sampler)
    with pytest.raises(AttributeError):
        _ = loader.nothing


def test_the_epoch_is_told_to_whoever_wants_to_know_once() -> None:
    class Told(Squares):
        epochs: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = Told(8)
    dataset.epochs = []
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = EchoLoader(DataLoader(dataset, batch_size=2, sampler=sampler))
    loader.set_epoch(3)
    assert (dataset.epochs, sampler.epoch) == ([3], 3)


def test_fresh_batches_uses_and_waits_are_counted() -> None:
    loader = EchoLoader(Numbers(4), Even(2.5))
    uses = [loader.use_index for _ in loader]
    assert uses == [1, 2, 1, 2, 3, 1, 2, 1, 2, 3]
    assert (loader.steps, loader.fresh_batches) == (10, 4)
    assert loader.load_seconds > 0
    assert loader.wait_seconds > 0


# Ends


def test_a_pass_is_left_at_once_and_what_it_has_read_ahead_is_dropped() -> None:
    class Whole:
        def __deepcopy__(self, copies: object) -> "Whole":
            return self

    ahead, is_asked, answers = [Whole(), Whole()], threading.Event(), threading.Event()
    read = weakref.ref(ahead[0])

    def stuck() -> Iterator[Whole]:
        yield ahead.pop()
        yield ahead.pop()
        is_asked.set()
        answers.wait()

    loader = EchoLoader(stuck(), Even(1))
    for _ in loader:
        is_asked.wait()
        break
    gc.collect()
    (thread,) = readers()  # nobody has waited for it
    answers.set()
    thread.join()
    assert read() is None


def test_the_next_pass_waits_until_nobody_reads_the_loader() -> None:
    reads: list[str] = []
    answers = threading.Event()

    class Slow:
        def __iter__(self) -> Iterator[int]:
            reads.append("begins")
            yield 1
            answers.wait()
            reads.append("ends")

    loader = EchoLoader(Slow(), Even(1))
    for _ in loader:
        break
    threading.Timer(0.2, answers.set).start()
    assert list(loader) == [1]
    assert reads == ["begins", "ends", "begins", "ends"]


def test_workers_that_never_answer_end_with_the_pass_that_is_left() -> None:
    data = Stuck()
    batches = iter(EchoLoader(DataLoader(data, num_workers=1), Even(1)))
    next(batches)
    (worker,) = multiprocessing.active_children()
    data.is_asked.wait()
    batches.close()
    assert worker.is_alive()  # nobody has waited for it: PyTorch gives a worker 5 s to end by itself
    worker.join()
    for thread in readers():
        thread.join()


def test_a_second_iterator_ends_the_first_also_between_two_uses() -> None:
    loader = EchoLoader(["a", "b"], Even(3))
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(errors.OutOfTurn, match="closed"):
        next(first)
    assert list(second) == ["a", "a", "b", "b", "b"]


@pytest.mark.parametrize("ahead", [0, 2])
def test_workers_end_with_the_loader_and_are_not_left_to_the_garbage_collector(ahead: int) -> None:
    data = DataLoader(Squares(8), batch_size=4, num_workers=1, persistent_workers=True)
    loader = EchoLoader(data, Even(1), options=EchoOptions(ahead=ahead))
    gc.disable()
    try:
        assert len(list(loader)) == 2
        (worker,) = data._iterator._workers
        del data, loader
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_closing_is_possible_at_any_time_and_again_and_ends_a_wait() -> None:
    tap = Tap()
    loader = EchoLoader(tap, Even(1))
    loader.close()
    tap.pour("a")
    batches = iter(loader)
    next(batches)
    threading.Timer(0.2, loader.close).start()
    with pytest.raises(errors.OutOfTurn, match="closed"):
        next(batches)
    loader.close()
    tap.close()


ABANDONED = """
import threading
from stretto import EchoLoader

def stuck():
    yield 1
    threading.Event().wait()

batches = iter(EchoLoader(stuck()))
print(next(batches))
"""


@pytest.mark.long
def test_a_read_that_never_returns_does_not_keep_the_interpreter() -> None:
    command = [sys.executable, "-W", "always", "-c", ABANDONED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "1\n")
    assert "left behind" not in ended.stderr


def test_no_data_is_an_empty_epoch() -> None:
    assert list(EchoLoader([], Even(2))) == []
