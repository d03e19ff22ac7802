"""Checkpoints of sharded models: one folder, read by any number of nodes and shards, and by plain PyTorch."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from stretto import ACCO, DDP, DataParallel, DiLoCo, LocalSGD, Options, WeightPrediction, ZeRO1, checkpoint
from tests.checkpoint.plainly import read_into
from tests.processes import run_ranks
from tests.sharded.jobs import (
    WORLD_SIZE,
    Case,
    Outcome,
    Values,
    adamw,
    batch,
    lars,
    loss_of,
    mesh_of,
    network,
    shard,
    sharded,
    tolerance,
    unsharded,
    whole,
)

SAVED_AT = 2
SHAPES = ((2, 2), (4, 1), (1, 4), None)
"""Nodes and shards; or ranks that hold whole models."""
PACKED = Options(bucket_bytes=512, wire="int4", clip_norm=0.5)
OF_WHOLE_TENSORS = Options(bucket_bytes=512, wire="int8", clip_norm=0.5)
DILOCO = DiLoCo(interval=2, fragments=1, delay=1)
CASES = {
    **{one.name: Case(strategy=one, optimizer=adamw) for one in (DDP(), ZeRO1(), WeightPrediction())},
    "acco on int4": Case(strategy=ACCO(), optimizer=adamw, options=PACKED),
    "local": Case(strategy=LocalSGD(0.34), optimizer=adamw),
    "diloco on int8": Case(
        strategy=DILOCO, optimizer=adamw, options=dataclasses.replace(PACKED, wire="int8")
    ),
    **{f"{one.name}, lars": Case(strategy=one, optimizer=lars) for one in (DDP(), ZeRO1(), LocalSGD(0.34))},
    "acco on int8, lars": Case(strategy=ACCO(), optimizer=lars, options=OF_WHOLE_TENSORS),
    "diloco on int8, lars": Case(
        strategy=DiLoCo(interval=2, fragments=2), optimizer=lars, options=OF_WHOLE_TENSORS
    ),
}
CLOSE = ("ddp, lars", "zero1, lars")
"""Elsewhere, others have replicas or roundings of their own."""
# What PyTorch says of every load in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")


def job_of(name: str, shape: tuple[int, int] | None) -> tuple[Any, DataParallel]:
    return unsharded(CASES[name]) if shape is None else sharded(CASES[name], *shape)


def go_on(model: nn.Module, parallel: DataParallel, rank: int, until: int) -> None:
    """Train until so many updates have been committed; the batches follow from the number of micro-batches."""
    while parallel.steps < until:
        parallel.backward(loss_of(model, batch(rank, parallel.job.compute.num_counted + 10 * parallel.steps)))


def gone_on(model: nn.Module, parallel: DataParallel, rank: int) -> Values:
    """Train three updates more."""
    for index in range(6):
        parallel.backward(loss_of(model, batch(rank, 100 + index)))
    parallel.finish()
    return whole(model)


def committed(model: nn.Module, parallel: DataParallel) -> Values:
    with parallel.settled():
        return whole(model)


def residuals(parallel: DataParallel) -> Tensor:
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


Told = tuple[Values, Tensor, Values]
"""What is committed and owed at the checkpoint, and what a run ends with that went on."""


def saved(rank: int, folder: str) -> dict[str, Told]:
    found = {}
    for name in CASES:
        model, parallel = job_of(name, (2, 2))
        go_on(model, parallel, rank, SAVED_AT)
        checkpoint.save(parallel, Path(folder, name))
        found[name] = committed(model, parallel), residuals(parallel), gone_on(model, parallel, rank)
    return found


def loaded(
    rank: int, folder: str, shapes: Sequence[tuple[int, int] | None]
) -> dict[tuple[str, tuple[int, int] | None], Told]:
    """The same in new processes, at these numbers of nodes and shards."""
    found = {}
    for name, shape in itertools.product(CASES, shapes):
        model, parallel = job_of(name, shape)
        notes = checkpoint.load(parallel, Path(folder, name)).notes
        assert notes == () or shape != (2, 2)
        found[name, shape] = committed(model, parallel), residuals(parallel), gone_on(model, parallel, rank)
    return found


def differing(found: Values, expected: Values) -> set[str]:
    return {name for name, value in expected.items() if not torch.equal(found[name], value)}


@pytest.mark.long
def test_a_checkpoint_of_shards_goes_on_to_the_bit_and_is_read_everywhere(tmp_path: Path) -> None:
    before = run_ranks(WORLD_SIZE, saved, str(tmp_path))
    alone = run_ranks(1, loaded, str(tmp_path), (None, (1, 1)))
    for rank, found in enumerate([*run_ranks(WORLD_SIZE, loaded, str(tmp_path), SHAPES), *alone]):
        for (name, shape), (values, residuals, ended) in found.items():
            at_checkpoint, owed_there, at_end = before[rank % WORLD_SIZE][name]
            assert differing(values, at_checkpoint) == set(), (name, shape)
            # Debts of several nodes are added up in float32.
            torch.testing.assert_close(residuals, owed_there, msg=name, rtol=1e-5, atol=1e-9)
            if shape == (2, 2):
                assert differing(ended, at_end) == set(), name
            elif name in CLOSE and rank < WORLD_SIZE:
                expected = Outcome(values=at_end, updates=[])
                apart = Outcome(values=ended, updates=[]).distance(expected)
                assert apart <= 2 * tolerance(CASES[name], expected), (name, shape)
    assert before[0]["acco on int4"][1].any()
    for name in (name for name, case in CASES.items() if case.optimizer is adamw):
        (path,) = (tmp_path / name).iterdir()
        model = network()
        read_into(model, CASES[name].optimizer(model), path)
        assert differing(whole(model), before[0][name][0]) == set(), name


def carried_over(rank: int) -> dict[str, set[str]]:
    """In memory, between jobs in one process: names of values that differ from those of a job that simply went on."""
    found = {}
    for name in ("acco on int4", "local"):
        ends = []
        for carries in (False, True):
            case = CASES[name]
            model, parallel = sharded(case, 2, 2)
            go_on(model, parallel, rank, SAVED_AT)
            if carries:
                parallel = checkpoint.continued(parallel, lambda m=model, c=case: job_over(m, c))
            ends.append(gone_on(model, parallel, rank))
        found[name] = differing(*ends)
    return found


def job_over(model: nn.Module, case: Case) -> DataParallel:
    return DataParallel(
        model, adamw(model), case.strategy, micro_batches=2, options=case.options, mesh=mesh_of(2, 2)["node"]
    )


@pytest.mark.long
def test_a_job_goes_on_in_another_one_without_files() -> None:
    for found in run_ranks(WORLD_SIZE, carried_over):
        assert found == {name: set() for name in found}


def in_a_folder_of_safetensors(rank: int, folder: str) -> tuple[Values, Values]:
    """What a job has committed, written by all its ranks, and what another mesh reads before it is wrapped."""
    model, parallel = sharded(CASES["acco on int4"], 2, 2)
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
