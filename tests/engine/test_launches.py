"""How many operations an update starts depends on its flat sets, and not on buckets, tensors or layers."""

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import stretto
from stretto import ACCO, DDP, DPU, DiLoCo, LocalSGD, Options, WeightPrediction, ZeRO1
from stretto.flat import plan_layout
from stretto.groups import SoloGroup
from stretto.optimizer import ShardedOptimizer
from stretto.strategies import Strategy
from tests.draws import part

PACKAGE = Path(stretto.__file__).parent
PER_BUCKET = (
    "exchange/",  # a bucket travels by itself
    "sharded.py:squared_norm",  # on a CPU, so that it stays in the cache; elsewhere once per set
)
MOST_CALLS = 2 * 88
"""Of functions, of Python and of C, in two rounds of a bucket. It may fall, and not rise."""
STRATEGIES = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO(), ACCO(first=1), LocalSGD(), DiLoCo(2))


class Launches(TorchDispatchMode):
    """Counts operations that a device would be given a kernel for, but for those that are known to go by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        is_launch = not (func.is_view or name.startswith(("aten.empty", "aten.detach", "aten._local_scalar")))
        frame, where = sys._getframe(1), ""
        while is_launch and frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                here = f"{file.relative_to(PACKAGE)}:{frame.f_code.co_name}"
                where = where or here
                is_launch = not any(one in here for one in PER_BUCKET)
            frame = frame.f_back
        self.counts[f"{where} {name}"] += is_launch
        return func(*args, **(kwargs or {}))


def launches(
    strategy: Strategy, sizes: list[int], dtypes: list[torch.dtype], bucket_bytes: int
) -> Counter[str]:
    """Return what four updates start on the communication lane, after four others."""
    model = nn.ParameterList(
        nn.Parameter(torch.ones(size, dtype=dtypes[i % len(dtypes)])) for i, size in enumerate(sizes)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    options = Options(bucket_bytes=bucket_bytes, clip_norm=0.5)
    parallel = stretto.DataParallel(
        model, optimizer, strategy, micro_batches=2, group=SoloGroup(), options=options
    )
    counted = Launches()
    advance = parallel.job.comm.advance

    def watched(*arguments: Any) -> Any:
        with counted:  # a mode belongs to the thread that enters it
            return advance(*arguments)

    for step in range(8):
        if step == 4:
            parallel.job.comm.advance = watched  # type: ignore[method-assign]  # what is watched is its calls
        for _ in range(2):
            parallel.backward(torch.stack([one.float().square().sum() for one in model]).sum())
    parallel.finish()
    return +counted.counts


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", part(STRATEGIES), ids=str)
def test_launches_follow_the_flat_sets(strategy: Strategy) -> None:
    draws = random.Random(3)
    for dtypes in ([torch.float32], [torch.float32, torch.bfloat16]):
        expected = launches(strategy, [64] * len(dtypes), dtypes, 2**20)
        assert expected
        for _ in range(3):
            sizes = [draws.randint(1, 700) for _ in range(draws.randint(10, 40))]
            assert launches(strategy, sizes, dtypes, draws.choice([256, 1024, 4096])) == expected


def test_a_preview_copies_no_more_than_a_block_at_a_time() -> None:
    most = 2**18  # elements of 4 bytes: a block on a CPU
    model = nn.ParameterList(nn.Parameter(torch.ones(60_000)) for _ in range(20))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for bucket_bytes in (1024, 2**20):
        layout, parameters = plan_layout(
            model, optimizer, world_size=1, bucket_bytes=bucket_bytes, widen=True
        )
        owner = ShardedOptimizer(layout, parameters, optimizer, rank=0, num_owners=1)
        assert max(segment.master.numel() for segment in owner.segments) <= most
        assert len(owner.segments) == len(owner.owned.blocks) <= 2 * layout.numel // most + 1


def calls_on_the_lane(strategy: Strategy, buckets: int) -> int:
    """Return how many functions, of Python and of C, an update calls on the communication lane."""
    model = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(buckets))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    options = Options(bucket_bytes=256, clip_norm=0.5)
    parallel = stretto.DataParallel(
        model, optimizer, strategy, micro_batches=2, group=SoloGroup(), options=options
    )
    counted: list[int] = []
    advance = parallel.job.comm.advance

    def watched(*arguments: Any) -> Any:
        calls = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)  # of the thread that sets it
        try:
            return advance(*arguments)
        finally:
            sys.setprofile(before)
            counted.append(calls)

    parallel.job.comm.advance = watched  # type: ignore[method-assign]  # what is watched is its calls
    for _ in range(8):
        parallel.backward(torch.stack([one.square().sum() for one in model]).sum())
    parallel.finish()
    return counted[2] + counted[3]  # ACCO's updates have two rounds


@pytest.mark.parametrize("strategy", [ZeRO1(), DDP(), ACCO()], ids=str)
def test_a_bucket_costs_the_host_few_calls(strategy: Strategy) -> None:
    few, many = calls_on_the_lane(strategy, 10), calls_on_the_lane(strategy, 40)
    # Of two collectives, a third goes into what a group written in Python makes of them.
    assert many - few <= 30 * MOST_CALLS
