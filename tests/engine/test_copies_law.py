"""At any moment of any job a copy equals a plain copy and is independent of the job, or is refused in one line.

It holds committed parameters: an estimate is not copied.
"""

import copy
import io
import pickle
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import stretto as st
from stretto.errors import EstimateShown, UsageError
from tests.bits import unequal
from tests.draws import draws, seeds
from tests.errors.tiny import EVERY
from tests.processes import run_ranks


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    "statistics": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "tied": tied,
    "frozen": frozen,
    "normed": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "bfloat16": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16(),
}


def saved_and_loaded(model: nn.Module) -> nn.Module:
    content = io.BytesIO()
    torch.save(model, content)
    content.seek(0)
    loaded: nn.Module = torch.load(content, weights_only=False)
    return loaded


def sent(model: nn.Module) -> nn.Module:
    """As a process receives it: the model moves into shared memory, where what is received lies too."""
    received = pickle.loads(bytes(ForkingPickler.dumps(model)))
    return copy.deepcopy(received)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "average": lambda model: AveragedModel(model).module,
    "to a process": sent,
    "in a list": lambda model: copy.deepcopy({"models": [model]})["models"][0],
}
"""How a model is copied."""


ESTIMATING = ("wp", "acco")
"""Strategies under which a model shows an estimate now and then."""


def state_of(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def nothing(_: "Job") -> None:
    """Do not even look."""


class Job:
    """A job whose every random part follows from a seed, so that two are alike."""

    def __init__(self, seed: int, rank: int) -> None:
        draw = random.Random(seed)
        self.strategy = draw.choice([*EVERY])
        self.kind = draw.choice([*MODELS])
        guards = (
            draw.choice(["standard", ()]) if self.strategy in ("ddp", "zero1", "dpu", "wp", "acco") else ()
        )
        if self.kind == "bfloat16":
            guards = ()
        self.at = draw.randrange(10)
        self.after_forward = draw.random() < 0.3
        self.is_settled = not self.after_forward and draw.random() < 0.5
        self.how = draw.choice([*COPIES])
        torch.manual_seed(seed)
        self.model = MODELS[self.kind]()
        kind = draw.choice([torch.optim.SGD, torch.optim.AdamW])
        self.optimizer = kind([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.parallel = st.DataParallel(
            self.model,
            self.optimizer,
            EVERY[self.strategy],
            micro_batches=2,
            scheduler=self.scheduler,
            guards=guards,
        )
        generator = torch.Generator().manual_seed(seed + 1000 * rank)
        dtype = torch.bfloat16 if self.kind == "bfloat16" else torch.float32
        self.batches = [torch.randn(4, 3, generator=generator).to(dtype) for _ in range(10)]

    def __str__(self) -> str:
        moment = f"micro-batch {self.at}{' after its forward pass' * self.after_forward}"
        return f"{self.strategy} {self.kind} {self.how} at {moment}{', settled' * self.is_settled}"

    def train(self, look: Callable[["Job"], None]) -> list[Tensor]:
        """Train to the end, and look at the drawn moment; return the model's final state."""
        for number, batch in enumerate(self.batches):
            if number == self.at and look is not nothing:
                with self.parallel.settled():
                    self.committed = [parameter.clone() for parameter in self.model.parameters()]
            if number == self.at and not self.after_forward:
                self._look(look)
            loss = loss_of(self.model, batch)
            if number == self.at and self.after_forward:
                self._look(look)
            self.parallel.backward(loss)
        self.parallel.finish()
        return state_of(self.model)

    def _look(self, look: Callable[["Job"], None]) -> None:
        with self.parallel.settled() if self.is_settled else nullcontext():
            look(self)


def one_case(seed: int, rank: int) -> None:
    expected = Job(seed, rank).train(nothing)
    job = Job(seed, rank)
    found: list[tuple[nn.Module, list[Tensor]]] = []

    def look(job: Job) -> None:
        present = state_of(job.model)
        try:
            twin = COPIES[job.how](job.model)
        except EstimateShown as error:
            told = str(error)
            assert re.match(r"rank \d, after step \d+: .*parallel\.settled", told), told
            assert job.strategy in ESTIMATING, job
            for take in (COPIES[job.how], nn.Module.state_dict):
                with pytest.raises(EstimateShown):
                    take(job.model[0])
            return
        assert job.strategy not in ESTIMATING or unequal(job.model.parameters(), job.committed) == [], job
        assert unequal(state_of(twin), present) == [], job
        assert [parameter for parameter in twin.parameters() if parameter.grad is not None] == [], job
        plain = MODELS[job.kind]()
        plain.load_state_dict(twin.state_dict())
        for model in (plain, twin):
            train_plainly(model)
        assert unequal(state_of(plain), state_of(twin)) == [], job
        found.append((twin, state_of(twin)))

    assert unequal(job.train(look), expected) == [], job
    for twin, left in found:
        assert unequal(state_of(twin), left) == [], job
        train_plainly(twin)  # also after the job's end
        assert unequal(state_of(twin), left) != [], job


def train_plainly(model: nn.Module) -> None:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for number in range(2):
        batch = torch.full((4, 3), 0.1 + number) + torch.arange(4)[:, None]
        loss_of(model, batch.to(next(model.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long(keep=6)
@pytest.mark.parametrize("seed", seeds(120))
def test_a_copy_of_the_model_equals_a_plain_one_and_is_independent_of_the_job(seed: int) -> None:
    one_case(seed, 0)


def two_ranks(rank: int) -> None:
    for seed in draws(32):
        one_case(seed, rank)


def test_on_two_ranks_a_copy_of_the_model_is_independent_of_the_job() -> None:
    run_ranks(2, two_ranks)


REFUSED: dict[str, Callable[[Job], Any]] = {
    "job": lambda job: job.parallel,
    "what holds the job": lambda job: {"trainer": [job.parallel]},
    "optimizer": lambda job: job.optimizer,
    "scheduler": lambda job: job.scheduler,
    "model and optimizer": lambda job: [job.model, job.optimizer],
}
TAKE: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda one: torch.save(one, io.BytesIO()),
    "to a process": ForkingPickler.dumps,
}


def refused_cases(seed: int) -> Iterator[tuple[str, str]]:
    """Yield what is copied, and how, where a copy would be one of the job or of its optimizer."""
    draw = random.Random(seed)
    for _ in range(4):
        what, how = draw.choice([*REFUSED]), draw.choice([*TAKE])
        if how != "copy" or what in ("job", "optimizer"):
            yield what, how


@pytest.mark.parametrize("seed", seeds(40))
def test_a_copy_of_the_job_or_of_its_optimizer_is_refused_in_one_line_and_changes_nothing(seed: int) -> None:
    expected = Job(seed, 0).train(nothing)

    def look(job: Job) -> None:
        for what, how in refused_cases(seed):
            with pytest.raises(UsageError) as caught:
                TAKE[how](REFUSED[what](job))
            said = str(caught.value)
            assert len(said.splitlines()) == 1
            assert "checkpoint.save" in said or isinstance(caught.value, EstimateShown), (job, what, how)

    assert unequal(Job(seed, 0).train(look), expected) == []


def test_after_the_end_an_optimizer_is_copied_as_in_pytorch_and_the_job_never() -> None:
    job = Job(0, 0)
    job.train(nothing)
    twin = copy.deepcopy(job.scheduler)
    assert twin.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
    pickle.dumps(job.optimizer)
    with pytest.raises(UsageError, match="copy or a pickle of a DataParallel"):
        pickle.dumps(job.parallel)


def test_settings_of_the_scheduler_are_copied_at_any_time() -> None:
    job = Job(0, 0)
    job.train(lambda job: copy.deepcopy(job.scheduler.state_dict()))
