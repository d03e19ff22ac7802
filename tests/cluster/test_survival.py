"""Launchers under which ranks survive: the commands of docs/survive.md, and the files that it names."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
with_slurm = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch", "scancel"))),
    reason="needs Linux, root and Slurm with munge (slurm-wlm)",
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


class Slurm:
    """Slurm on this machine alone, with all that it writes in a folder; a context in which it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.variables = {**VARIABLES, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        folder, host = self._folder, os.uname().nodename
        socket, key = folder / "munge.socket", folder / "munge.key"
        key.write_bytes(bytes(range(128)))
        for path, mode in ((key, 0o400), (folder, 0o755)):
            path.chmod(mode)
        (folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=36817
SlurmdPort=36818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        places = [f"--{name}={folder}/munge.{name}" for name in ("log-file", "pid-file", "seed-file")]
        self._start("munged", "--foreground", "--force", f"--socket={socket}", f"--key-file={key}", *places)
        until(socket.exists, "munge")
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D")
        until(
            lambda: "idle" in self.asked("sinfo", "-h", "-o", "%T"), "a node of Slurm", *folder.glob("*.out")
        )
        return self

    def _start(self, *words: str) -> None:
        with (self._folder / f"{words[0]}.out").open("w") as log:
            process = subprocess.Popen(words, env=self.variables, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def asked(self, *words: str) -> str:
        """What a command of Slurm prints."""
        return subprocess.run(
            words, env=self.variables, capture_output=True, text=True, cwd=self._folder
        ).stdout

    def __exit__(self, *_: object) -> None:
        self.asked("scancel", "--user=root")
        until(lambda: not self.asked("squeue", "-h"), "the end of all jobs")
        self._stack.close()


@pytest.mark.long
@with_slurm
def test_the_batch_script_goes_on_when_a_task_is_killed(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with Slurm(tmp_path) as slurm:
        size = ("--nodes=1", "--ntasks-per-node=3", "--cpus-per-task=1")
        told = slurm.asked("sbatch", *size, "examples/cluster/survive.sbatch", *WITHOUT_END.split())
        job = told.split()[-1]
        log = tmp_path / f"stretto-survive-{job}.log"
        until(says(log, r"term 0: seats \[0, 1, 2\]"), "the first term", log)
        until(says(log, "update 100:"), "updates", log)
        kill(programs("SLURM_PROCID=1") & programs(f"SLURM_JOB_ID={job}"))
        until(says(log, r"seats \[0, 2, 3\]"), "a process in the place of the killed one", log)
        assert slurm.asked("squeue", "-h", "-o", "%T").split() == ["RUNNING"]


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
