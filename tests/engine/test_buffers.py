"""Buffers may become others: what ranks hold alike is averaged, what they do not is each rank's own and never mixed."""

import dataclasses
import math
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto import ACCO, DDP, DPU, DiLoCo, LocalSGD, Options, WeightPrediction, ZeRO1, checkpoint
from stretto.errors import CheckpointError, ConfigError
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster, parse_network
from tests.draws import draws, part

EXACT: tuple[Strategy, ...] = (ZeRO1(), DDP())
OTHERS: tuple[Strategy, ...] = (
    ACCO(),
    DPU(),
    WeightPrediction(),
    LocalSGD(0.5, state=True),
    DiLoCo(2),
    DiLoCo(2, delay=1),
)
UPDATES = 5
Kind = tuple[tuple[int, ...], torch.dtype] | None
"""What a buffer is in one step; None where it is removed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One job."""

    strategy: Strategy
    choice: str
    """What becomes of the second buffer."""
    kinds: tuple[tuple[tuple[Kind, ...], ...], ...]
    """By rank and step, of both buffers."""
    guards: Any
    infinity: float
    until: tuple[int, ...]
    """By rank, the step until which its buffers hold that, as they do at first; then they become finite."""


class Restless(nn.Module):
    """A layer, and two buffers that are made anew in every forward pass, as a script says; infinite at first."""

    def __init__(
        self, rank: int, script: tuple[tuple[Kind, ...], ...], infinity: float = 0.0, until: int = 0
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.rank, self.script, self.calls = rank, script, 0
        self.infinity, self.until = infinity, until
        for index in range(2):
            self.register_buffer(f"buffer{index}", torch.full((2,), infinity))

    def forward(self, input: Tensor) -> Tensor:
        for index, kind in enumerate(self.script[self.calls]):
            self._put(f"buffer{index}", kind)
        self.calls += 1
        return self.layer(input).square().mean()

    def _put(self, name: str, kind: Kind) -> None:
        if kind is None:
            setattr(self, name, None)
            return
        shape, dtype = kind
        held = getattr(self, name)
        if held is not None and held.numel() and bool(held.isfinite().all()):
            self.until = 0  # another rank's value has come: an infinity from then on would be damage
        number = own(self.rank, self.calls) if self.calls >= self.until else self.infinity
        value = torch.full(shape, number, dtype=dtype)
        if self.calls % 2:  # one element for all of them, which cannot be written
            value = torch.full((), number, dtype=dtype).expand(shape)
        is_alike = held is not None and held.shape == value.shape and held.dtype == dtype
        if is_alike and 0 not in held.stride():
            held.copy_(value)  # in place, as running statistics are
        else:
            setattr(self, name, value)


def own(rank: int, step: int) -> float:
    """Return what a rank writes into its buffers in a step: exact in every dtype, and so are means over ranks."""
    return 12.0 * rank + step


def drawn(draw: random.Random, strategies: tuple[Strategy, ...]) -> Case:
    def kind() -> Kind:
        shape = tuple(draw.randrange(4) for _ in range(draw.randrange(3)))
        return draw.choice([None, (shape, torch.float32), (shape, torch.bfloat16), ((2,), torch.float32)])

    strategy, world_size = draw.choice(strategies), draw.randint(1, 3)
    steps = UPDATES * (2 if strategy.name == "acco" else 1)
    common = [(kind(), kind()) for _ in range(steps)]
    lone = draw.choice([0.0, 0.3, 1.0])
    kinds = tuple(
        tuple((kind(), kind()) if draw.random() < lone else step for step in common)
        for _ in range(world_size)
    )
    guards = draw.choice([(), "standard"]) if strategy.name not in ("local", "diloco") else ()
    until = tuple(draw.choice([0, draw.randrange(steps)]) for _ in range(world_size))
    choice, infinity = draw.choice(["mean", "rank0", "alone"]), draw.choice([0.0, math.inf, -math.inf])
    return Case(strategy, choice, kinds, guards, infinity, until)


def train(rank: int, group: dist.ProcessGroup, case: Case) -> tuple[list[Tensor | None], Tensor]:
    torch.manual_seed(0)
    model = Restless(rank, case.kinds[rank], case.infinity, case.until[rank])
    parallel = stretto.DataParallel(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        case.strategy,
        micro_batches=2 if case.strategy.name == "acco" else 1,
        group=group,
        guards=case.guards,
        options=Options(buffers=f"buffer1={case.choice}"),
    )
    generator = torch.Generator().manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in parallel.feed([torch.randn(2, 3, generator=generator) for _ in case.kinds[rank]]):
            parallel.backward(model(batch))
            with parallel.settled():
                pass
        parallel.finish()
    assert model.calls == len(case.kinds[rank]), case
    return [model.buffer0, model.buffer1], model.layer.weight.detach()


def bare(rank: int, group: dist.ProcessGroup, case: Case) -> Tensor:
    """Return the weights of the same job without buffers that change."""
    script = (((((2,), torch.float32)),) * 2,) * len(case.kinds[rank])
    size = len(case.kinds)
    plain = dataclasses.replace(case, kinds=(script,) * size, choice="alone", infinity=0.0)
    return train(rank, group, plain)[1]


def expected(case: Case, rank: int, index: int) -> float | None:
    """Return what a buffer that is there holds at the end; None where the strategy decides it, round by round."""
    last = [kinds[-1][index] for kinds in case.kinds]
    values = [own(other, len(case.kinds[other]) - 1) for other in range(len(last))]
    choice = case.choice if index else "mean"
    if choice == "alone" or (len(set(last)) > 1 and case.strategy in EXACT):
        return values[rank]
    if case.strategy not in EXACT:
        return None
    return values[0] if choice == "rank0" else sum(values) / len(values)


@pytest.mark.parametrize("seed", part(range(4)))
def test_a_buffer_of_one_kind_is_what_its_choice_says_and_another_is_each_ranks_own(seed: int) -> None:
    draw = random.Random(seed)
    for number in draws(40):
        case = drawn(draw, OTHERS if number % 2 else EXACT)
        found = VirtualCluster(len(case.kinds)).run(partial(train, case=case)).values
        weights = VirtualCluster(len(case.kinds)).run(partial(bare, case=case)).values
        for rank, (buffers, weight) in enumerate(found):
            assert torch.equal(weight, weights[rank]), case
            for index, buffer in enumerate(buffers):
                kind, value = case.kinds[rank][-1][index], expected(case, rank, index)
                assert (None if buffer is None else (tuple(buffer.shape), buffer.dtype)) == kind, case
                if buffer is not None and value is not None:
                    assert bool((buffer == value).all()), (case, rank, index)
                elif buffer is not None:
                    most = own(len(case.kinds) - 1, len(case.kinds[rank]) - 1)
                    assert bool(((buffer >= 0) & (buffer <= most)).all()), (case, rank, index)


def test_ranks_whose_buffers_part_are_told_once_which_one_it_is() -> None:
    def program(rank: int, group: dist.ProcessGroup) -> list[str]:
        script = (((((2 + rank,), torch.float32)), ((2,), torch.float32)),) * 3
        model = Restless(rank, script)
        parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        for _ in parallel.feed(range(3)):
            parallel.backward(model(torch.ones(1, 3)))
        parallel.finish()
        return []

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        VirtualCluster(2).run(program)
    told = sorted(str(warning.message) for warning in caught if "buffer" in str(warning.message))
    assert len(told) == 2
    assert "buffer 'buffer0' is torch.float32 of shape (2,) on this rank" in told[0]
    assert "Options(buffers='buffer0=alone')" in told[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("codes=rank0", "fits no floating-point buffer of the model, which has buffer0, buffer1"),
        ("buffer0=rank", "did you mean 'rank0'"),
        ("buffer0", "expected pattern=choice"),
        ("=mean", "expected pattern=choice"),
    ],
)
def test_a_choice_for_no_buffer_or_of_no_kind_is_refused(text: str, message: str) -> None:
    model = Restless(0, ())
    with pytest.raises(ConfigError, match=message):
        stretto.DataParallel(
            model, torch.optim.SGD(model.parameters(), lr=0.1), options=Options(buffers=text)
        )


class Odd(nn.Module):
    """A layer, and a buffer that becomes something whose elements nobody compares."""

    def __init__(self, become: Callable[[], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("buffer0", torch.zeros(2))
        self.become = become

    def forward(self, input: Tensor) -> Tensor:
        self.buffer0 = self.become()
        return self.layer(input).square().mean()


UNCOMPARABLE: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "8 bits": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "negated": lambda: torch._neg_view(torch.ones(3)),
}


@pytest.mark.parametrize("guards", [(), "standard"])
@pytest.mark.parametrize("choice", ["mean", "rank0", "alone"])
@pytest.mark.parametrize("become", UNCOMPARABLE.values(), ids=UNCOMPARABLE)
def test_what_nobody_can_compare_is_each_ranks_own(
    become: Callable[[], Tensor], choice: str, guards: Any
) -> None:
    def program(rank: int, group: dist.ProcessGroup) -> Tensor:
        torch.manual_seed(0)
        model = Odd(become)
        optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), Options(buffers=f"buffer0={choice}")
        parallel = stretto.DataParallel(model, optimizer, group=group, options=options, guards=guards)
        for _ in range(3):
            parallel.micro_batch(model, torch.ones(2, 3))
        parallel.finish()
        assert (model.buffer0.layout, model.buffer0.dtype) == (become().layout, become().dtype)
        return model.layer.weight.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = VirtualCluster(2, parse_network("1gbit,5ms")).run(program).values
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["sparse", "rows", "meta", "nested"])
def test_a_buffer_that_cannot_be_saved_is_told_by_name_at_the_first_checkpoint(
    tmp_path: Path, name: str
) -> None:
    model = Odd(UNCOMPARABLE[name])
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parallel.backward(model(torch.ones(2, 3)))
    with pytest.raises(CheckpointError, match=r"buffer 'buffer0' is sparse, nested or on meta"):
        checkpoint.save(parallel, tmp_path)


class Later(nn.Module):
    """A layer, and a normalization that comes in the second forward pass, with statistics that kernels write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.norm = nn.BatchNorm1d(3, affine=False)
        hidden = self.layer(input)
        return (self.norm(hidden) if self.calls > 1 else hidden).square().mean()


def test_statistics_that_come_later_are_no_damage() -> None:
    model = Later()
    parallel = stretto.DataParallel(
        model, torch.optim.SGD(model.parameters(), lr=0.1), guards="standard", options=Options()
    )
    incidents = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        update = parallel.backward(model(torch.randn(4, 3, generator=generator)))
        incidents += update.incidents if update else ()
    parallel.finish()
    assert incidents == []
