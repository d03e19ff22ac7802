"""What is saved loads: settings of optimizers and extra states of modules, whatever they are and become."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto import checkpoint
from stretto.engine.state import JobState
from stretto.errors import CheckpointError
from stretto_lab.virtual import VirtualCluster
from tests.draws import draws, part

KINDS = ("tensor", "scalar tensor", "number", "text", "none", "bytes")


def drawn(draws: random.Random, depth: int = 0, kinds: tuple[str, ...] = KINDS) -> Any:
    """Return a value that may be a setting."""
    kind = draws.choice(kinds + ("list", "tuple", "dictionary") * (depth < 2))
    if kind in ("list", "tuple"):
        values = [drawn(draws, depth + 1, kinds) for _ in range(draws.randrange(3))]
        return values if kind == "list" else tuple(values)
    if kind == "dictionary":
        keys = draws.sample(["a", "b.c", "", 7, "state"], draws.randrange(4))
        return {key: drawn(draws, depth + 1, kinds) for key in keys}
    dtype = draws.choice([torch.float32, torch.uint8, torch.bfloat16, torch.bool])
    shape = [draws.randrange(4) for _ in range(draws.randrange(1, 3))]
    return {
        "tensor": torch.full(shape, draws.randrange(2)).to(dtype),
        "scalar tensor": torch.tensor(draws.random()),
        "number": draws.choice([1, 2.5, True, -3]),
        "text": draws.choice(["", "decay"]),
        "none": None,
        "bytes": bytes(draws.randrange(5)),
        "stream": io.BytesIO(bytes(draws.randrange(5))),
    }[kind]


def are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return (
            isinstance(left, Tensor)
            and isinstance(right, Tensor)
            and left.dtype == right.dtype
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            are_equal(value, right[key]) for key, value in left.items()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return bool(left.getvalue() == right.getvalue() if isinstance(left, io.BytesIO) else left == right)


class Extra(nn.Linear):
    """A layer with a state of its own, which may become another one in training."""

    def __init__(self, state: Any, later: Any) -> None:
        super().__init__(2, 2)
        self.state, self.later = state, later

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.state = self.later
        return super().forward(input)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def job(seed: int, group: dist.ProcessGroup) -> stretto.DataParallel:
    draws = random.Random(seed)
    torch.manual_seed(seed)
    kinds = (*KINDS, "stream")
    model = nn.Sequential(*(Extra(*(drawn(draws, kinds=kinds) for _ in range(2))) for _ in range(2)))
    rate = draws.choice([0.1, torch.tensor(0.1)])
    groups: list[Any] = [{"params": list(layer.parameters())} for layer in model]
    optimizer = draws.choice([torch.optim.AdamW, torch.optim.SGD])(groups, lr=rate, foreach=False)
    schedules = torch.optim.lr_scheduler
    scheduler = draws.choice([None, schedules.ExponentialLR(optimizer, 0.9)])
    for settings in optimizer.param_groups:
        settings["mine"] = drawn(draws)
    return stretto.DataParallel(model, optimizer, scheduler=scheduler, group=group)


def train(parallel: stretto.DataParallel, seed: int, updates: range) -> None:
    for step in updates:
        draws = random.Random(1000 * seed + step)
        for settings in parallel.optimizer.param_groups:
            settings["mine"] = drawn(draws)
            if parallel.scheduler is None and step % 2:
                settings["lr"] = torch.tensor(0.1 / (1 + step))
        parallel.backward(parallel.model(torch.ones(1, 2)).square().sum())


def held(parallel: stretto.DataParallel) -> list[Any]:
    """Return everything that a checkpoint should bring back."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in parallel.optimizer.param_groups
    ]
    layers = list(parallel.model)
    return [
        groups,
        [layer.state for layer in layers],
        [p.detach().clone() for p in parallel.model.parameters()],
    ]


@pytest.mark.parametrize("world_size", part([1, 2]))
def test_settings_and_extra_states_come_back_as_they_were_and_training_goes_on_to_the_bit(
    world_size: int, tmp_path: Path
) -> None:
    def program(rank: int, group: dist.ProcessGroup) -> None:
        for seed in draws(24):
            folder = tmp_path / f"{world_size}-{seed}"
            parallel = job(seed, group)
            train(parallel, seed, range(3))
            checkpoint.save(parallel, folder)
            saved = held(parallel)
            resumed = job(seed, group)
            checkpoint.load(resumed, folder)
            assert are_equal(held(resumed), saved), seed
            for one in (parallel, resumed):
                train(one, seed, range(3, 5))
                one.finish()
            assert are_equal(held(resumed), held(parallel)), seed

    VirtualCluster(world_size).run(program)


def test_a_rate_that_several_groups_share_is_shared_behind_a_checkpoint_too(tmp_path: Path) -> None:
    def job() -> stretto.DataParallel:
        model = nn.Linear(2, 2)
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        return stretto.DataParallel(model, torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False))

    saving, loading = job(), job()
    saving.optimizer.param_groups[0]["lr"].fill_(0.5)
    checkpoint.save(saving, tmp_path)
    checkpoint.load(loading, tmp_path)
    first, second = (group["lr"] for group in loading.optimizer.param_groups)
    assert first is second
    assert float(first) == 0.5


def test_a_job_that_could_not_load_what_it_saves_learns_it_at_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    class Restless(nn.Linear):
        """A model whose entries are others each time that they are asked for."""

        calls = 0

    def renamed(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        Restless.calls += 1
        state[f"call {Restless.calls}"] = torch.zeros(2)

    model = Restless(2, 2)
    model.register_state_dict_post_hook(renamed)
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    parallel.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(CheckpointError, match=r"planning to load the checkpoint.*'call"):
        checkpoint.save(parallel, tmp_path)
    assert checkpoint.latest(tmp_path) is None
    parallel.finish()


def test_a_load_is_planned_once_for_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blanks: list[int] = []
    blank = JobState.blank
    monkeypatch.setattr(JobState, "blank", lambda self, stored: blanks.append(1) or blank(self, stored))
    model = nn.Linear(2, 2)
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        checkpoint.save(parallel, tmp_path)
    parallel.finish()
    assert len(blanks) == 1
