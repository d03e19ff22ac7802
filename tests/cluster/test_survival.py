"""Launchers under which ranks survive: the commands of docs/survive.md, and the files that it names."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from benchmarks.namespaces import Namespaces
from tests.docs.pages import DOCS, ROOT, code_blocks

FILES = ROOT / "examples" / "cluster"
MEET, START = code_blocks(DOCS / "survive.md", "tests/cluster/test_survival.py")
WITHOUT_END = "--updates 100000000 --every 50"
PATIENCE_SECONDS = 480.0
VARIABLES = {
    **os.environ,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "OMP_NUM_THREADS": "1",
}
as_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None,
    reason="needs Linux, root and iproute2",
)


def until(is_so: Callable[[], bool], what: str, *logs: Path) -> None:
    """Wait for something to be so; the logs say why it is not."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > ends:
            raise AssertionError(f"{what} did not come:\n" + "\n".join(log.read_text() for log in logs))
        time.sleep(0.02)


def says(log: Path, pattern: str) -> Callable[[], bool]:
    return lambda: log.exists() and re.search(pattern, log.read_text()) is not None


def programs(variable: str) -> set[int]:
    """The processes that run the loop with a variable of the environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text().split("\0")
            if words[1:2] == ["examples/cluster/survive.py"] and variable in variables:
                found.add(int(folder.name))
    return found


def in_space(space: str) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
    return set(map(int, listed.stdout.split()))


def kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def machines(folder: Path, count: int) -> Iterator[tuple[list[str], list[Path], Callable[[int, str], None]]]:
    """Namespaces as machines; yield their names, what is printed on each, and what starts a command there."""
    logs = [folder / f"{node}.log" for node in range(count)]
    started: list[subprocess.Popen[bytes]] = []
    with Namespaces(count, "none") as network:

        def start(node: int, words: str) -> None:
            command = ["ip", "netns", "exec", network.spaces[node], "bash", "-c", words]
            with logs[node].open("w") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env=VARIABLES, stdout=log, stderr=log))

        try:
            yield network.spaces, logs, start
        finally:
            for space in network.spaces:
                kill(in_space(space))
            for process in started:
                process.wait()


@pytest.mark.long
@as_root
def test_the_commands_for_ssh_go_on_without_those_that_come_again_are_lost_or_are_told_to_leave(
    tmp_path: Path,
) -> None:
    with machines(tmp_path, 4) as (spaces, logs, start):
        start(3, MEET)
        until(says(logs[3], "meeting at"), "the store", logs[3])
        for rank in range(3):
            own = START.replace("RANK=0", f"RANK={rank}", 1)
            start(rank, own.replace("survive.py", f"survive.py {WITHOUT_END}", 1))
        until(says(logs[0], r"term 0: seats \[0, 1, 2\]"), "the first term", *logs)
        until(says(logs[0], "update 100:"), "updates", *logs)
        kill(in_space(spaces[1]) & programs("RANK=1"))
        until(says(logs[0], r"seats \[0, 2, 3\]"), "a process in the place of the killed one", *logs)
        kill(in_space(spaces[2]))
        until(says(logs[0], r"seats \[0, 3\]"), "a term without the machine", *logs)
        for process in in_space(spaces[1]) & programs("RANK=1"):
            os.kill(process, signal.SIGTERM)
        until(says(logs[0], r"seats \[0\]"), "a term without the one that was told to leave", *logs)
        until(lambda: not in_space(spaces[1]), "the end of the loop that had started it", *logs)


def test_the_kubernetes_file_has_a_store_that_no_rank_hosts_and_a_pod_per_rank_that_is_started_again() -> (
    None
):
    service, deployment, job = yaml.safe_load_all((FILES / "survive.yaml").read_text())
    assert [one["kind"] for one in (service, deployment, job)] == ["Service", "Deployment", "Job"]
    (host,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = service["spec"]["ports"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert deployment["spec"]["replicas"] == 1
    command, pod = MEET.split(), job["spec"]["template"]["spec"]
    assert host["command"][:2] == command[:2]
    assert host["command"][host["command"].index("--port") + 1] == str(port["port"])
    (rank,) = pod["containers"]
    assert rank["command"][-1] == f"{service['metadata']['name']}:{port['port']}"
    assert rank["command"][:-1] == START.splitlines()[2].split()[:3]
    assert (job["spec"]["completionMode"], pod["restartPolicy"]) == ("Indexed", "OnFailure")
    told = {one["name"]: one for one in rank["env"]}
    assert "job-completion-index" in told["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert int(told["WORLD_SIZE"]["value"]) == job["spec"]["completions"] == job["spec"]["parallelism"]


def test_the_batch_script_is_a_shell_script_that_keeps_job_and_tasks() -> None:
    script = FILES / "survive.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "#SBATCH --no-kill\n" in text
    assert re.search(r"^srun --no-kill --kill-on-bad-exit=0 ", text, re.MULTILINE)
