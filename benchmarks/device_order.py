"""Checks of order and time on a device: late ranks, two streams, waits of the host, times, clocks, two ranks on one."""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import stretto as st
from benchmarks.device_checks import (
    MICRO_BATCHES,
    STRATEGIES,
    Lasting,
    alone_in_a_group,
    batches,
    delay,
    expect,
    loss_of,
    network,
    on_one_device,
    same,
    synchronize,
    trained,
)  # fmt: skip
from benchmarks.synchronising import Synchronisations
from stretto.groups import SoloGroup


def versions(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "GiB": properties.total_memory / 2**30,
        }
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def late_collectives(device: torch.device) -> dict[str, Any]:
    """Collectives that are not complete 2.5 s after they were called."""
    with alone_in_a_group(device):
        for name in ("zero1", "ddp", "acco"):
            trained(device, STRATEGIES[name](), 2, before=lambda index: delay(device, 2.5 * (index == 1)))
    return {}


def late_rank(device: torch.device) -> dict[str, Any]:
    """Of two ranks one is late, in turns."""
    rank, late = dist.get_rank(), 3.0 if device.type == "cuda" else 0.1
    for name in ("zero1", "ddp", "acco"):
        trained(
            device,
            STRATEGIES[name](),
            4,
            group=on_one_device(),
            before=lambda index: time.sleep(late * (index == 3 and rank == 1)),
        )
    return {}


def streams(device: torch.device) -> dict[str, Any]:
    """Work on two streams, slow collectives and NaN in memory that is given again, against work that waits."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    wrong = []
    for (name, strategy), wire in itertools.product(STRATEGIES.items(), ("fp32", "bf16", "int8")):
        beside = trained(device, strategy(), wire=wire, group=Lasting(device, 0.002))
        apart = trained(device, strategy(), wire=wire, group=SoloGroup(), waits=True)
        wrong += [f"{name} {wire}"] * (not same(beside, apart))
    expect(not wrong, f"other bits beside than apart: {', '.join(wrong)}")
    return {"runs": 2 * 3 * len(STRATEGIES)}


def synchronising(device: torch.device) -> dict[str, Any]:
    """Calls in an update that make the host wait, by line, for few and for many buckets: as many, without guards.

    Those that ask whether a collective is over are told, and not compared.
    """
    found: dict[str, Any] = {}
    for name, wire, guards in (
        ("ddp", "fp32", ()),
        ("zero1", "fp32", ()),
        ("acco", "fp32", ()),
        ("acco", "int8", ()),
        ("zero1", "fp32", "standard"),
    ):
        counts, reads = [], []
        for bucket_bytes in (2**22, 2**10):
            counted = Synchronisations(device)
            group = counted.on(SoloGroup())
            with counted.watching():
                model = network(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
                parallel = st.DataParallel(
                    model, optimizer, STRATEGIES[name](), micro_batches=MICRO_BATCHES, group=group,
                    wire=wire, guards=guards, options=st.Options(bucket_bytes=bucket_bytes),
                )  # fmt: skip
                for index, batch in enumerate(batches(device, 6 * MICRO_BATCHES)):
                    if index == 4 * MICRO_BATCHES:
                        counted.lines.clear()
                    parallel.backward(loss_of(model, batch))
            parallel.finish()
            counts.append(sum(counted.lines.values()) / 2)
            of_works = ("engine/failures.py", "engine/early_reduction.py")
            reads.append({line: n for line, n in counted.lines.items() if not line.startswith(of_works)})
        expect(bool(guards) or reads[0] == reads[1], f"{name} {wire}: waits grow with buckets: {reads}")
        found[f"{name} {wire} {guards or ''}".strip()] = {
            "few": counts[0], "many": counts[1], "lines": dict(counted.lines.most_common(8)),
        }  # fmt: skip
    return found


def times(device: torch.device) -> dict[str, Any]:
    """What an update says of waits, where the truth is known: computing covers collectives that last, or does not."""
    seconds, covered, found = 0.01, 0.1, {}
    for name, busy in (("acco", covered), ("zero1", 0.0)):
        model = network(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        parallel = st.DataParallel(
            model,
            optimizer,
            STRATEGIES[name](),
            micro_batches=2 * MICRO_BATCHES,
            group=Lasting(device, seconds),
        )
        updates = []
        for batch in batches(device, 20 * MICRO_BATCHES):
            loss = loss_of(model, batch)
            delay(device, busy)
            updates.append(parallel.backward(loss))
        synchronize(device)
        updates += parallel.finish() or []
        of_all = [update for update in updates if update is not None]
        found[name] = {
            "exposed": sum(one.exposed_seconds for one in of_all),
            "lane": sum(one.lane_seconds for one in of_all),
            "updates": len(of_all),
        }
    if device.type == "cuda":
        acco, zero1 = found["acco"], found["zero1"]
        expect(acco["lane"] > 0.1 and acco["exposed"] < 0.1 * acco["lane"], f"hidden work is exposed: {acco}")
        expect(zero1["exposed"] > 0.9 * zero1["lane"] > 0.1, f"work that is waited for is hidden: {zero1}")
    return found


def clock(device: torch.device) -> dict[str, Any]:
    """Micro-batches by the clock: as many as the device does while an exchange lasts, and not as the host calls."""
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parallel = st.DataParallel(
        model, optimizer, st.DPU(), micro_batches=st.Clock(minimum=1, maximum=64), group=Lasting(device, 0.02)
    )
    counts = []
    for batch in batches(device, 200):
        loss = loss_of(model, batch)
        delay(device, 0.02)
        if (update := parallel.backward(loss)) is not None:
            counts += update.micro_batches
    parallel.finish()
    largest = max(counts[2:])
    expect(device.type == "cpu" or largest < 16, f"rounds of up to {largest} micro-batches, 64 at most")
    return {"micro-batches": counts}


def two_ranks(device: torch.device) -> dict[str, Any]:
    """Two ranks on one device: they hold the same, and what is hidden is what is shown."""
    found: dict[str, list[Tensor]] = {}
    data = dist.get_rank()  # every rank has its own
    for name, strategy in STRATEGIES.items():
        found[name] = trained(device, strategy(), group=on_one_device(), data=data)
    for name in ("ddp", "zero1"):
        options = st.Options(hide_reductions=False)
        shown = trained(device, STRATEGIES[name](), group=on_one_device(), options=options, data=data)
        expect(same(shown, found[name]), f"{name}: other bits where nothing is hidden")
    for name in set(found) - {"local", "diloco"}:  # between averages these differ
        mine = torch.cat([one.flatten() for one in found[name]])
        both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(both, mine)
        expect(torch.equal(*both), f"{name}: ranks hold different parameters")
    return {}
