"""The files of `examples/cluster` are whole, and their commands are ones that `stretto` accepts."""

import shlex
import subprocess
from typing import Any

import pytest
import yaml

from stretto_lab.cli.options import parse_options
from stretto_lab.train.configuration import RunConfig
from tests.docs.pages import ROOT

FILES = ROOT / "examples" / "cluster"
SCRIPT = FILES / "train.sbatch"


def pytorch_job() -> dict[str, Any]:
    return yaml.safe_load((FILES / "pytorchjob.yaml").read_text())


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        container
        for replica in job["spec"]["pytorchReplicaSpecs"].values()
        for container in replica["template"]["spec"]["containers"]
    ]


def words_of(line: str) -> list[str]:
    """The words behind `stretto` in a line of a shell script."""
    return shlex.split(line.partition("stretto ")[2])


def slurm_commands() -> list[list[str]]:
    return [words_of(line) for line in SCRIPT.read_text().splitlines() if line.startswith("srun ")]


COMMANDS = [*slurm_commands(), *(container["command"][1:] for container in containers(pytorch_job()))]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_begins_a_run_in_a_folder_and_can_be_given_again_to_go_on(words: list[str]) -> None:
    command, *rest = words
    assert command == "train"
    _, run = parse_options("train", rest, lambda task: RunConfig(task=task))
    assert run.run_dir
    assert run.resume


def test_the_slurm_script_is_a_shell_script_with_as_many_tasks_as_ranks_on_a_node() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in SCRIPT.read_text().splitlines()
        if line.startswith("#SBATCH --")
    )
    (words,) = slurm_commands()
    assert words[words.index("--ranks-per-node") + 1] == asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert "requeue" in asked


def test_the_kubernetes_file_has_what_a_pytorch_job_requires() -> None:
    job = pytorch_job()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1  # the operator refuses another number
    assert replicas["Worker"]["replicas"] >= 1
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    for container in containers(job):
        assert container["name"] == "pytorch"  # the operator gives its variables to no other
        assert container["command"][0] == "stretto"


def test_the_pods_of_the_kubernetes_file_share_the_folder_of_the_run() -> None:
    for replica in pytorch_job()["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        claims = {volume["name"] for volume in pod["volumes"] if volume["persistentVolumeClaim"]["claimName"]}
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        assert mount["name"] in claims
        assert container["command"][container["command"].index("--run-dir") + 1].startswith(
            mount["mountPath"]
        )
