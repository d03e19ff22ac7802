"""The files of `examples/cluster` are whole, and their commands are ones that `stretto` accepts."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stretto_lab.cli.options import parse_options
from stretto_lab.train.configuration import RunConfig
from tests.docs.pages import ROOT, code_blocks

FILES = ROOT / "examples" / "cluster"
SCRIPTS = FILES / "train.sbatch", FILES / "sharded.sbatch"


def pytorch_job(name: str = "pytorchjob") -> dict[str, Any]:
    return yaml.safe_load((FILES / f"{name}.yaml").read_text())


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        container
        for replica in job["spec"]["pytorchReplicaSpecs"].values()
        for container in replica["template"]["spec"]["containers"]
    ]


def words_of(line: str) -> list[str]:
    """The words behind `stretto` in a line of a shell script."""
    return shlex.split(line.partition("stretto ")[2])


def slurm_command(script: Path) -> list[str]:
    (line,) = [line for line in script.read_text().splitlines() if line.startswith("srun ")]
    return words_of(line)


COMMANDS = [
    *map(slurm_command, SCRIPTS),
    *(container["command"][1:] for container in containers(pytorch_job())),
    *(words_of(container["args"][0]) for container in containers(pytorch_job("sharded"))),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_begins_a_run_in_a_folder_and_can_be_given_again_to_go_on(words: list[str]) -> None:
    command, *rest = words
    assert command == "train"
    _, run = parse_options("train", rest, lambda task: RunConfig(task=task))
    assert run.run_dir
    assert run.resume


def test_the_lines_that_the_page_names_for_editing_stand_in_the_script() -> None:
    (block,) = code_blocks(ROOT / "docs" / "clusters.md", "tests/cluster/test_files.py")
    lines = block.splitlines()
    assert len(lines) == 4
    assert set(lines) <= set((FILES / "train.sbatch").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_slurm_script_is_a_shell_script_with_as_many_tasks_as_ranks_on_a_node(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in script.read_text().splitlines()
        if line.startswith("#SBATCH --")
    )
    words = slurm_command(script)
    option = "--shard" if "--shard" in words else "--ranks-per-node"
    assert words[words.index(option) + 1] == asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert "requeue" in asked


def test_a_pod_of_shards_is_a_node_of_torchruns() -> None:
    job = pytorch_job("sharded")
    pods = sum(replica["replicas"] for replica in job["spec"]["pytorchReplicaSpecs"].values())
    for container in containers(job):
        words = container["args"][0].split()
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert container["command"] == ["sh", "-c"]
        assert words[words.index("--nnodes") + 1] == str(pods)
        assert words[words.index("--nproc-per-node") + 1] == words[words.index("--shard") + 1] == str(gpus)


@pytest.mark.parametrize("name", ["pytorchjob", "sharded"])
def test_a_kubernetes_file_has_what_a_pytorch_job_requires_and_a_folder_that_its_pods_share(
    name: str,
) -> None:
    job = pytorch_job(name)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1  # the operator refuses another number
    assert replicas["Worker"]["replicas"] >= 1
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator gives its variables to no other
        (mount,) = container["volumeMounts"]
        assert mount["name"] in {
            one["name"] for one in pod["volumes"] if one["persistentVolumeClaim"]["claimName"]
        }
        words = [*container["command"], *container.get("args", [""])[0].split()]
        assert words[0] in ("stretto", "sh")
        assert words[words.index("--run-dir") + 1].startswith(mount["mountPath"])
