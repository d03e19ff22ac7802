"""What a device costs: host time and updates per second beside a plain loop, memory, groups of ended jobs, commands."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import stretto as st
from benchmarks.device_checks import (
    STRATEGIES,
    Lasting,
    Twins,
    alone_in_a_group,
    batches,
    delay,
    expect,
    loss_of,
    network,
    on_one_device,
    synchronize,
)  # fmt: skip
from stretto.groups import SoloGroup
from stretto.strategies.ledger import ledger_of

ROOT = Path(__file__).parents[1]


class Gpt(nn.Module):
    """A GPT, of 124 million parameters on CUDA and of a hundred thousand in a rehearsal."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        width, depth, self.words = (768, 12, 50304) if device.type == "cuda" else (32, 2, 256)
        with device:
            layer = nn.TransformerEncoderLayer(
                width, width // 16 if device.type == "cpu" else 12, 4 * width, 0.0, "gelu", batch_first=True
            )
            self.embed = nn.Embedding(self.words, width)
            self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.embed(tokens), mask=mask, is_causal=True)
        return functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def speed(device: torch.device) -> dict[str, Any]:
    """Seconds of an update of a GPT on one rank: plain loop, ours by strategy and size of a bucket, in turns."""
    losses, plain = _gpt_and_plain_loop(device, rows=32)  # with 8, the host is not ahead of an H100
    sizes = {"ddp": (26,), "zero1": (20, 24, 26, 28), "acco": (20, 26), "diloco": (26,)}
    works: dict[str, Callable[[], None]] = {"plain loop": plain}
    jobs = []
    for name, powers in sizes.items():
        for power in powers:
            job, update = _job_on_gpt(device, STRATEGIES[name](), SoloGroup(), 2**power, rows=32)
            jobs.append(job)
            works[f"{name}, buckets of {2**power >> 20} MiB"] = update
    found = _in_turns(works, device)
    for job in jobs:
        job.finish()
    return {"parameters": sum(one.numel() for one in losses.model.parameters()), "seconds": found}


def hidden(device: torch.device) -> dict[str, Any]:
    """Share of a GPT's exchanges between two ranks that computing hides; they last half as long as a plain update.

    Unlike NCCL's kernels, exchanges that are delays on a stream take no processor from the computing.
    """
    _, plain = _gpt_and_plain_loop(device)
    lasts = _seconds(plain, 4, device)["device"] / 2
    found: dict[str, Any] = {"they last": lasts}
    for name in ("ddp", "zero1", "dpu", "wp", "acco", "diloco"):
        quick = Twins(device)
        quiet, without = _job_on_gpt(device, STRATEGIES[name](), quick, 2**26)
        late, beside, sent = _slow_job_on_gpt(device, name, lasts)
        seconds = _in_turns({"without": without, "with": beside}, device)
        quiet.finish()
        late.finish()
        pairs = zip(seconds["with"], seconds["without"], strict=True)
        found[name] = {
            "bytes": sent,
            "hidden": [1 - (longer["device"] - least["device"]) / lasts for longer, least in pairs],
            "seconds": seconds,
        }
    return found


def trace(device: torch.device) -> dict[str, Any]:
    """Share of the time of exchanges between two ranks in which the computing's kernels run, by a profiler."""
    rows = 32  # with fewer an H100 waits for its host, and exchanges for both
    _, plain = _gpt_and_plain_loop(device, rows)
    lasts = _seconds(plain, 3, device)["device"] / 2
    found = {}
    for name in ("acco", "zero1"):
        job, update, _ = _slow_job_on_gpt(device, name, lasts, rows)
        for _ in range(3):
            update()
        synchronize(device)
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
            for _ in range(2):
                update()
            synchronize(device)
        job.finish()
        found[name] = _covered(profile)
    if device.type == "cuda":
        expect(found["acco"]["covered"] > 0.9, f"exchanges that nothing covers: {found['acco']}")
    return found


def _slow_job_on_gpt(
    device: torch.device, name: str, lasts: float, rows: int = 8
) -> tuple[st.DataParallel, Callable[[], None], float]:
    """Return a job whose exchanges last so many seconds an update, its update, and the bytes that one sends."""
    quick = Twins(device)
    quiet, update = _job_on_gpt(device, STRATEGIES[name](), quick, 2**26, rows)
    for _ in range(3):
        update()
    before = quick.bytes
    for _ in range(3):  # of an outer step's updates one in three has an exchange
        update()
    sent = (quick.bytes - before) / 3
    quiet.finish()
    return *_job_on_gpt(device, STRATEGIES[name](), Twins(device, lasts / max(sent, 1)), 2**26, rows), sent


def _covered(profile: torch.profiler.profile) -> dict[str, float]:
    """Return how long exchanges lasted in a trace, in milliseconds, and the share of it that other kernels ran."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    spins = [event for event in kernels if "spin" in event["name"]]
    lanes = {event["args"]["stream"] for event in spins}
    others = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in kernels if event["args"]["stream"] not in lanes
    )
    covered, total = 0.0, sum(event["dur"] for event in spins)
    for spin in spins:
        reached, end = spin["ts"], spin["ts"] + spin["dur"]
        for first, last in others:
            first, last = max(first, reached), min(last, end)
            if last > first:
                covered, reached = covered + last - first, last
    return {"lasting ms": total / 1000, "covered": covered / total if total else 0.0, "kernels": len(kernels)}


class _Losses:
    """The losses of one micro-batch of a GPT."""

    def __init__(self, device: torch.device, rows: int) -> None:
        is_cuda = device.type == "cuda"
        draws = torch.Generator().manual_seed(0)
        self.model = Gpt(device)
        self._tokens = torch.randint(
            self.model.words, (rows, 512 if is_cuda else 16), generator=draws
        ).to(device)  # fmt: skip

    def __call__(self) -> Tensor:
        device = self._tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found: Tensor = self.model(self._tokens)
        return found


GPT_MICRO_BATCHES = 4


def _gpt_and_plain_loop(device: torch.device, rows: int = 8) -> tuple[_Losses, Callable[[], None]]:
    losses = _Losses(device, rows)
    optimizer = torch.optim.AdamW(losses.model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        for _ in range(GPT_MICRO_BATCHES):
            (losses() / GPT_MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return losses, update


def _job_on_gpt(
    device: torch.device, strategy: st.Strategy, group: dist.ProcessGroup, bucket_bytes: int, rows: int = 8
) -> tuple[st.DataParallel, Callable[[], None]]:
    losses = _Losses(device, rows)
    optimizer = torch.optim.AdamW(losses.model.parameters(), lr=1e-4, fused=True)
    parallel = st.DataParallel(
        losses.model, optimizer, strategy, micro_batches=GPT_MICRO_BATCHES, group=group,
        options=st.Options(bucket_bytes=bucket_bytes),
    )  # fmt: skip
    return parallel, functools.partial(_update, parallel, [losses] * GPT_MICRO_BATCHES)


def _in_turns(
    works: dict[str, Callable[[], None]], device: torch.device
) -> dict[str, list[dict[str, float]]]:
    """Return seconds per update of each work, once per turn; the order is another one in every turn."""
    turns, updates = (3, 3) if device.type == "cuda" else (2, 1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in works}
    names = list(works)
    for turn in range(turns):
        for name in names[turn:] + names[:turn]:
            found[name].append(_seconds(works[name], updates, device, warm_up=1 if turn else 3))
    return found


def _update(parallel: st.DataParallel, losses: Sequence[Callable[[], Tensor]]) -> None:
    for loss in losses:
        parallel.backward(loss())


def _late_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss = loss_of(model, batch)
    delay(batch.device, 0.05)
    return loss


def _seconds(work: Any, count: int, device: torch.device, warm_up: int = 2) -> dict[str, float]:
    """Return seconds per call: until the host is through, and until the device is."""
    for _ in range(warm_up):
        work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        work()
    host = time.perf_counter() - begun
    synchronize(device)
    return {"host": host / count, "device": (time.perf_counter() - begun) / count}


def beside(device: torch.device) -> dict[str, Any]:
    """ACCO beside collectives of 20 ms that its computing covers: an update takes as long as without them."""
    found = {}
    for name, group in (("without", SoloGroup()), ("with", Lasting(device, 0.02))):
        model = network(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parallel = st.DataParallel(model, optimizer, st.ACCO(), micro_batches=8, group=group)

        losses = [functools.partial(_late_loss, model, batch) for batch in batches(device, 8)]
        found[name] = _seconds(functools.partial(_update, parallel, losses), 4, device)["device"]
        parallel.finish()
    expect(device.type == "cpu" or found["with"] < 1.15 * found["without"], f"not hidden: {found}")
    return found


def memory(device: torch.device) -> dict[str, Any]:
    """Bytes per parameter that a rank of two holds between its start and its first update, and by the ledger."""
    found = {}
    for name in ("ddp", "zero1", "acco"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)]).to(device)
        count = sum(one.numel() for one in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        before = torch.cuda.memory_allocated(device)
        strategy = STRATEGIES[name]()
        parallel = st.DataParallel(model, optimizer, strategy, micro_batches=2, group=on_one_device())
        held = (torch.cuda.memory_allocated(device) - before) / count
        ledger = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=2) - 4
        found[name] = {"after the start": held, "ledger": ledger}
        parallel.backward(model(torch.randn(8, 1024, device=device)).square().mean())
        parallel.fail(RuntimeError("enough"))
        expect(
            held < ledger + 0.5,
            f"{name}: {held:.2f} bytes per parameter after the start, by the ledger {ledger:.2f}",
        )
    return found


def ended_jobs(device: torch.device) -> dict[str, Any]:
    """Memory of the device that sixteen jobs leave behind, one after the other."""

    def used() -> int:
        if device.type == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free) >> 20

    with alone_in_a_group(device):
        by_job = []
        for _ in range(16):
            model = network(device)
            parallel = st.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=1)
            parallel.backward(loss_of(model, batches(device, 1)[0]))
            parallel.finish()
            by_job.append(used())
    expect(by_job[-1] - by_job[3] < 1024, f"MiB of the device in use after each job: {by_job}")
    return {"MiB in use": by_job}


def commands(device: torch.device) -> dict[str, Any]:
    """The commands a newcomer types first, as they are."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for words in (
            f"train digits-resnet --updates 4 --device {device.type} --workers 1 --run-dir one",
            "train digits-resnet --updates 4 --run-dir two",
        ):
            ended = subprocess.run(
                [sys.executable, "-m", "stretto", *words.split()], cwd=folder, capture_output=True, text=True,
                timeout=240, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )  # fmt: skip
            lines = [line for line in ended.stdout.splitlines() if line.strip()]
            found[words] = {"rc": ended.returncode, "lines": lines[:3] + lines[-3:]}
            expect(ended.returncode == 0, f"stretto {words}: {ended.stdout[-400:]} {ended.stderr[-400:]}")
            named = "train" not in words or any(device.type in line for line in lines[:2])
            expect(named, f"stretto {words}: the first lines name no {device.type}: {lines[:2]}")
    return found


def suite(device: torch.device) -> dict[str, Any]:
    """tests/gpu."""
    # Of plugins that a machine brings along, some warn; tests of several processes at once share the device.
    words = ["-q", "tests/gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default", "-n", "8"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    lines = ended.stdout.splitlines()
    expect(ended.returncode == 0, "\n".join(lines[-30:]))
    return {"last line": lines[-1]}


def launches(device: torch.device) -> dict[str, Any]:
    """`benchmarks/launches.py`, line by line."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "launches.py"), "--device", device.type, "--turns", "1"],
        capture_output=True, text=True, timeout=230, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    expect(ended.returncode == 0, ended.stderr[-1500:])
    return {"lines": ended.stdout.splitlines()}
