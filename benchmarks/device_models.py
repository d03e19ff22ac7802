"""Checks of what people train on a device: wires, streams of their own, convolutions, compiled models, echoes."""

from typing import Any

import torch
from torch import Tensor, nn

import stretto as st
from benchmarks.device_checks import Lasting, batches, expect, loss_of, network, same, trained
from stretto.exchange import WIRES
from stretto.groups import SoloGroup


def wires(device: torch.device) -> dict[str, Any]:
    """Packed values have a processor's bits, and are read as a processor reads them."""
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(2)).mul_(3)
    wrong = []
    for name, kind in WIRES.items():
        wire, results = kind.of(torch.float32), []
        for where in (torch.device("cpu"), device):
            content = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8, device=where)
            wire.write(values.to(where), content)
            results.append([content.cpu(), wire.read(content).float().cpu()])
        wrong += [name] * (not same(*results))
    expect(not wrong, f"other bits than a processor's: {', '.join(wrong)}")
    return {"wires": sorted(WIRES)}


def own_stream(device: torch.device) -> dict[str, Any]:
    """A loop on a stream of the user's own has the bits of one on the default stream."""
    expected = trained(device, st.ACCO(), group=SoloGroup())
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            found = trained(device, st.ACCO(), group=Lasting(device, 0.002))
    else:
        found = trained(device, st.ACCO(), group=Lasting(device, 0.002))
    expect(same(expected, found), "other bits on a stream of the user's own")
    return {}


def convolutions(device: torch.device) -> dict[str, Any]:
    """channels_last, BatchNorm and recomputation, against a plain loop."""
    torch.use_deterministic_algorithms(True)

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
        return nn.Sequential(*layers).to(device, memory_format=torch.channels_last)

    def loss(network: nn.Module, image: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(network, image, use_reentrant=False).square().mean()

    draws = torch.Generator().manual_seed(3)
    images = [torch.randn(4, 3, 8, 8, generator=draws).to(device) for _ in range(12)]
    images = [image.contiguous(memory_format=torch.channels_last) for image in images]
    plain, ours = model(), model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    parallel = st.DataParallel(
        ours, torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9), micro_batches=2, group=SoloGroup()
    )
    for index, image in enumerate(images):
        (loss(plain, image) / 2).backward()
        parallel.backward(loss(ours, image))
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    parallel.finish()
    pairs = zip(plain.state_dict().values(), ours.state_dict().values(), strict=True)
    expect(all(torch.equal(one, other) for one, other in pairs), "other bits than a plain loop")
    return {}


def compiled(device: torch.device) -> dict[str, Any]:
    """A compiled model trains to the bits of the same model, compiled, in a plain loop."""
    found = {}
    for mode in ("default", "reduce-overhead") if device.type == "cuda" else ("eager",):
        ways = {"backend": "eager"} if mode == "eager" else {"mode": mode}
        plain, ours = network(device), network(device)
        optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
        parallel = st.DataParallel(
            ours, torch.optim.SGD(ours.parameters(), lr=1e-2), micro_batches=1, group=SoloGroup()
        )
        plain.compile(**ways)
        ours.compile(**ways)
        for batch in batches(device, 8):
            loss_of(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            parallel.backward(loss_of(ours, batch))
        parallel.finish()
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        found[mode] = all(torch.equal(one, other) for one, other in pairs)
    expect(all(found.values()), f"other bits than a plain loop: {found}")
    return found


def echoed(device: torch.device) -> dict[str, Any]:
    """Batches that are used again, pinned and placed on the device, are those that were loaded."""
    held = [batch.cpu() for batch in batches(device, 12)]
    loader = st.EchoLoader(
        torch.utils.data.DataLoader(held, batch_size=None, pin_memory=device.type == "cuda"),
        st.Even(2),
    )
    model = network(device)
    parallel = st.DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=1e-2), micro_batches=2, group=SoloGroup()
    )
    seen = []
    for batch in parallel.feed(loader):
        there = batch.to(device, non_blocking=True)
        parallel.backward(loss_of(model, there))
        seen.append(there)
    parallel.finish()
    known = [any(torch.equal(one.cpu(), batch) for batch in held) for one in seen]
    expect(len(seen) > len(held) and all(known), f"{len(seen)} batches, {sum(known)} of them were loaded")
    return {"uses": len(seen), "loaded": len(held)}
