"""On a CUDA device: exact where a CPU is, communication beside the computing, guards and checkpoints as everywhere.

Every test runs in processes of its own, so that the one of the tests never holds a device. Where there is none the same
tests run on processors, so that a mistake in them shows before a device is lent; what has nothing to look at there is
skipped, and counted at the end.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint
from stretto.checksums import Checksum, Sums, digest, on_host
from stretto.groups import SoloGroup
from stretto.guards.repair import repairs
from stretto.strategies.ledger import ledger_of
from stretto_lab.faults import Fault, FaultPlan, Injector, strike_memory
from tests.bits import unequal
from tests.processes import run_ranks

IS_CUDA = torch.cuda.is_available()
DEVICE, BACKEND = ("cuda", "nccl") if IS_CUDA else ("cpu", "gloo")
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
STRATEGIES = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "acco": st.ACCO(),
}
UPDATES, MICRO_BATCHES = 12, 2


def alone(body: Callable[..., Any], *args: Any, backend: str | None = None) -> Any:
    """Call `body(*args)` in a process of its own, whose arithmetic is deterministic."""
    (found,) = run_ranks(1, deterministic, body, args, backend=backend)
    return found


def deterministic(rank: int, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.use_deterministic_algorithms(True)
    return body(*args)


def network(width: int = 64, device: str = DEVICE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 4)).to(device)


def batches(updates: int = UPDATES, device: str = DEVICE) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=draws).to(device) for _ in range(updates * MICRO_BATCHES)]


def loss_of(model: nn.Module, batch: Tensor, autocast: bool = False) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
        return nn.functional.cross_entropy(model(batch).float(), batch[:, :4].argmax(1))


def job_on(model: nn.Module, strategy: st.Strategy, **settings: Any) -> st.DataParallel:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return st.DataParallel(model, optimizer, strategy, micro_batches=MICRO_BATCHES, **settings)


def trained(
    strategy: st.Strategy,
    *,
    autocast: bool = False,
    waits: bool = False,
    begins: Callable[[st.DataParallel], None] = lambda _: None,
    **settings: Any,
) -> tuple[list[Tensor], list[st.Incident]]:
    """Return the parameters behind a training, and what guards have found; `waits` leaves nothing beside anything."""
    model = network()
    parallel = job_on(model, strategy, **settings)
    begins(parallel)
    incidents: list[st.Incident] = []
    for batch in parallel.feed(batches()):
        update = parallel.backward(loss_of(model, batch, autocast))
        incidents += update.incidents if update is not None else ()
        if waits and IS_CUDA:
            torch.cuda.synchronize()
    parallel.finish()
    return [parameter.detach().cpu() for parameter in model.parameters()], incidents


def plain_and_ours(autocast: bool) -> tuple[list[Tensor], list[Tensor]]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for index, batch in enumerate(batches(), start=1):
        (loss_of(model, batch, autocast) / MICRO_BATCHES).backward()
        if index % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    plain = [parameter.detach().cpu() for parameter in model.parameters()]
    return plain, trained(st.ZeRO1(), autocast=autocast, group=SoloGroup())[0]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_lone_rank_equals_a_plain_loop_to_the_bit(autocast: bool) -> None:
    assert unequal(*alone(plain_and_ours, autocast)) == []


def twice(name: str) -> tuple[list[Tensor], list[Tensor]]:
    strategy = STRATEGIES[name]
    return trained(strategy, group=SoloGroup())[0], trained(strategy, group=SoloGroup(), waits=True)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_work_on_two_streams_gives_the_bits_of_work_that_waits(name: str) -> None:
    """A read before a write has ended, or a write before a read, would show here."""
    assert unequal(*alone(twice, name)) == []


def over_backend(name: str) -> tuple[list[Tensor], list[Tensor]]:
    strategy = STRATEGIES[name]
    assert dist.get_backend() == BACKEND
    return trained(strategy)[0], trained(strategy, group=SoloGroup())[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_over_the_backend_has_the_bits_of_no_group(name: str) -> None:
    assert unequal(*alone(over_backend, name, backend=BACKEND)) == []


def streams_of_kernels(strategy: st.Strategy) -> set[int]:
    model = network(width=512)
    parallel = job_on(model, strategy, group=SoloGroup())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in parallel.feed(batches()):
            parallel.backward(loss_of(model, batch))
        torch.cuda.synchronize()
    parallel.finish()
    profile.export_chrome_trace("trace.json")
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    return {event["args"]["stream"] for event in events if event.get("cat") == "kernel"}


@pytest.mark.gpu
@needs_cuda
def test_a_strategy_that_overlaps_works_on_a_stream_of_its_own_and_another_one_does_not() -> None:
    assert len(alone(streams_of_kernels, st.ACCO())) == 2
    assert len(alone(streams_of_kernels, st.ZeRO1())) == 1


def checksums() -> dict[str, bool]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        values = torch.randn(100_003, generator=torch.Generator().manual_seed(2)).mul(100).to(dtype)
        there = values.to(DEVICE)
        before = Checksum.of(there)
        sums, own = Sums.of(there), Sums.of(values)
        found[f"{dtype} sums"] = torch.equal(sums.rows.cpu(), own.rows) and torch.equal(
            sums.columns.cpu(), own.columns
        )
        there.view(torch.uint8)[777] ^= 64
        found[f"{dtype} seen"] = [digest(there)] != on_host([before.digest])
        found[f"{dtype} repaired"] = repairs(before, there) and torch.equal(there.cpu(), values)
    return found


def test_sums_are_those_of_a_cpu_and_repair_a_flipped_bit() -> None:
    assert set(alone(checksums).values()) == {True}


def struck(name: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    flip = Fault(site="masters", rank=0, instant=5, extent="element", pattern="flip", seed=9)
    undisturbed, _ = trained(STRATEGIES[name], group=SoloGroup())
    final, incidents = trained(
        STRATEGIES[name],
        group=SoloGroup(),
        guards="standard",
        begins=lambda parallel: strike_memory(parallel, Injector(FaultPlan((flip,)), 0)),
    )
    return undisturbed, final, [incident.site for incident in incidents]


@pytest.mark.parametrize("name", ["ddp", "zero1", "acco"])
def test_guards_mend_a_flipped_bit(name: str) -> None:
    undisturbed, final, sites = alone(struck, name)
    assert sites == ["masters"]
    assert unequal(undisturbed, final) == []


def held_bytes(strategy: st.Strategy) -> tuple[float, float]:
    """Bytes per parameter: at the peak of a training above the model alone, and by the ledger."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(48)]).to(DEVICE)
    count = sum(parameter.numel() for parameter in model.parameters())
    model(
        torch.randn(8, 1024, device=DEVICE)
    ).sum().backward()  # matrix products keep a workspace from here on
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parallel = st.DataParallel(
        model, optimizer, strategy, micro_batches=MICRO_BATCHES, group=SoloGroup(),
        options=st.Options(bucket_bytes=2**20),
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2 * MICRO_BATCHES):
        parallel.backward(model(torch.randn(8, 1024, device=DEVICE)).square().mean())
    peak = torch.cuda.max_memory_allocated() - before
    parallel.finish()
    ledger = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=1) - 4
    return peak / count, ledger


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["ddp", "zero1", "acco"])
def test_memory_is_what_the_ledger_says(name: str) -> None:
    """Beside it: a layer's gradient before it is added, activations, four buckets, a preview's copies of one."""
    measured, ledger = alone(held_bytes, STRATEGIES[name])
    assert ledger - 0.1 <= measured <= ledger + 1.0


def resumed(first: str, second: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that a job on `first` has saved, and those that one on `second` has loaded."""
    model = network(device=first)
    parallel = job_on(model, st.ZeRO1(), group=SoloGroup())
    for batch in parallel.feed(batches(4, first), on_update=lambda update: save(parallel, update)):
        parallel.backward(loss_of(model, batch))
    parallel.finish()
    other = network(device=second)
    loaded = job_on(other, st.ZeRO1(), group=SoloGroup())
    checkpoint.load(loaded, "checkpoints")
    shown = [parameter.detach().cpu().clone() for parameter in other.parameters()]
    for batch in loaded.feed(batches(2, second)):
        loaded.backward(loss_of(other, batch))
    loaded.finish()
    return [parameter.detach().cpu() for parameter in model.parameters()], shown


def save(parallel: st.DataParallel, update: st.Update) -> None:
    if update.step == 4:
        checkpoint.save(parallel, "checkpoints")


@pytest.mark.parametrize(("first", "second"), sorted({(DEVICE, DEVICE), (DEVICE, "cpu"), ("cpu", DEVICE)}))
def test_a_checkpoint_goes_on_on_another_device(first: str, second: str) -> None:
    assert unequal(*alone(resumed, first, second)) == []


def narrow() -> tuple[set[torch.dtype], list[bool]]:
    model = network().to(torch.bfloat16)
    parallel = job_on(model, st.ACCO(), group=SoloGroup(), options=st.Options(accumulate="parameter"))
    for batch in parallel.feed(batches()):
        parallel.backward(loss_of(model, batch.to(torch.bfloat16)))
    parallel.finish()
    parameters = list(model.parameters())
    return {one.dtype for one in parameters}, [bool(one.isfinite().all()) for one in parameters]


def test_a_16_bit_model_keeps_its_dtype_and_stays_finite() -> None:
    dtypes, finite = alone(narrow)
    assert dtypes == {torch.bfloat16}
    assert all(finite)
