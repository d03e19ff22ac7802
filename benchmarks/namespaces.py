"""Workers on a slow network: one network namespace per worker, joined by a bridge, behind token buckets.

    worker 0 [eth0] == token bucket ==> [port0]        [port1] <== token bucket == [eth0] worker 1
                    <== token bucket ==        [bridge]        == token bucket ==>

Real sockets are slow here, in both directions, with real headers, acknowledgements and queues. Needs Linux, root and
iproute2:

    python benchmarks/namespaces.py --rate 100mbit --workers 2 -- python train.py

The command runs once per worker, in the environment that torchrun would give it. The bridge is in a namespace too:
nothing of the host changes, and all is gone with the namespaces.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stretto.errors import ConfigError
from stretto.groups import Link

_NAME = re.compile(r"stretto-(\d+)-\w+")
_INTERFACE = "eth0"
_PORT = 29500  # every namespace has all ports to itself
_QUEUE = "100ms"  # packets that would wait longer are dropped; a hundred times the round trip


class Namespaces:
    """A context in which the workers have namespaces; leaving it removes them, whatever happened."""

    def __init__(self, workers: int, rate: str) -> None:
        """Describe the network.

        Args:
            workers: How many, one namespace each.
            rate: Of every worker, in each direction, as "100mbit"; "none" leaves the links as fast as they are.
                "10mbit/100mbit": worker 0 sends at the first rate, all else has the second one.

        Raises:
            ConfigError: The user is not root, iproute2 is missing, or the rate cannot be read.
        """
        if os.geteuid() != 0:
            raise ConfigError(
                "network namespaces need root; without it, use a throttled process group (--link)"
            )
        if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
            raise ConfigError(f"{' and '.join(missing)} not found: install iproute2")
        first, _, second = rate.partition("/")
        self._first_sends, self._link = Link.parse(first), Link.parse(second or first)
        if self._first_sends.latency_seconds or self._link.latency_seconds:
            raise ConfigError(f"the link {rate!r} has a latency; namespaces have a rate only")
        self.workers = workers
        self._hub = f"stretto-{os.getpid()}-hub"
        self.spaces = [f"stretto-{os.getpid()}-{rank}" for rank in range(workers)]
        """Names of the namespaces by worker, for `ip netns`."""

    def __enter__(self) -> Self:
        remove_orphans()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, ranks_per_node: int = 1
    ) -> list[int]:
        """Run `command` once per worker, each on cores of its own, and wait; when one fails, the others are killed.

        Without cores of their own, some virtual machines keep two workers that wait for each other on one core.

        Args:
            command: Program and arguments.
            environment: Variables beside those of this process; what torchrun sets comes last.
            ranks_per_node: With more than one, each worker is a node, and torchrun starts so many of a Python program.

        Returns:
            Exit codes by worker, as `subprocess` gives them.
        """
        if ranks_per_node > 1:  # torchrun is told of its place as a rank is
            place = "--nnodes $WORLD_SIZE --node-rank $RANK --master-addr $MASTER_ADDR --master-port 29501"
            torchrun = (
                f"exec {sys.executable} -m torch.distributed.run --nproc-per-node {ranks_per_node} {place}"
            )
            command = ["bash", "-c", f"{torchrun} {shlex.join(command[1:])}"]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, space in enumerate(self.spaces):
                place = {**os.environ, **(environment or {}), **self._place(rank)}
                place.setdefault("OMP_NUM_THREADS", "1")
                inside = ["ip", "netns", "exec", space, *command]
                cores = cores_of(rank, self.workers)
                processes.append(
                    subprocess.Popen(
                        inside,
                        env=place,
                        start_new_session=True,
                        preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
                    )
                )
            _wait_for_all_or_a_failure(processes)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return [process.wait() for process in processes]

    def sent_bytes(self) -> list[int]:
        """Bytes that each worker's interface has sent so far, headers and acknowledgements included."""
        return [
            json.loads(_output("ip", "-n", space, "-s", "-j", "link", "show", _INTERFACE))[0]["stats64"][
                "tx"
            ]["bytes"]
            for space in self.spaces
        ]

    def _place(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "NCCL_SOCKET_IFNAME": _INTERFACE,
        }

    def _build(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for rank, space in enumerate(self.spaces):
            port = f"port{rank}"
            _run("ip", "netns", "add", space)
            _run(
                "ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", _INTERFACE, "netns", space
            )
            _run("ip", "-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "address", "add", f"{_address(rank)}/16", "dev", _INTERFACE)
            _run("ip", "-n", space, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _slow_down(space, _INTERFACE, self._first_sends if rank == 0 else self._link)
            _slow_down(self._hub, port, self._link)

    def _remove(self) -> None:
        for space in (*self.spaces, self._hub):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _slow_down(space: str, interface: str, link: Link) -> None:
    """Put a token bucket on what leaves `interface`; the bucket holds a millisecond or one large segment."""
    bits = link.bits_per_second
    if bits is not None:
        burst = max(96 * 1024, int(bits / 8 / 1000))
        bucket = ["tbf", "rate", f"{int(bits)}bit", "burst", f"{burst}b", "latency", _QUEUE]
        _run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *bucket)


def cores_of(rank: int, workers: int) -> list[int]:
    """Return a worker's equal share of the cores that this process may use; one core of several workers' at least."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    return cores[rank * each : (rank + 1) * each] or [cores[rank % len(cores)]]


def compare_behind(
    rate: str, arms: Sequence[str], out: Path, *options: str, ranks_per_node: int = 1
) -> dict[str, Any]:
    """Run `stretto compare stdlib-gpt` on two workers, or two nodes, behind links of `rate`.

    Args:
        rate: As of `Namespaces`.
        arms: What is compared.
        out: Folder for compare.json.
        options: Further words of the command line.
        ranks_per_node: Workers that share a link.

    Returns:
        What compare.json holds.
    """
    command = [sys.executable, "-m", "stretto", "compare", "stdlib-gpt", "--strategies", ",".join(arms)]
    with Namespaces(2, rate) as network:
        codes = network.run([*command, "--out", str(out), *options], ranks_per_node=ranks_per_node)
    if any(codes):
        raise SystemExit(f"a worker failed: exit codes {codes}")
    return json.loads((out / "compare.json").read_text())


def remove_orphans() -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for space in _output("ip", "netns", "list").split():
        if (match := _NAME.fullmatch(space)) and not os.path.exists(f"/proc/{match[1]}"):
            # Another runner may remove it at the same time.
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _wait_for_all_or_a_failure(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    with selectors.DefaultSelector() as ends:
        for process in processes:
            ends.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
        while ends.get_map():
            for key, _ in ends.select():
                ends.unregister(key.fileobj)
                os.close(key.fd)
                if key.data.wait() != 0:
                    return


def _address(rank: int) -> str:
    return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Run the command once per worker; return the exit code of the first failure, or 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate",
        default="100mbit",
        help="of every worker, in each direction; 'none' for no limit; A/B: worker 0 sends at A, all else is B",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `with` blocks end
    with Namespaces(options.workers, options.rate) as spaces:
        before = spaces.sent_bytes()
        codes = spaces.run(options.command)
        for rank, (first, last) in enumerate(zip(before, spaces.sent_bytes(), strict=True)):
            print(f"rank {rank}: exit code {codes[rank]}, {last - first:,} bytes sent", file=sys.stderr)
    return next((code for code in codes if code > 0), next((128 - code for code in codes if code < 0), 0))


if __name__ == "__main__":
    sys.exit(main())
