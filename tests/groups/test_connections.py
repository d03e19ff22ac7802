"""A job looks at its own connections alone, and leaves them as they are."""

import os
import socket
import sys
from contextlib import ExitStack

import torch
from torch import nn

import stretto
from stretto.groups.connections import connections, listens_at
from tests.processes import run_ranks


def tables_that_a_start_reads(rank: int) -> list[str]:
    opened: list[str] = []
    sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
    model = nn.Linear(3, 2)
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parallel.backward(model(torch.ones(2, 3)).sum())
    parallel.finish()
    return [path for path in opened if path.startswith("/proc") and "/net/" in path]


def test_no_job_reads_the_tables_of_all_connections_of_the_machine() -> None:
    assert run_ranks(2, tables_that_a_start_reads) == [[], []]


def connected(family: socket.AddressFamily, near: str, far: str, stack: ExitStack) -> list[int]:
    """Connect this process to itself; return the descriptors of both ends and the port."""
    listening = stack.enter_context(socket.socket(family))
    if family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listening.bind((near, 0))
    listening.listen()
    port = listening.getsockname()[1]
    one = stack.enter_context(socket.create_connection((far, port)))
    other = stack.enter_context(listening.accept()[0])
    return [one.fileno(), other.fileno(), port]


def test_both_ends_of_a_connection_have_one_name_and_no_other_connection_has_it() -> None:
    with ExitStack() as stack:
        pairs = [connected(socket.AF_INET, "127.0.0.1", "127.0.0.1", stack) for _ in range(5)]
        pairs += [connected(socket.AF_INET6, "::", "127.0.0.1", stack) for _ in range(5)]
        names = {connection.descriptor: connection.name for connection in connections()}
        assert [names[one] for one, _, _ in pairs] == [names[other] for _, other, _ in pairs]
        assert len({names[one] for one, _, _ in pairs}) == len(pairs)
        assert [listens_at(port) for _, _, port in pairs] == [True] * len(pairs)
        named = {connection for connection in connections() if connection.descriptor in pairs[0]}
    assert [connection.is_open for connection in named] == [False, False]


def test_a_look_leaves_connections_as_the_program_has_made_them() -> None:
    """A program's default time-out would make each socket that Python wraps one that does not block."""
    with ExitStack() as stack:
        one, other, _ = connected(socket.AF_INET, "127.0.0.1", "127.0.0.1", stack)
        os.set_blocking(other, False)
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(5)
        assert {one, other} <= {connection.descriptor for connection in connections()}
        assert [os.get_blocking(one), os.get_blocking(other)] == [True, False]
