"""What a device costs: host time and updates per second beside a plain loop, memory, groups of ended jobs, commands."""

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import stretto as st
from benchmarks.device_checks import (
    STRATEGIES,
    Lasting,
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
        layer = nn.TransformerEncoderLayer(
            width, width // 16 if device.type == "cpu" else 12, 4 * width, 0.0, "gelu", batch_first=True
        )
        self.embed = nn.Embedding(self.words, width)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.to(device)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.embed(tokens), mask=mask, is_causal=True)
        return functional.cross_entropy((hidden @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def speed(device: torch.device) -> dict[str, Any]:
    """Seconds of an update of a GPT, of a plain loop and of ours, on one rank, by size of a bucket."""
    is_cuda = device.type == "cuda"
    micro_batches, updates = 4, 12 if is_cuda else 3
    draws = torch.Generator().manual_seed(0)
    model = Gpt(device)
    tokens = torch.randint(model.words, (8, 512 if is_cuda else 16), generator=draws).to(device)
    kind = torch.bfloat16 if is_cuda else torch.float32

    def loss() -> Tensor:
        with torch.autocast(device.type, kind, enabled=is_cuda):
            found: Tensor = model(tokens)
        return found

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain() -> None:
        for _ in range(micro_batches):
            (loss() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    found: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters())}
    found["plain"] = _seconds(plain, updates, device)
    for name in ("ddp", "zero1", "acco"):
        for bucket_bytes in (2**20, 2**26):
            parallel = st.DataParallel(
                model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), STRATEGIES[name](),
                micro_batches=micro_batches, group=SoloGroup(), options=st.Options(bucket_bytes=bucket_bytes),
            )  # fmt: skip
            ours = functools.partial(_update, parallel, [loss] * micro_batches)
            found[f"{name}, buckets of {bucket_bytes >> 20} MiB"] = _seconds(ours, updates, device)
            parallel.finish()
    return found


def _update(parallel: st.DataParallel, losses: Sequence[Callable[[], Tensor]]) -> None:
    for loss in losses:
        parallel.backward(loss())


def _late_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss = loss_of(model, batch)
    delay(batch.device, 0.05)
    return loss


def _seconds(work: Any, count: int, device: torch.device) -> dict[str, float]:
    """Return seconds per call: until the host is through, and until the device is."""
    for _ in range(2):
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
            "doctor --seconds 10",
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
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider"], cwd=ROOT,
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    expect(ended.returncode == 0, "\n".join(lines[-30:]))
    return {"last line": lines[-1]}
