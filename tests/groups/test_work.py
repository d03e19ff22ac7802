"""Works that complete late, over a work that a test completes by hand."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from stretto.groups.collective_group import CompletedWork
from stretto.groups.followed import FollowedWork
from stretto.groups.throttled import LateWork

MOMENT = timedelta(milliseconds=10)


def running() -> tuple[Future[Any], LateWork]:
    """A collective under way: it ends with the list that the future is given, or fails with an exception."""
    collective: Future[Any] = Future()
    return collective, LateWork(_create_work_from_future(collective.then(outcome)))


def outcome(future: Future[Any]) -> list[torch.Tensor]:
    if isinstance(future.value(), Exception):
        raise future.value()
    return future.value()


def test_work_is_complete_when_it_has_run_and_its_bytes_have_arrived() -> None:
    collective, work = running()
    result = [torch.ones(2)]
    collective.set_result(result)
    assert not work.is_completed()
    work.advance()
    assert work.is_completed()
    assert work.is_success()
    assert work.wait() is True
    assert work.get_future().value() == result


def test_bytes_that_arrive_first_wait_for_the_collective() -> None:
    collective, work = running()
    work.advance()
    assert not work.is_completed()
    collective.set_result([])
    assert work.wait(MOMENT) is True


def test_an_error_completes_the_work_at_once_and_is_raised_by_every_wait() -> None:
    collective, work = running()
    collective.set_result(RuntimeError("connection closed by peer"))
    assert work.is_completed()
    assert not work.is_success()
    for wait in (work.wait, work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            wait()
    work.advance()  # bytes that arrive after the failure change nothing
    assert isinstance(work.exception(), RuntimeError)


def test_work_without_a_future_completes_late_too() -> None:
    for result in ([], RuntimeError("connection reset")):
        collective: Future[Any] = Future()
        work = LateWork(WithoutFuture(collective.then(outcome)))
        work.advance()
        assert not work.is_completed()
        collective.set_result(result)
        raises = pytest.raises(RuntimeError, match="connection reset")
        with raises if isinstance(result, Exception) else nullcontext():
            assert work.wait()


class WithoutFuture(torch.distributed.Work):
    """As torch has it for Gloo's reduce-scatters."""

    def __init__(self, end: Future[Any]) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.end.wait()
        return True


def test_an_error_before_all_ranks_entered_ends_the_work() -> None:
    _, work = running()
    entered: Future[Any] = Future()
    entered.set_result(RuntimeError("rank 1 is gone"))
    work.after(entered.then(outcome), work.advance)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        work.wait()


def test_what_follows_a_collective_is_done_once_however_often_it_is_asked() -> None:
    collective: Future[Any] = Future()
    done: list[str] = []
    work = FollowedWork(_create_work_from_future(collective), lambda: done.append("followed"))
    collective.set_result([torch.ones(2)])
    for ask in (work.wait, work.wait, work.result, work.get_future().wait):
        ask()
    assert done == ["followed"]


def test_completed_work_is_complete() -> None:
    result = [torch.ones(2)]
    work = CompletedWork(result)
    assert work.wait(MOMENT)
    assert work.is_completed()
    assert work.is_success()
    assert work.result() is result
    assert work.get_future().value() == result
