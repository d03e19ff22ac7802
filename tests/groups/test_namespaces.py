"""Workers in network namespaces; needs root and iproute2, without which there is nothing to test."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.namespaces import Namespaces, cores_of, remove_orphans
from stretto.errors import ConfigError

as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None,
    reason="needs Linux, root and iproute2",
)


def own_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.startswith(f"stretto-{os.getpid()}-")]


@as_root
def test_each_worker_has_a_place_and_an_interface_and_nothing_stays(tmp_path: Path) -> None:
    with Namespaces(2, "100mbit") as spaces:
        before = spaces.sent_bytes()
        script = (
            f'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR by $GLOO_SOCKET_IFNAME" > {tmp_path}/$LOCAL_RANK'
        )
        assert spaces.run(["sh", "-c", f"{script}; tc qdisc show dev eth0 >> {tmp_path}/$LOCAL_RANK"]) == [
            0,
            0,
        ]
        assert [
            (later, earlier)
            for later, earlier in zip(spaces.sent_bytes(), before, strict=True)
            if not later >= earlier
        ] == []
        assert len(own_namespaces()) == 3
    for rank in range(2):
        place, bucket = (tmp_path / str(rank)).read_text().splitlines()
        assert place == f"{rank} of 2 at 10.77.0.1 by eth0"
        assert "tbf" in bucket
        assert "rate 100Mbit" in bucket
    assert own_namespaces() == []


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ({0, 1}, 2, [[0], [1]]),
        ({0, 1}, 4, [[0], [1], [0], [1]]),
        ({2, 3, 5, 7, 8}, 2, [[2, 3], [5, 7]]),
        ({4}, 2, [[4], [4]]),
    ],
)
def test_workers_have_cores_of_their_own_where_there_are_enough(
    cores: set[int], workers: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert [cores_of(rank, workers) for rank in range(workers)] == expected


@as_root
def test_one_direction_may_be_slower_than_all_others(tmp_path: Path) -> None:
    with Namespaces(2, "10mbit/100mbit") as spaces:
        script = f"tc qdisc show dev eth0 > {tmp_path}/$LOCAL_RANK"
        assert spaces.run(["sh", "-c", script]) == [0, 0]
        hub = f"stretto-{os.getpid()}-hub"
        back = subprocess.run(["tc", "-n", hub, "qdisc", "show"], capture_output=True, text=True, check=True)
    rates = [re.findall(r"rate (\w+)", (tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert rates == [["10Mbit"], ["100Mbit"]]
    assert re.findall(r"rate (\w+)", back.stdout) == ["100Mbit", "100Mbit"]


SEND_A_MEGABYTE = """
import os, socket, sys
address, listening = (os.environ["MASTER_ADDR"], 29500), sys.argv[1]
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        open(listening, "w").close()
        with server.accept()[0] as connection:
            while connection.recv(1 << 16): pass
            connection.sendall(b"!")
else:
    open(listening).close()
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(1_000_000))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
"""


@as_root
def test_sockets_are_as_slow_as_asked_and_bytes_are_counted(tmp_path: Path) -> None:
    listening = tmp_path / "listening"
    os.mkfifo(listening)  # opening it for reading waits for the writer
    with Namespaces(2, "20mbit") as spaces:
        before = spaces.sent_bytes()
        begin = time.monotonic()
        assert spaces.run([sys.executable, "-c", SEND_A_MEGABYTE, str(listening)]) == [0, 0]
        seconds = time.monotonic() - begin
        sent = [later - earlier for later, earlier in zip(spaces.sent_bytes(), before, strict=True)]
    # 64 KiB fit into each of the two full buckets at first, the rest passes at the rate.
    assert seconds >= 8 * (1_000_000 - 2 * 65_536) / 20e6
    assert sent[1] > 1_000_000 > sent[0]


@as_root
def test_a_worker_that_fails_ends_the_others() -> None:
    with Namespaces(2, "none") as spaces:
        assert spaces.run(["sh", "-c", 'if [ "$RANK" = 1 ]; then exit 3; else sleep 1000; fi']) == [-9, 3]


@as_root
def test_an_interrupted_context_is_cleaned_up() -> None:
    with pytest.raises(KeyboardInterrupt), Namespaces(2, "none"):
        raise KeyboardInterrupt
    assert own_namespaces() == []


@as_root
def test_namespaces_of_killed_runners_are_removed_by_the_next() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    orphan = f"stretto-{gone.pid}-0"
    subprocess.run(["ip", "netns", "add", orphan], check=True)
    remove_orphans()
    assert (
        orphan
        not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )


@as_root
def test_a_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="have a rate only"):
        Namespaces(2, "100mbit,1ms")
