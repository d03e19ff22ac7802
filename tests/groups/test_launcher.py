"""What launchers say by environment variables is read alike for a loop of one's own and for the command line."""

import pytest
import torch

from stretto.errors import ConfigError
from stretto.groups import join_launched_group, launched_rank, local_device, meeting_point
from stretto_lab.cli import main
from stretto_lab.cli.environment import find_ranks, is_joined

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.77.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "7"}


def read(variables: dict[str, str]) -> tuple[int, int, int, int] | None:
    found = launched_rank(variables)
    return found and (found.rank, found.world_size, found.local_rank, found.local_world_size)


def test_ranks_are_read_from_torchrun_and_from_srun_and_torchrun_within_srun_counts() -> None:
    assert read(TORCHRUN) == (3, 4, 1, 2)
    assert read(SRUN) == (5, 7, 1, 2)
    assert read({**SRUN, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}) == (6, 7, 0, 1)
    assert read({**SRUN, **TORCHRUN}) == (3, 4, 1, 2)


def test_a_batch_script_and_a_step_of_one_task_are_no_launcher() -> None:
    assert read({}) is None
    assert read(BATCH_STEP) is None
    assert read({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}) is None


def test_the_command_line_takes_the_rank_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert is_joined()
    ranks = find_ranks(workers=2)
    assert (ranks.world_size, ranks.is_first) == (7, False)


def test_what_is_missing_is_named_to_a_loop_and_to_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    said = "rank 5 of 7, started by a launcher: MASTER_ADDR and MASTER_PORT not set"
    with pytest.raises(ConfigError, match=said):
        join_launched_group(torch.device("cpu"))
    assert main(["train", "digits-resnet", "--run-dir", "run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"RANK": "first"}, {"WORLD_SIZE": ""}])
def test_a_variable_that_is_no_number_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected RANK and WORLD_SIZE"):
        launched_rank({**TORCHRUN, **changes})


def test_restarts_on_the_store_of_the_ranks_before_are_refused() -> None:
    rank = launched_rank(TORCHRUN)
    assert rank is not None
    assert meeting_point(rank, TORCHRUN) == ("10.77.0.1", 29500)
    restarting = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(ConfigError, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"):
        meeting_point(rank, restarting)
    own_store = {**restarting, "TORCHELASTIC_USE_AGENT_STORE": "False"}  # as torchrun says it then
    assert meeting_point(rank, own_store) == ("10.77.0.1", 29500)


SECOND_OF_NODE = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
}
FOURTH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "found", "expected"),
    [
        ({}, 0, "cpu"),
        ({}, 2, "cuda:0"),
        ({**FOURTH, "LOCAL_RANK": "1"}, 2, "cuda:1"),
        ({**SECOND_OF_NODE, "SLURM_LOCALID": "1"}, 2, "cuda:1"),
        ({**SECOND_OF_NODE, "SLURM_LOCALID": "1"}, 8, "cuda:1"),
        ({**SECOND_OF_NODE, "SLURM_LOCALID": "1"}, 0, "cpu"),
        (
            {**SECOND_OF_NODE, "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "5"},
            1,
            "cuda:0",
        ),  # --gpus-per-task=1
        ({**SECOND_OF_NODE, "SLURM_LOCALID": "1"}, 1, "rank 3: number 1 of 2 ranks of this node"),
        ({**FOURTH, "LOCAL_RANK": "1"}, 1, "expected one for each"),
    ],
)
def test_ranks_of_a_node_take_its_devices_in_order(
    variables: dict[str, str], found: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("os.environ", variables)
    if expected.startswith(("cpu", "cuda")):
        device = local_device()
        assert str(device) == expected
        assert chosen == ([device] if device.type == "cuda" else [])
    else:
        with pytest.raises(ConfigError, match=expected):
            local_device()
