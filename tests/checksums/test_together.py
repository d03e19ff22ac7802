"""Digests of many tensors: each is that of its tensor alone, nothing waits, and many layers take no more kernels."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.synchronising import Synchronisations
from stretto import checksums
from stretto.checksums import Seeds, Sums, compared, digest, digests, digests_of_rows, on_host
from stretto.guards.repair import repairs
from tests.checksums.sums import are_alike
from tests.draws import seeds

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.fixture(params=["host", "device"], autouse=True)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Digests as in the host's memory, and as on a device."""
    kind: str = request.param
    if kind == "device":
        monkeypatch.setattr(checksums, "HOSTS", ())
    return kind


def drawn(draw: random.Random, count: int) -> list[Tensor]:
    """Return tensors of random shapes, dtypes and strides, some of them alike."""
    chance = torch.Generator().manual_seed(draw.randrange(2**31))
    tensors = []
    while len(tensors) < count:
        shape = draw.choice([(), (0,), (1,), (7,), (64,), (3, 5), (4096,), (4097, 3), (9000,)])
        for _ in range(draw.randint(1, 3)):
            tensor = torch.randint(-99, 99, shape, generator=chance).to(draw.choice(DTYPES[:2]))
            tensor = tensor.to(draw.choice(DTYPES))
            tensors.append(tensor.t() if tensor.dim() == 2 and draw.random() < 0.5 else tensor)
    return tensors


@pytest.mark.parametrize("seed", seeds(8))
def test_together_tensors_have_the_digests_and_sums_that_they_have_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    for most in ("_BYTES_TOGETHER", "_BYTES_IN_CACHE"):
        monkeypatch.setattr(checksums, most, draw.choice([1, 50_000, 2**26]))
    tensors = drawn(draw, 12)
    alone = [digest(tensor) for tensor in tensors]
    assert on_host(digests(tensors)) == alone
    taken = checksums.checksums(tensors)
    assert on_host([one.digest for one in taken]) == alone
    assert [
        (one, tensor)
        for one, tensor in zip(taken, tensors, strict=True)
        if not are_alike(one.sums, Sums.of(tensor))
    ] == []
    assert compared(taken, tensors) == [(one, one) for one in alone]


@pytest.mark.parametrize("seed", seeds(20))
def test_any_damage_shows_in_the_digest_of_its_tensor_and_in_no_other(seed: int) -> None:
    draw = random.Random(seed)
    tensors = [tensor.contiguous() for tensor in drawn(draw, 6)]
    taken = checksums.checksums(tensors)
    struck = draw.choice([index for index, tensor in enumerate(tensors) if tensor.numel()])
    before = tensors[struck].clone()
    content = tensors[struck].view(-1).view(torch.uint8)
    content[draw.randrange(content.numel())] ^= 1 << draw.randrange(8)
    pairs = compared(taken, tensors)
    assert [index for index, pair in enumerate(pairs) if pair[0] != pair[1]] == [struck]
    assert repairs(taken[struck], tensors[struck])
    assert torch.equal(tensors[struck].view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))


@pytest.mark.parametrize("seed", seeds(8))
def test_a_row_has_the_digest_of_its_bytes_and_seed_wherever_it_lies(seed: int) -> None:
    draw = random.Random(seed)
    count, length = draw.randint(1, 5), draw.choice([1, 8, 77, 4096, 70_001])
    wide = torch.randint(256, (count, length + draw.randint(0, 9)), dtype=torch.uint8)
    seeds = Seeds(draw.randrange(2**64), draw.randrange(2**64))
    rows = wide[:, :length]
    together = on_host([digests_of_rows(rows, seeds)])
    assert together == [digest(row, seeds.of(number)) for number, row in enumerate(rows)]
    equal = rows[:1].expand(8, -1).clone()
    assert len(set(on_host([digests_of_rows(equal, seeds)]))) == 8  # by their seeds


def test_sums_that_have_changed_places_show() -> None:
    words = torch.arange(4096 * 3, dtype=torch.int64).view(3, 4096)
    for other in (words.flip(0), words.flip(1), words.roll(1, 1)):
        assert digest(other.contiguous()) != digest(words)


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "unbind" not in str(func) and "select" not in str(func) and "detach" not in str(func)
        return func(*args, **(kwargs or {}))


def operations(tensors: list[Tensor]) -> int:
    with Operations() as counted:
        checksums.checksums(tensors)
    return counted.count


def test_on_a_device_many_tensors_take_as_few_kernels_as_one_of_each_kind_and_nothing_waits(
    memory: str,
) -> None:
    if memory == "host":
        pytest.skip("read one by one there")

    def layers(count: int) -> list[Tensor]:
        return [torch.ones(shape) for _ in range(count) for shape in ((64, 64), (64,), (9001,))]

    assert (
        operations(layers(50)) <= operations(layers(1)) + 3
    )  # alike ones are put together: one more of each kind
    counted = Synchronisations()
    with counted.watching():
        tensors = layers(4)
        taken = [one.digest for one in checksums.checksums(tensors)]
        digests_of_rows(torch.zeros(3, 80, dtype=torch.uint8, device="cpu") + 1, Seeds(5, 7))
        assert not counted.lines
        on_host([*taken, *digests(tensors)])
    assert sum(counted.lines.values()) == 1
