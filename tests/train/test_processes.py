"""Processes that a command starts: nothing outlives the command."""

import contextlib
import functools
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import pytest
from torch._C._distributed_c10d import TCPStore

from stretto.errors import WorkerFailed
from stretto_lab.train.launch import Ranks
from stretto_lab.train.processes import Stops, stops_exit, supervised
from stretto_lab.train.replaced import run_replaced
from stretto_lab.train.workers import RankInfo, host_store
from tests.processes import Command


def tell_and_wait(_: object, number: int) -> None:
    sys.stdout.write(f"{number} runs\n")
    sys.stdout.flush()
    threading.Event().wait()


def wait_for_two() -> None:
    with supervised() as workers:
        for number in (1, 2):
            workers.start(tell_and_wait, number)
        threading.Event().wait()


def test_no_process_outlives_a_command_that_is_stopped() -> None:
    with Command(function=wait_for_two) as command:
        started = {command.stdout.readline(), command.stdout.readline()}
        os.kill(command.pid, signal.SIGTERM)
        # The processes write to the same pipe, so it ends when the last of them has.
        rest, _ = command.communicate()
    assert (started, rest) == ({"1 runs\n", "2 runs\n"}, "")
    assert command.returncode == -signal.SIGTERM


def save(pipe: Connection) -> None:
    stops = Stops()
    pipe.send("training")
    waiting = threading.Event()
    while not stops.has_come:  # `signal.pause` would sleep through one that comes between the two
        waiting.wait(0.01)
    pipe.send("saved")


def stop_itself(asked: int) -> None:
    """A command whose process saves after the first signal."""
    with supervised() as workers:
        worker = workers.start(save)
        workers.are_started()
        sys.stdout.write(f"{worker.receive()}\n")
        sys.stdout.flush()
        os.kill(os.getpid(), asked)
        sys.stdout.write(f"{worker.receive()}\n")
        sys.stdout.flush()


def go_on_whatever_comes(asked: int, is_command: bool) -> None:
    """A program that catches everything, as a test runner does."""
    with stops_exit() if is_command else contextlib.nullcontext():
        try:
            stop_itself(asked)
        except BaseException as error:
            sys.stdout.write(f"{type(error).__name__}\n")
    sys.stdout.write("went on\n")
    sys.stdout.flush()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_lets_processes_save_and_ends_a_program_but_a_command_by_its_exit_code(
    number: int,
) -> None:
    for is_command, more, code in ((False, "", -number), (True, "SystemExit\nwent on\n", 0)):
        with Command(function=functools.partial(go_on_whatever_comes, number, is_command)) as program:
            shown, _ = program.communicate()
        assert (shown, program.returncode) == (f"training\nsaved\n{more}", code)


def test_ctrl_c_lets_processes_save_and_is_raised_then() -> None:
    with Command(function=functools.partial(stop_itself, signal.SIGINT)) as command:
        shown, complaint = command.communicate()
    assert shown == "training\nsaved\n"
    assert complaint.endswith("KeyboardInterrupt\n")


def never_save(pipe: Connection) -> None:
    Stops()
    pipe.send("training")
    threading.Event().wait()


def stop_twice(asked: int) -> None:
    with supervised() as workers:
        workers.start(never_save).receive()
        workers.are_started()
        os.kill(os.getpid(), asked)
        sys.stdout.write("still there\n")
        sys.stdout.flush()
        os.kill(os.getpid(), asked)
        sys.stdout.write("never\n")


def test_the_second_stop_signal_ends_all_at_once() -> None:
    with Command(function=functools.partial(stop_twice, signal.SIGTERM)) as command:
        shown, complaint = command.communicate()  # it ends when the last process has
    assert (shown, complaint) == ("still there\n", "")
    assert command.returncode == -signal.SIGTERM


def wait_if_first(info: RankInfo) -> None:
    if info.seat is not None and info.seat < 2:
        tell_and_wait(info, info.seat)


def start_replaced() -> None:
    ranks = Ranks.local(2)  # their store lives as long
    run_replaced(wait_if_first, ranks.of_next_run(), 9, print, lambda *_: None)


def test_workers_that_a_stop_signal_ends_while_they_start_are_not_replaced() -> None:
    with Command(function=start_replaced) as command:
        started = {command.stdout.readline(), command.stdout.readline()}
        os.kill(command.pid, signal.SIGINT)
        shown, complaint = command.communicate()
    assert (started, shown) == ({"0 runs\n", "1 runs\n"}, "")
    assert complaint.endswith("KeyboardInterrupt\n")


def end_with_7(pipe: Connection) -> None:
    os._exit(7)


def test_threads_that_start_processes_hear_how_their_own_have_ended() -> None:
    heard: list[str] = []

    def start_many() -> None:
        with supervised() as workers:
            for _ in range(12):
                with pytest.raises(WorkerFailed) as caught:
                    workers.start(end_with_7).receive()
                heard.append(str(caught.value))

    threads = [threading.Thread(target=start_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["the process ended with exit code 7 and without a result"] * 36


def test_a_store_is_hosted_under_a_name_that_does_not_lead_back_to_this_machine() -> None:
    """As that of a router in front of it: 203.0.113.0/24 is nobody's (RFC 5737)."""
    store = host_store("203.0.113.1", 0)
    TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
