"""What docs/sharded.md shows runs, and what it says of memory is measured."""

import gc
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stretto import ACCO, DataParallel, DiLoCo, Options, ZeRO1
from stretto.flat import usual_bucket_bytes
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks
from tests.sharded.jobs import mesh_of

WIDTH, LAYERS, NODES, SHARDS = 256, 16, 2, 2
HELD: tuple[Strategy, ...] = (ZeRO1(), ACCO(), DiLoCo(interval=3, fragments=1))


def held_bytes() -> int:
    """Bytes of all storages that anything refers to."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    locals_of = [one.to_local().detach() if isinstance(one, DTensor) else one for one in tensors]
    storages = [one.untyped_storage() for one in locals_of if one.layout is torch.strided]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr()}.values())


def measured(rank: int, strategy: Strategy) -> tuple[int, float]:
    """Bytes that a job holds, and what the ledger says of nodes with whole models, divided by the shards."""
    mesh, before = mesh_of(NODES, SHARDS), held_bytes()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    options = Options(bucket_bytes=2**13)
    parallel = DataParallel(model, optimizer, strategy, micro_batches=2, options=options, mesh=mesh["node"])
    for _ in range(12):
        parallel.backward(model(torch.ones(1, WIDTH)).square().mean())
    parallel.commit()  # so that the other lane holds nothing for the moment
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    ledger = ledger_of(strategy)
    expected = ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=NODES)
    # A preview's copy of one block stays until the next one, whatever the size of the model.
    block = usual_bucket_bytes(torch.device("cpu")) if ledger.previews else 0
    held = held_bytes() - before - block
    parallel.finish()
    return held, expected * LAYERS * WIDTH**2 / SHARDS


@pytest.mark.parametrize("strategy", HELD, ids=lambda strategy: strategy.name)
def test_a_rank_holds_what_the_table_says_of_nodes_divided_by_the_shards(strategy: Strategy) -> None:
    for held, expected in run_ranks(NODES * SHARDS, measured, strategy):
        # Beside it there is some scratch, which does not grow with the model: half a MiB here.
        assert 0.98 * expected < held < 1.02 * expected + 2**19


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
