"""What travels lives until its landing: no block goes back to its stream while another one may still use it."""

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from stretto import DataParallel, DiLoCo, LocalSGD, Options
from stretto.averaging.outer import Fragment
from stretto.groups import SoloGroup
from stretto.strategies import ACCO, DDP, DPU, Average, PAFTDyn, PAFTSync, Strategy, WeightPrediction, ZeRO1
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.engine.lifetimes import OWN, Lifetimes
from tests.wires import OF_GRADIENTS

EQUAL = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO(), ACCO(first=1))
APART = (
    Average(4, fragments=2, delay=1),
    DiLoCo(2),
    DiLoCo(4, fragments=2, delay=1, mix=0.5),
    LocalSGD(0.5, state=True),
    PAFTSync(2, state=True),
    PAFTSync(2, overlap=True),
    PAFTDyn(2, maximum=4),
)


def freed_early(strategy: Strategy, world_size: int, **settings: Any) -> list[Lifetimes]:
    """Train eight updates and return what each rank has seen of its memory."""

    def program(rank: int, group: ProcessGroup) -> Lifetimes:
        torch.manual_seed(rank)
        lifetimes = Lifetimes()
        with lifetimes.stream(OWN):
            model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 4))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            parallel = DataParallel(
                model, optimizer, strategy, micro_batches=2, group=lifetimes.on(group), **settings
            )
            for _ in range(16):
                parallel.micro_batch(lambda x: model(x).square().mean(), torch.randn(3, 16))
            parallel.finish()
        return lifetimes

    if world_size == 1:
        return [program(0, SoloGroup())]
    return VirtualCluster(world_size).run(program).values


def drawn(strategy: Strategy) -> list[dict[str, Any]]:
    """Settings of a job: wires, sizes of buckets, and guards."""
    draws, cases = random.Random(str(strategy)), []
    for guarded in ({}, {"guards": "standard"}, {"verified": True}):
        options = {"bucket_bytes": draws.choice([256, 1024, 2**20])}
        options |= {"verified": True} if "verified" in guarded else {}
        case = {"world_size": draws.choice([1, 2, 3]), "options": Options(**options)}
        wire = draws.choice(OF_GRADIENTS)
        cases.append(case | {"wire": wire} | {key: guarded[key] for key in guarded if key == "guards"})
    return cases


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", [*EQUAL, *APART], ids=str)
def test_nothing_is_freed_before_its_stream_knows_that_others_are_done_with_it(strategy: Strategy) -> None:
    for settings in part(drawn(strategy)):
        for lifetimes in freed_early(strategy, **settings):
            assert not lifetimes.early, settings
            assert lifetimes.crossed  # something was freed that a stream beside its own had used


def test_a_copy_that_a_lane_drops_while_it_travels_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Fragment.transfer

    def drops(fragment: Fragment, *arguments: Any) -> Any:
        result = transfer(fragment, *arguments)
        fragment._carried = []
        return result

    monkeypatch.setattr(Fragment, "transfer", drops)
    (lifetimes,) = freed_early(DiLoCo(2, delay=1), 1)
    assert any("used on lane" in one for one in lifetimes.early)


def test_a_record_that_is_dropped_before_its_collective_is_over_is_found() -> None:
    lifetimes = Lifetimes()
    with lifetimes.stream(OWN):
        group, sent, arrived = lifetimes.on(SoloGroup()), torch.ones(4), torch.zeros(4)
        work = group._allgather_base(arrived, sent)
        del sent
        torch.ones(4)  # gets the memory
        work.wait()
    assert lifetimes.early.total() == 1
