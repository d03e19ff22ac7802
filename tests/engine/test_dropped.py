"""A job that was dropped without `finish` leaves nothing: no thread, no hook on the model, and no model."""

import contextlib
import gc
import random
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto import (
    DataParallel,
    DiLoCo,
    EchoLoader,
    Even,
    Options,
)
from stretto.groups import SoloGroup
from tests.draws import draws
from tests.errors.tiny import EVERY

STRATEGIES = EVERY | {"diloco, delayed": DiLoCo(3, delay=1)}


def part_of_a_training(name: str, draw: random.Random) -> tuple[nn.Module, list[weakref.ref[object]]]:
    """Train for a while, leave the loop somehow, drop the job; return its model and what is to go with the job."""
    torch.manual_seed(draw.randrange(1000))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    settings: dict[str, object] = {}
    if not name.startswith("paft"):
        settings = draw.choice([{}, {"wire": "int8"}, {"guards": "standard"}])
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = draw.choice([None, torch.optim.lr_scheduler.StepLR(optimizer, 2)])
    parallel = DataParallel(
        model, optimizer, STRATEGIES[name], micro_batches=2, scheduler=scheduler, group=SoloGroup(),
        options=Options(clip_norm=1.0), **settings,
    )  # fmt: skip
    batches = [torch.randn(3, 4) for _ in range(9)]
    loader: object = EchoLoader(batches, Even(2)) if draw.random() < 0.5 else batches
    last, way = draw.randrange(7), draw.choice(["break", "raise", "never"])
    with contextlib.suppress(ZeroDivisionError):
        for index, batch in enumerate(parallel.feed(loader) if way != "never" else batches):
            if index == last:
                if way == "raise":
                    raise ZeroDivisionError
                break
            parallel.backward(model(batch).square().mean())
    compute = parallel.job.compute
    return model, [weakref.ref(one) for one in (parallel, compute, compute.replica, parallel.feeding)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_left_of_a_job_that_was_dropped(name: str) -> None:
    draw = random.Random(name)
    gc.collect()  # what others have left
    for _ in draws(10):
        before = set(threading.enumerate())
        model, parts = part_of_a_training(name, draw)
        for thread in set(threading.enumerate()) - before:
            while thread.is_alive():  # what its lane has begun goes on, and holds the job until then
                gc.collect()
                thread.join(0.01)
        parts.append(weakref.ref(model))
        del model
        gc.collect()
        assert [part() for part in parts] == [None] * len(parts)


def test_a_gradient_of_the_loop_that_goes_on_without_the_job_stays() -> None:
    model = nn.Linear(4, 2)
    parallel: list[object] = [stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    parallel.append(parallel)  # dropped, and not collected yet
    del parallel
    gc.disable()
    try:
        model.weight.grad = expected = torch.ones_like(model.weight)
        gc.collect()
    finally:
        gc.enable()
    found: Tensor | None = model.weight.grad
    assert found is expected
    model(torch.randn(3, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_the_end_of_an_earlier_holder_leaves_the_next_job_alone() -> None:
    model = nn.Linear(4, 2)
    ended = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ended.finish()
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    del ended
    gc.collect()
    with pytest.raises(stretto.errors.ConfigError, match="a DataParallel that has not ended"):
        DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    update = parallel.backward(model(torch.randn(3, 4)).sum())
    assert update is not None


@pytest.mark.long
def test_a_program_that_ends_with_a_job_says_nothing() -> None:
    program = """if True:
        import torch, stretto
        model = torch.nn.Linear(4, 2)
        parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)
        parallel.backward(model(torch.ones(3, 4)).sum())
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
