"""What docs/sharded.md shows runs, and what it says of memory is measured."""

import gc
import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stretto import ACCO, DDP, DataParallel, DiLoCo, Options, WeightPrediction, ZeRO1
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks
from tests.sharded.jobs import mesh_of

WIDTH, LAYERS, NODES, SHARDS = 512, 4, 2, 2
HELD: tuple[Strategy, ...] = (DDP(), ZeRO1(), ACCO(), WeightPrediction(), DiLoCo(interval=3, fragments=1))


def held_bytes() -> int:
    """Bytes of all storages that anything refers to."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    locals_of = [one.to_local().detach() if isinstance(one, DTensor) else one for one in tensors]
    storages = [one.untyped_storage() for one in locals_of if one.layout is torch.strided]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.data_ptr()}.values())


def measured(rank: int) -> dict[str, float]:
    """Bytes per parameter that a job holds, over what the ledger says of whole models on as many ranks as nodes."""
    found = {}
    for strategy in HELD:
        mesh, before = mesh_of(NODES, SHARDS), held_bytes()
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters())
        options = Options(bucket_bytes=2**13)
        parallel = DataParallel(
            model, optimizer, strategy, micro_batches=2, options=options, mesh=mesh["node"]
        )
        for _ in range(12):
            parallel.backward(model(torch.ones(1, WIDTH)).square().mean())
        parallel.commit()  # so that the other lane holds nothing for the moment
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        held = (held_bytes() - before) / (LAYERS * WIDTH**2)
        expected = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=NODES)
        found[strategy.name] = held / expected
        parallel.finish()
        del model, layer, module, optimizer, parallel
    return found


def test_a_rank_holds_what_the_table_says_of_nodes_divided_by_the_shards() -> None:
    for found in run_ranks(NODES * SHARDS, measured):
        # Scratch of the exchange, and what has no place per parameter.
        assert found == pytest.approx(dict.fromkeys(found, 1 / SHARDS), rel=0.05)


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
