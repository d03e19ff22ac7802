"""Modules whose buffers take their kind while training: what passes a save loads into a fresh model."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import ACCO, DataParallel, Options, ZeRO1, checkpoint
from stretto.errors import CheckpointError, TornCheckpoint
from tests.bits import unequal
from tests.draws import draws

FIRST = {"none": None, "empty": torch.empty(0), "whole": torch.ones(4), "short": torch.ones(2, 4)}


class Late(nn.Module):
    """Takes buffers while training, as observers, caches and banks do; a subclass loads by a rule of its own."""

    def __init__(self, first: str, how: str, begins: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("bank", None if (one := FIRST[first]) is None else one.clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.how, self.begins = how, begins

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > self.begins and self.how == "scale":
            self.bank = x.abs().amax(0).detach()
        elif self.calls > self.begins and self.how == "grow" and self.bank is not None:
            self.bank = torch.cat([self.bank.reshape(-1, 4), x.detach()])
        elif self.calls > self.begins and self.how == "register" and not hasattr(self.layer, "seen"):
            self.layer.register_buffer("seen", x.detach().sum(0))
        elif self.bank is not None:
            self.bank += x.detach().sum()
        return self.layer(x)


class Own(Late):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "bank" in state:
            self.bank = torch.empty_like(state[prefix + "bank"])
        super()._load_from_state_dict(state, prefix, *rest)


def job_of(seed: int) -> tuple[nn.Module, DataParallel]:
    draw = random.Random(seed)
    kind, first, begins = draw.choice([Late, Own]), draw.choice([*FIRST]), draw.randrange(9)
    model = nn.Sequential(kind(first, draw.choice(["scale", "grow", "register", "no"]), begins))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    strategy, options = draw.choice([ZeRO1(), ACCO()]), Options(bucket_bytes=1024)
    return model, DataParallel(model, optimizer, strategy, micro_batches=2, options=options)


def train(model: nn.Module, job: DataParallel, number: int, until: int) -> int:
    """Train up to an update, beginning with a batch; return the number of the next."""
    while job.steps < until:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        job.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        number += 1
    return number


def test_what_passes_a_save_loads_as_in_plain_pytorch_and_all_else_is_refused_at_once(tmp_path: Path) -> None:
    """A model that plain PyTorch loads continues to the bit, and a damaged checkpoint leaves it as it was."""
    for seed in draws(60):
        model, job = job_of(seed)
        fresh, again = job_of(seed)
        at = 1 + seed % 5
        for saved in (0, at):
            number = train(model, job, 0, saved)
            try:
                with job.settled():
                    fresh.load_state_dict(model.state_dict())
                loads = {name: one.dtype for name, one in fresh.state_dict().items()}
            except RuntimeError:
                loads = {}
            if loads:
                checkpoint.save(job, tmp_path / str(seed))
                continue
            with pytest.raises(CheckpointError, match=r"fresh model does not load .*: give buffers that"):
                checkpoint.save(job, tmp_path / str(seed))
        again.leave()
        fresh, again = job_of(seed)
        before = {name: one.clone() for name, one in fresh.state_dict().items()}
        data = max((tmp_path / str(seed)).rglob("*.share"))
        content = data.read_bytes()
        data.write_bytes(
            content[: len(content) // 2] + bytes(255 - one for one in content[len(content) // 2 :])
        )
        with pytest.raises(TornCheckpoint):
            checkpoint.load(again, tmp_path / str(seed))
        assert unequal(fresh.state_dict().values(), before.values()) == [], f"{seed}: damaged, and yet loaded"
        data.write_bytes(content)
        restored = checkpoint.load(again, tmp_path / str(seed))
        assert restored.step == (at if loads else 0), seed
        if loads:
            for one, other in ((model, job), (fresh, again)):
                train(one, other, number, 7)
                other.finish()
            assert unequal(model.state_dict().values(), fresh.state_dict().values()) == [], seed
