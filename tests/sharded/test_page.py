"""What docs/sharded.md shows runs, and what it says of memory is measured."""

import gc
import os
from collections.abc import Collection

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stretto import Average, DataParallel, DiLoCo, Options
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks
from tests.sharded.jobs import STRATEGIES, mesh_of

WIDTH, LAYERS, NODES, SHARDS = 512, 16, 2, 2
UPDATES = 6
HELD = (
    *STRATEGIES[:-1],
    DiLoCo(interval=3, fragments=1),
    DiLoCo(interval=3, fragments=1, delay=1),
    DiLoCo(interval=3, fragments=1, delay=1, keep_progress=True),
    Average(every=3, fragments=2),
)
"""After the last update a fragment is under way, where there is a delay."""
WITHIN = 0.013
"""Share by which what a rank holds may differ from the table: scratch, which does not grow with the model."""


def storages() -> dict[int, torch.UntypedStorage]:
    """All storages that anything refers to, by address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    locals_of = [one.to_local().detach() if isinstance(one, DTensor) else one for one in tensors]
    found = [one.untyped_storage() for one in locals_of if one.layout is torch.strided]
    return {one.data_ptr(): one for one in found if one.data_ptr()}


def bytes_beside(before: Collection[int]) -> int:
    """Bytes of all storages but those at these addresses, which must be alive."""
    return sum(one.nbytes() for address, one in storages().items() if address not in before)


def held_by(strategy: Strategy, mesh: DeviceMesh) -> float:
    """Bytes per parameter of the model that a rank of a job holds between updates."""
    before = storages()  # they live until the end, as others may drop them meanwhile
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(bucket_bytes=2**13)
    parallel = DataParallel(model, optimizer, strategy, micro_batches=2, options=options, mesh=mesh["node"])
    for _ in range(2 * UPDATES):
        parallel.backward(model(torch.ones(1, WIDTH)).square().mean())
    parallel.commit()  # so that the other lane holds nothing for the moment
    parallel.job.replica.wait_for_transfers()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    held = bytes_beside(before)
    parallel.finish()
    return held / (LAYERS * WIDTH**2)


def measured(rank: int) -> list[tuple[float, float]]:
    """Of every strategy: bytes per parameter that a rank holds, and those of the table over the number of shards."""
    mesh, found = mesh_of(NODES, SHARDS), []
    for strategy in HELD:
        ledger = ledger_of(strategy)
        table = ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=NODES)
        found.append((held_by(strategy, mesh), table / SHARDS))
    return found


@pytest.mark.long
def test_a_rank_holds_what_the_table_says_of_nodes_divided_by_the_shards() -> None:
    for found in run_ranks(NODES * SHARDS, measured):
        for strategy, (held, expected) in zip(HELD, found, strict=True):
            assert held == pytest.approx(expected, rel=WITHIN), strategy


def typed(rank: int) -> float:
    (code,) = code_blocks(DOCS / "sharded.md", "tests/sharded/test_page.py")
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    names: dict[str, object] = {}
    exec(code.replace("torch.distributed.init_process_group()", ""), names)
    parallel = names["parallel"]
    assert isinstance(parallel, DataParallel)
    return parallel.steps


def test_the_set_up_runs_as_it_stands() -> None:
    assert run_ranks(2, typed) == [4, 4]
