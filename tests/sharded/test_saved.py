"""Checkpoints of sharded models: one folder, read by any number of nodes and shards, and by plain PyTorch."""

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from stretto import DataParallel, Options, checkpoint
from tests.checkpoint.plainly import read_into
from tests.processes import run_ranks
from tests.sharded.jobs import (
    STRATEGIES,
    WORLD_SIZE,
    Case,
    Network,
    Values,
    adamw,
    batch,
    loss_of,
    mesh_of,
    network,
    shard,
    sharded,
    unsharded,
    whole,
)

SAVED_AT = 2
SHAPES = ((2, 2), (4, 1), (1, 4))


def case_of(name: str) -> Case:
    by_name = {one.name: Case(strategy=one, optimizer=adamw) for one in STRATEGIES}
    packed = Options(bucket_bytes=512, wire="int4", clip_norm=0.5)
    by_name["acco on int4"] = dataclasses.replace(by_name["acco"], options=packed)
    by_name["diloco on int8"] = dataclasses.replace(
        by_name["diloco"], options=dataclasses.replace(packed, wire="int8")
    )
    return by_name[name]


NAMES = ("ddp", "zero1", "wp", "acco on int4", "local", "diloco on int8")
ON_PACKED_WIRE = "acco on int4"
# What PyTorch says of every load in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")


def go_on(model: Network, parallel: DataParallel, rank: int, until: int) -> None:
    """Train until so many updates have been committed; the batches follow from the number of micro-batches."""
    while parallel.steps < until:
        parallel.backward(loss_of(model, batch(rank, parallel.job.compute.num_counted + 10 * parallel.steps)))


def committed(model: nn.Module, parallel: DataParallel) -> Values:
    with parallel.settled():
        return whole(model)


def owed(parallel: DataParallel) -> Tensor:
    """What all ranks have yet to send, of every parameter weighed by its place and added up."""
    total = torch.zeros(len(parallel.job.layout.slots), dtype=torch.float64)
    feedback = parallel.job.exchange.feedback
    if feedback is not None:
        for slot in parallel.job.layout.slots:
            places = torch.arange(slot.offset, slot.offset + slot.numel, dtype=torch.float64)
            total[slot.index] = feedback.state_dict()[slot.name].flatten().double() @ (1 + places).sin()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def saved(rank: int, folder: str) -> dict[str, tuple[Values, Values, Tensor]]:
    """What each strategy has committed and owes at the checkpoint, and what a run ends with that went on."""
    found = {}
    for name in NAMES:
        model, parallel = sharded(case_of(name), 2, 2)
        go_on(model, parallel, rank, SAVED_AT)
        checkpoint.save(parallel, Path(folder, name))
        at_checkpoint, debts = committed(model, parallel), owed(parallel)
        for index in range(6):
            parallel.backward(loss_of(model, batch(rank, 100 + index)))
        parallel.finish()
        found[name] = at_checkpoint, whole(model), debts
    return found


def resumed(rank: int, folder: str) -> dict[str, Values]:
    """The same in new processes, from the checkpoint on."""
    found = {}
    for name in NAMES:
        model, parallel = sharded(case_of(name), 2, 2)
        restored = checkpoint.load(parallel, Path(folder, name))
        assert restored.notes == ()
        for index in range(6):
            parallel.backward(loss_of(model, batch(rank, 100 + index)))
        parallel.finish()
        found[name] = whole(model)
    return found


def elsewhere(rank: int, folder: str) -> dict[str, tuple[Values, Tensor]]:
    """Loaded by other numbers of nodes and shards, and by ranks with whole models."""
    found = {}
    for name in NAMES:
        for nodes, shards in SHAPES[1:]:
            model, parallel = sharded(case_of(name), nodes, shards)
            checkpoint.load(parallel, Path(folder, name))
            found[f"{name} at {nodes} x {shards}"] = committed(model, parallel), owed(parallel)
            go_on(model, parallel, rank, SAVED_AT + 1)
            parallel.finish()
        model, parallel = unsharded(case_of(name))
        checkpoint.load(parallel, Path(folder, name))
        found[f"{name} whole"] = committed(model, parallel), owed(parallel)
        parallel.finish()
    return found


def alone(rank: int, folder: str) -> dict[str, tuple[Values, Tensor]]:
    found = {}
    for name in NAMES:
        model, parallel = unsharded(case_of(name))
        checkpoint.load(parallel, Path(folder, name))
        found[f"{name} alone"] = committed(model, parallel), owed(parallel)
        parallel.finish()
        model, parallel = sharded(case_of(name), 1, 1)
        checkpoint.load(parallel, Path(folder, name))
        found[f"{name} at 1 x 1"] = committed(model, parallel), owed(parallel)
        parallel.finish()
    return found


def differing(found: Values, expected: Values) -> set[str]:
    return {name for name, value in expected.items() if not torch.equal(found[name], value)}


@pytest.mark.long
def test_a_checkpoint_of_shards_goes_on_to_the_bit_and_is_read_everywhere(tmp_path: Path) -> None:
    expected = run_ranks(WORLD_SIZE, saved, str(tmp_path))[0]
    for found in run_ranks(WORLD_SIZE, resumed, str(tmp_path)):
        assert {name: differing(values, expected[name][1]) for name, values in found.items()} == {
            key: set() for key in NAMES
        }
    loaded = {
        **run_ranks(WORLD_SIZE, elsewhere, str(tmp_path))[3],
        **run_ranks(1, alone, str(tmp_path))[0],
    }
    for name, (values, debts) in loaded.items():
        strategy = name.rpartition(" at ")[0] or name.rpartition(" ")[0]
        assert differing(values, expected[strategy][0]) == set(), name
        # Debts of several nodes are added up in float32.
        torch.testing.assert_close(debts, expected[strategy][2], msg=name, rtol=1e-5, atol=1e-9)
    assert expected[ON_PACKED_WIRE][2].any()
    for name in NAMES:
        (path,) = (tmp_path / name).iterdir()
        model = network()
        optimizer = adamw(model)
        read_into(model, optimizer, path)
        assert differing(whole(model), expected[name][0]) == set(), name


def carried_over(rank: int) -> dict[str, set[str]]:
    """In memory, between jobs in one process: names of values that differ from those of a job that simply went on."""
    found = {}
    for name in ("zero1", "acco on int4", "local"):
        ends = []
        for carries in (False, True):
            case = case_of(name)
            model, parallel = sharded(case, 2, 2)
            go_on(model, parallel, rank, SAVED_AT)
            if carries:
                parallel = checkpoint.continued(parallel, lambda m=model, c=case: job_over(m, c))
            for index in range(6):
                parallel.backward(loss_of(model, batch(rank, 100 + index)))
            parallel.finish()
            ends.append(whole(model))
        found[name] = differing(*ends)
    return found


def job_over(model: Network, case: Case) -> DataParallel:
    return DataParallel(
        model, adamw(model), case.strategy, micro_batches=2, options=case.options, mesh=mesh_of(2, 2)["node"]
    )


def test_a_job_goes_on_in_another_one_without_files() -> None:
    for found in run_ranks(WORLD_SIZE, carried_over):
        assert found == {name: set() for name in found}


def in_a_folder_of_safetensors(rank: int, folder: str) -> tuple[Values, Values]:
    """What a job has committed, written by all its ranks, and what another mesh reads before it is wrapped."""
    model, parallel = sharded(case_of("acco on int4"), 2, 2)
    go_on(model, parallel, rank, SAVED_AT)
    with parallel.settled():
        writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        written = whole(model)
    parallel.finish()
    other = network()
    shard(other, mesh_of(1, 4)["shard"])
    dcp.load(other.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
    return written, whole(other)


def test_ranks_write_a_folder_of_safetensors_together_which_any_mesh_and_plain_code_reads(
    tmp_path: Path,
) -> None:
    for written, read in run_ranks(WORLD_SIZE, in_a_folder_of_safetensors, str(tmp_path)):
        assert differing(read, written) == set()
        plain = {
            name: value
            for file in tmp_path.glob("*.safetensors")
            for name, value in safetensors.torch.load_file(file).items()
        }
        assert plain.keys() == written.keys()
        assert differing(plain, written) == set()
