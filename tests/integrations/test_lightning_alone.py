"""What one rank alone asks of Lightning's Trainer: all ranks do it, as under DDP where all of them ask."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto import ACCO, DPU
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import distance, network, values
from tests.integrations.test_lightning import silence
from tests.integrations.test_lightning_ways import loader, trainer_of
from tests.integrations.ways import TOLERANCE
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: stretto[lightning]"
)
HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)
STRATEGIES = {"zero1": None, "acco": ACCO(), "dpu": DPU()}


def asking(base: type, hook: str, at: int, ask: Callable[[Any], int | None]) -> Any:
    """Return an instance of `base`, a module or a callback, that asks its trainer in the `at`-th call of a hook."""

    class Asks(base):
        calls = 0

    def call(self: Any, *args: Any) -> Any:
        self.calls += 1
        trainer = args[0] if "state_key" in dir(base) else self.trainer
        answer = getattr(super(Asks, self), hook)(*args)
        return ask(trainer) if self.calls == at else answer

    setattr(Asks, hook, call)
    return Asks()


def plain() -> type:
    """A module that notes its validation losses."""
    import lightning

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()
            self.seen: list[float] = []

        def loss(self, batch: Any) -> Tensor:
            return (self.layers(batch[0]).squeeze(-1) - batch[0].sum(1)).square().mean()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.loss(batch).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Plain


def stop(trainer: Any) -> None:
    trainer.should_stop = True


def leave(trainer: Any) -> int:
    return -1


def nothing(trainer: Any) -> None:
    pass


def trained(
    kind: str, by: str, hook: str, at: int, ask: Callable[[Any], int | None], **settings: Any
) -> tuple[Any, ...]:
    """Train, while the module or a callback asks; return what it comes to."""
    import lightning.pytorch.callbacks as known

    module = asking(plain(), hook, at, ask) if by == "module" else plain()()
    callbacks = [asking(known.Callback, hook, at, ask)] if by == "callback" else []
    trainer = trainer_of(kind, devices=2, callbacks=callbacks, **settings)
    trainer.fit(module, loader(20), loader(4))
    return values(module), trainer.global_step, trainer.current_epoch, module.seen, trainer


def asked_alone(rank: int, cases: int) -> list[Any]:
    """Have one rank ask under ours, and all ranks under DDP; return both outcomes of each case."""
    draw, found = random.Random(7), []
    for case in range(cases):
        name, asker, at = draw.choice([*STRATEGIES]), draw.randrange(2), draw.randint(1, 7)
        hook, by = draw.choice(HOOKS), draw.choice(["module", "callback"])
        skips = draw.random() < 0.25
        if skips:
            hook, by = "on_train_batch_start", "module"
        settings = {
            "accumulate_grad_batches": draw.choice([2, 3] if name == "acco" else [1, 2, 3]),
            "val_check_interval": draw.choice([1.0, 2]),
            "max_epochs": 3,
        }
        if name != "zero1":
            settings["val_check_interval"] = 1.0  # a validation under way changes their numbers
        ask = leave if skips else stop
        stock = trained("stock", by, hook, at, ask, **settings)
        ours = trained(
            "ours", by, hook, at, ask if rank == asker else nothing, strategy=STRATEGIES[name], **settings
        )
        job = ours[-1].strategy.parallel
        found.append(
            (
                (case, name, asker, hook, at, by, skips, settings),
                stock[:-1],
                ours[:-1],
                job.steps,
                job.job.compute.lifetime.has_finished,
            )
        )
    return found


def two_ranks(rank: int) -> list[Any]:
    as_under_torchrun(rank)
    silence()
    return asked_alone(rank, 40)


@pytest.mark.long
def test_what_one_rank_asks_for_all_ranks_do_as_under_ddp_where_all_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To stop, at any hook of the module or a callback; or to skip the rest of the epoch."""
    monkeypatch.chdir(tmp_path)
    for found in run_ranks(2, two_ranks):
        for case, stock, ours, steps, has_finished in found:
            assert ours[1:3] == stock[1:3], case
            assert has_finished, case
            if case[1] == "zero1":
                assert steps == stock[1], case
                assert distance(ours[0], stock[0]) <= TOLERANCE, case
                assert ours[3] == pytest.approx(stock[3], abs=1e-5), case
