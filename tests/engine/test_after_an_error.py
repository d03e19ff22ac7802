"""After an error, at every moment of a round, what the model gives away is a committed update, or it is refused."""

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto import checkpoint
from stretto.errors import ConfigError, EstimateShown, PeerFailed
from stretto.strategies import STRATEGIES, DiLoCo, Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import draws, part

EVERY: dict[str, Callable[[], Strategy]] = {**STRATEGIES, "diloco": lambda: DiLoCo(interval=2)}
BATCHES = 11
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "of a part": lambda model: {f"0.{name}": value for name, value in model[0].state_dict().items()},
    "copy": lambda model: copy.deepcopy(model).state_dict(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).state_dict(),
}


class Unlucky(Exception):
    """What the user's code raises."""


class Raises(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise Unlucky


class Run:
    """One rank's job, which ends by an error at a moment of its own."""

    def __init__(
        self, group: dist.ProcessGroup | None, strategy: Strategy, model: nn.Module | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.parallel = stretto.DataParallel(
            self.model, self.optimizer, strategy, micro_batches=2, group=group
        )
        self.committed: list[Any] = [self.values()]
        self.folder: Path | None = None

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def note(self, fails_at: int, where: str, update: stretto.Update) -> None:
        with self.parallel.settled():
            self.committed.append(self.values())
        if self.folder is not None and update.step == 2:
            checkpoint.save(self.parallel, self.folder)
        with self.parallel.settled():
            if where == "settled" and update.step == fails_at // 2:
                raise Unlucky
        if where == "on_update" and update.step == fails_at // 2:
            raise Unlucky

    def train(self, rank: int, fails_at: int, where: str) -> Iterator[None]:
        generator = torch.Generator().manual_seed(rank)
        batches = [torch.randn(2, 3, generator=generator) for _ in range(BATCHES)]
        note = functools.partial(self.note, fails_at, where)
        for number, batch in enumerate(self.parallel.feed(batches, on_update=note)):
            if number == fails_at and where == "body":
                raise Unlucky
            loss = self.model(batch).square().mean()
            if number == fails_at and where == "forward":
                raise Unlucky
            if number == fails_at and where == "backward":
                loss = Raises.apply(loss)
            if number == fails_at and where == "nan":
                loss = loss * torch.nan
            self.parallel.backward(loss)
            yield


def is_one_of(found: dict[str, Tensor], committed: list[Any]) -> bool:
    return any(all(torch.equal(found[name], one[name]) for name in found) for one in committed)


def shows_estimate(model: nn.Module) -> bool:
    try:
        model.state_dict()
    except EstimateShown:
        return True
    return False


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", EVERY)
def test_after_an_error_what_the_model_gives_away_is_committed_or_refused(name: str) -> None:
    def program(rank: int, group: dist.ProcessGroup) -> Any:
        run = Run(group, EVERY[name]())
        block: Any = run.parallel if has_with else contextlib.nullcontext()
        with contextlib.suppress(Exception), block:
            for _ in run.train(rank, fails_at if rank in unlucky else -9, where):
                pass
        if not has_with:
            run.parallel.fail(Unlucky())
        given: dict[str, Any] = dict.fromkeys(WAYS, "refused")
        for way, call in WAYS.items():
            with contextlib.suppress(EstimateShown):
                given[way] = call(run.model)
        return given, run.committed

    for seed in draws(40, 4):
        draw = random.Random(f"{name} {seed}")
        world_size, has_with = draw.randint(1, 2), draw.random() < 0.5
        fails_at = draw.randrange(2, BATCHES)
        where = draw.choice(("body", "forward", "backward", "nan", "on_update", "settled"))
        unlucky = draw.sample(range(world_size), draw.randint(1, world_size))
        case = f"{name}, seed {seed}: {world_size} ranks, {unlucky} fail in {where} of {fails_at}, with={has_with}"
        found = VirtualCluster(world_size).run(program).values
        for rank, (given, committed) in enumerate(found):
            told = (
                [one for _, others in found for one in others] if name in ("average", "diloco") else committed
            )
            for way, value in given.items():
                if name in ("average", "diloco", "paft-sync", "paft-dyn", "local") and value != "refused":
                    continue  # a replica of this rank's own is what it has trained
                assert value == "refused" or is_one_of(value, told), f"{case}: rank {rank}, {way}: no update"
        if name in ("zero1", "ddp", "dpu"):
            assert "refused" not in [value for given, _ in found for value in given.values()], case


@pytest.mark.parametrize("name", part(["acco", "wp"]))
def test_a_new_job_over_an_estimate_trains_once_committed_values_are_loaded(
    name: str, tmp_path: Path
) -> None:
    def program(rank: int, group: dist.ProcessGroup, way: str) -> Any:
        run = Run(group, EVERY[name]())
        run.folder = folder
        with contextlib.suppress(Unlucky), run.parallel:
            for number, _ in enumerate(run.train(rank, -9, "")):
                if number >= 6 and shows_estimate(run.model):
                    raise Unlucky
        if way == "weights":
            run.model.load_state_dict(run.committed[-1])
            assert is_one_of(run.model.state_dict(), run.committed[-1:])
        again = Run(group, EVERY[name](), run.model)
        before = checkpoint.load(again.parallel, folder).step if way == "checkpoint" else 0
        try:
            for _ in again.train(rank, -9, ""):
                pass
            again.parallel.finish()
        except (EstimateShown, PeerFailed) as error:
            return str(error)
        return again.parallel.steps - before

    for way in ("weights", "checkpoint", "nothing"):
        folder = tmp_path / way
        found = VirtualCluster(2).run(functools.partial(program, way=way)).values
        if way == "nothing":
            assert "load a checkpoint into a new DataParallel, or weights" in found[0]
        else:
            assert found in ((6, 6), (7, 7)), way  # of what was saved amid an update, the rest comes first


@pytest.mark.parametrize("name", ["acco", "wp"])
def test_a_dropped_job_leaves_no_estimate_that_can_be_taken_for_an_update(name: str) -> None:
    run = Run(None, EVERY[name]())
    model, feed = run.model, run.train(0, -9, "")
    for number in itertools.count():
        next(feed)
        if number >= 6 and shows_estimate(run.model):
            break
    with pytest.raises(ConfigError, match="has not ended"):
        Run(None, EVERY[name](), model)
    del run, feed
    gc.collect()
    with pytest.raises(EstimateShown, match="was dropped"):
        model.state_dict()
    with pytest.raises(EstimateShown, match="was dropped"):
        next(Run(None, EVERY[name](), model).train(0, -9, ""))
