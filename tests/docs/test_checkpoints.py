"""The code of docs/checkpoints.md saves, goes on to the bit, and is read by plain PyTorch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import checkpoint
from tests.docs.pages import DOCS, code_blocks

SAVE, GO_ON, CONTINUE, READ = code_blocks(DOCS / "checkpoints.md", "tests/docs/test_checkpoints.py")


class Killed(Exception):
    """The end of a process, as near as a test in one process comes to it."""


class Batches:
    """Twelve batches that may end early; the position is the state."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.position = 0
        self.killed_at = killed_at

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 12:
            if self.position == self.killed_at:
                raise Killed
            self.position += 1
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def job(loader: Batches) -> dict[str, Any]:
    """A small job under the names that the page uses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    return {
        "checkpoint": checkpoint,
        "stretto": stretto,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "parallel": stretto.DataParallel(
            model, optimizer, stretto.ACCO(), scheduler=scheduler, micro_batches=2
        ),
        "loader": loader,
        "loss_function": lambda output: output.square().mean(),
    }


def run(block: str, names: dict[str, Any]) -> None:
    exec(compile(block, "docs/checkpoints.md", "exec"), names)


def test_a_run_goes_on_to_the_bit_where_it_was_broken_off() -> None:
    whole, broken, resumed = job(Batches()), job(Batches(killed_at=9)), job(Batches())
    run(SAVE.replace("update.step % 2 == 0", "False"), whole)  # saving changes nothing, so compare with none
    with pytest.raises(Killed):
        run(SAVE, broken)
    run(GO_ON, resumed)
    assert 0 < resumed["restored"].step < whole["parallel"].steps
    assert resumed["restored"].notes == ()
    run(SAVE, resumed)
    assert torch.equal(resumed["model"].weight, whole["model"].weight)
    assert torch.equal(resumed["model"].bias, whole["model"].bias)


def test_a_job_goes_on_in_memory_under_another_strategy() -> None:
    names = job(Batches())
    for batch in names["parallel"].feed(names["loader"], 2):
        names["parallel"].backward(names["model"](batch).square().mean())
    before = names["parallel"]
    run(CONTINUE, names)
    assert (names["parallel"].steps, names["parallel"].strategy) == (before.steps, stretto.DDP())
    run(SAVE.replace("update.step % 2 == 0", "False"), names)
    assert names["parallel"].steps > before.steps
    with pytest.raises(stretto.errors.Finished):
        before.backward(torch.zeros(()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as meant: one process reads
def test_plain_pytorch_reads_model_and_optimizer() -> None:
    saved, loaded = job(Batches()), job(Batches())
    run(SAVE, saved)
    run(GO_ON, loaded)
    names = job(Batches())
    bare = torch.nn.Linear(3, 1)
    plain = torch.optim.AdamW(bare.parameters())
    names.update(bare_model=bare, plain_optimizer=plain)
    run(READ, names)
    assert torch.equal(bare.weight, loaded["model"].weight)
    assert plain.state[bare.weight]["step"] == loaded["restored"].step
    assert plain.state[bare.weight]["exp_avg"].shape == bare.weight.shape
    assert plain.param_groups[0]["lr"] == loaded["scheduler"].get_last_lr()[0]
