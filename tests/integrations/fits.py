"""Modules, loaders and Trainers of Lightning for the tests: small, and as odd as they are told."""

import logging
import warnings
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

import stretto
from tests.integrations.regression import inputs, network

BY_STEPS = {"interval": "step"}


def silence() -> None:
    warnings.simplefilter("ignore")  # Lightning has many
    logging.getLogger("lightning").setLevel(logging.ERROR)


def odd() -> type:
    """Return a class of modules with a small regression, which note what they see.

    Args of an instance:
        none: Batches for which `training_step` returns None, counted over all epochs.
        ends: Batches with which the epoch ends instead.
        stops: Batches at which the training is told to end.
        optimizer: Of PyTorch.
        fails: The batch that is a bad sample.
        schedule: How often the schedule turns.
        logs: Whether it logs the losses of all ranks, and gathers: Lightning has collectives of its own everywhere.
    """
    import lightning

    class Odd(lightning.LightningModule):
        def __init__(
            self,
            none: Set[int] = frozenset(),
            ends: Set[int] = frozenset(),
            stops: Set[int] = frozenset(),
            optimizer: str = "SGD",
            fails: int | None = None,
            schedule: Mapping[str, Any] = BY_STEPS,
            logs: bool = False,
        ) -> None:
            super().__init__()
            self.layers = network()
            self.none, self.ends, self.stops, self.fails = none, ends, stops, fails
            self.kind, self.schedule, self.logs = optimizer, schedule, logs
            self.batch = -1
            self.seen: list[float] = []
            """Rates, validation losses, and squared norms of accumulated gradients, in order."""

        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            self.batch += 1
            self.seen.append(self.optimizers().param_groups[0]["lr"])
            self.trainer.should_stop |= self.batch in self.stops
            return -1 if self.batch in self.ends else None

        def training_step(self, batch: Any, index: int) -> Tensor | None:
            if self.batch == self.fails:
                raise ValueError("a bad sample")
            loss = None if self.batch in self.none else self.loss(batch)
            if self.logs and loss is not None:
                self.log("trained", loss, sync_dist=True)
            return loss

        @property
        def backbone(self) -> Any:
            return self.layers[0]

        def loss(self, batch: Any) -> Tensor:
            return (self.layers(batch[0]).squeeze(-1) - batch[0].sum(1)).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            loss = self.loss(batch)
            self.seen.append(loss.item())
            if self.logs:
                self.log("loss", loss, sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if self.logs:
                self.all_gather(torch.tensor(self.seen[-1]))

        def configure_optimizers(self) -> Any:
            made = getattr(torch.optim, self.kind)(self.parameters(), lr=0.05, weight_decay=0.1)
            turned = torch.optim.lr_scheduler.LinearLR(made, 0.2, total_iters=9)
            return {"optimizer": made, "lr_scheduler": {"scheduler": turned, **self.schedule}}

    return Odd


def looking(instance: Any) -> Any:
    """Return the module with a hook that looks at gradients."""

    def on_after_backward() -> None:
        norms = [p.grad.double().square().sum().item() for p in instance.parameters() if p.grad is not None]
        instance.seen.append(sum(norms))

    instance.on_after_backward = on_after_backward
    return instance


def asking(base: type, hook: str, at: int, ask: Callable[[Any], int | None], **given: Any) -> Any:
    """Return an instance of `base`, a module or a callback, that asks its trainer in the `at`-th call of a hook."""

    class Asks(base):
        calls = 0

    def call(self: Any, *args: Any) -> Any:
        self.calls += 1
        trainer = args[0] if "state_key" in dir(base) else self.trainer
        answer = getattr(super(Asks, self), hook)(*args)
        return ask(trainer) if self.calls == at else answer

    setattr(Asks, hook, call)
    return Asks(**given)


def loader(count: int = 22) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs(count)), batch_size=2)


def trainer_of(kind: str, strategy: Any = None, **settings: Any) -> Any:
    """Return a Trainer under Lightning's DDP, where the kind is "stock", or under ours."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from stretto.integrations.lightning import StrettoStrategy

    options = stretto.Options(timeout_seconds=30)
    own = {"stock": DDPStrategy, "ours": lambda **given: StrettoStrategy(strategy, options=options, **given)}
    return lightning.Trainer(
        **{
            "strategy": own[kind](process_group_backend="gloo"),
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "accumulate_grad_batches": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **settings,
        }
    )
