"""Modules whose buffers take their kind while training, and which load by a rule of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import DataParallel, Options, checkpoint
from stretto.errors import TornCheckpoint
from tests.bits import unequal


class Late(nn.Module):
    """Takes its scale from the first batch, as observers of quantisers do."""

    def __init__(self, scale: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None or not self.scale.numel():
            self.scale = x.abs().amax(0)
        return self.layer(x / self.scale)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            self.scale = torch.empty_like(state[prefix + "scale"])
        super()._load_from_state_dict(state, prefix, *rest)


def job_of(scale: Tensor | None) -> tuple[nn.Module, DataParallel]:
    model = nn.Sequential(Late(None if scale is None else scale.clone()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, DataParallel(model, optimizer, options=Options(bucket_bytes=1024))


def train(model: nn.Module, job: DataParallel, updates: range) -> None:
    for update in updates:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(update))
        job.backward((model(x) - x.sum(1, keepdim=True)).square().mean())


@pytest.mark.parametrize("scale", [None, torch.empty(0)], ids=["none", "empty"])
def test_they_load_into_a_fresh_model_and_go_on_to_the_bit(scale: Tensor | None, tmp_path: Path) -> None:
    model, job = job_of(scale)
    train(model, job, range(3))
    checkpoint.save(job, tmp_path)
    train(model, job, range(3, 6))
    job.finish()
    again, job = job_of(scale)
    checkpoint.load(job, tmp_path)
    train(again, job, range(3, 6))
    job.finish()
    assert unequal(model.state_dict().values(), again.state_dict().values()) == []


def test_a_damaged_checkpoint_leaves_them_as_they_were(tmp_path: Path) -> None:
    model, job = job_of(None)
    train(model, job, range(3))
    path = checkpoint.save(job, tmp_path)
    job.finish()
    (data,) = path.glob("*.share")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    fresh, job = job_of(None)
    with pytest.raises(TornCheckpoint):
        checkpoint.load(job, tmp_path)
    assert fresh[0].scale is None
