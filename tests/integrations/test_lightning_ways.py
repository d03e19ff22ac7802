"""`StrettoStrategy` where Lightning's Trainer does something odd: equal to its own DDP, or refused at the start."""

import copy
import importlib.util
import random
import warnings
from collections.abc import Callable, Set
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO
from tests.integrations.callbacks import differences, of_lightning
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import distance, inputs, network, said, values
from tests.integrations.test_lightning import silence
from tests.integrations.ways import TOLERANCE
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: stretto[lightning]"
)
KINDS = ("stock", "ours")


def module(
    none: Set[int] = frozenset(),
    ends: Set[int] = frozenset(),
    stops: Set[int] = frozenset(),
    optimizer: str = "SGD",
    fails: int | None = None,
) -> Any:
    """Return a module that notes what it sees.

    Args:
        none: Batches for which `training_step` returns None, counted over all epochs.
        ends: Batches with which the epoch ends instead.
        stops: Batches at which the training is told to end.
        optimizer: Of PyTorch.
        fails: The batch that is a bad sample.
    """
    import lightning

    class Odd(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()
            self.batch = -1
            self.seen: list[float] = []
            """Rates, validation losses, and squared norms of accumulated gradients, in order."""

        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            self.batch += 1
            self.seen.append(self.optimizers().param_groups[0]["lr"])
            self.trainer.should_stop |= self.batch in stops
            return -1 if self.batch in ends else None

        def training_step(self, batch: Any, index: int) -> Tensor | None:
            if self.batch == fails:
                raise ValueError("a bad sample")
            return None if self.batch in none else self.loss(batch)

        @property
        def backbone(self) -> Any:
            return self.layers[0]

        def loss(self, batch: Any) -> Tensor:
            return (self.layers(batch[0]).squeeze(-1) - batch[0].sum(1)).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.seen.append(self.loss(batch).item())

        def configure_optimizers(self) -> Any:
            made = getattr(torch.optim, optimizer)(self.parameters(), lr=0.05, weight_decay=0.1)
            turned = torch.optim.lr_scheduler.LinearLR(made, 0.2, total_iters=9)
            return {"optimizer": made, "lr_scheduler": {"scheduler": turned, "interval": "step"}}

    return Odd()


def looking(instance: Any) -> Any:
    """Return the module with a hook that looks at gradients."""

    def on_after_backward() -> None:
        norms = [p.grad.double().square().sum().item() for p in instance.parameters() if p.grad is not None]
        instance.seen.append(sum(norms))

    instance.on_after_backward = on_after_backward
    return instance


def loader(count: int = 22) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs(count)), batch_size=2)


def trainer_of(kind: str, strategy: Any = None, **settings: Any) -> Any:
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


def fit(kind: str, instance: Any, **settings: Any) -> Any:
    trainer = trainer_of(kind, **settings)
    trainer.fit(instance, loader(), loader(4))
    return trainer


def odd_runs(devices: int, cases: int) -> list[Any]:
    """Random batches that are left out, epochs that end early, trainings that stop; return both kinds' ends.

    On several ranks Lightning lets nobody leave a batch out.
    """
    draw, found = random.Random(devices), []
    for _case in range(cases):
        rate = draw.choice([0.1, 0.4, 0.8]) if devices == 1 else 0.0
        odd = {
            "none": {index for index in range(30) if draw.random() < rate},
            "ends": {draw.randrange(14)} if draw.random() < 0.5 else set(),
            "stops": {draw.randrange(3, 14)} if draw.random() < 0.3 else set(),
            "optimizer": draw.choice(["SGD", "AdamW"]),
        }
        settings = {
            "accumulate_grad_batches": draw.choice([1, 2, 3, 4]),
            "val_check_interval": draw.choice([1.0, 3]),
        }
        ends = []
        for kind in KINDS:
            instance = module(**odd)
            trainer = trainer_of(kind, devices=devices, **settings)
            trainer.fit(looking(instance) if devices == 1 else instance, loader(14 * devices), loader(2))
            ends.append((values(instance), trainer.global_step, instance.seen))
        steps = trainer.strategy.parallel.steps
        found.append((distance(ends[0][0], ends[1][0]), ends[0][1:], ends[1][1:], steps))
    return found


def with_callbacks(kind: str, callbacks: list[Any], folder: str, **settings: Any) -> tuple[Any, ...]:
    """Train on two ranks with these callbacks, which see a loss of all ranks; return what it comes to."""
    instance = module()
    instance.register_buffer("note", torch.zeros(3))

    def validation_step(batch: Any, index: int = 0) -> None:
        loss = instance.loss(batch)
        instance.seen.append(loss.item())
        instance.log("loss", loss, sync_dist=True)

    instance.validation_step = validation_step
    for one in callbacks:
        if hasattr(one, "dirpath"):
            one.dirpath = str(Path(kind, folder).resolve())
    trainer = trainer_of(
        kind,
        devices=2,
        callbacks=callbacks,
        enable_checkpointing=any(hasattr(one, "dirpath") for one in callbacks),
        **settings,
    )
    trainer.fit(instance, loader(), loader(4))
    files = sorted(path.name for path in Path(kind, folder).glob("*.ckpt"))
    return [*values(instance), instance.note.clone()], trainer.global_step, files, instance.seen


def averaged(devices: int) -> dict[str, list[tuple[Any, ...]]]:
    """Train with Lightning's averages; return what the model is at the end, and in a file."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

    found: dict[str, list[tuple[Any, ...]]] = {}
    kinds = {"stock": ("stock", None), "zero1": ("ours", None), "acco": ("ours", ACCO())}
    for make in (lambda: EMAWeightAveraging(decay=0.9), WeightAveraging):
        for name, (kind, strategy) in kinds.items():
            callback, instance = make(), module()
            folder = f"average-{devices}-{type(callback).__name__}-{name}"
            saving = ModelCheckpoint(folder, filename="last", every_n_epochs=2)
            settings: dict[str, Any] = {"strategy": strategy} if kind == "ours" else {}
            trainer = trainer_of(
                kind, devices=devices, callbacks=[saving, callback], enable_checkpointing=True, **settings
            )
            trainer.fit(instance, loader(24), loader(8))
            saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
            found.setdefault(type(callback).__name__, []).append(
                (values(instance), instance.seen, list(saved.values()))
            )
    return found


def exceptional(name: str, devices: int, fails: int, *, alone: bool = False) -> tuple[str, list[str]]:
    """Fail at a batch, perhaps on rank 1 alone, with callbacks that save then; return the cause and the files."""
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    folder = f"exception-{name}-{fails}"
    saving = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True)]
    kind = "stock" if name == "stock" else "ours"
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    fails_here = None if alone and rank == 0 else fails
    trainer = trainer_of(kind, devices=devices, callbacks=saving, enable_checkpointing=True)
    cause = said(lambda: trainer.fit(module(fails=fails_here), loader(24), loader(8)))
    return cause, sorted(path.name for path in Path(folder).rglob("*.ckpt"))


def two_ranks(rank: int) -> dict[str, Any]:
    as_under_torchrun(rank)
    silence()
    found: dict[str, Any] = {"averaged": averaged(2)}

    def leaves_out() -> None:
        trainer = trainer_of("ours", devices=2)
        trainer.fit(module(none={3} if rank else set()), loader(24), loader(8))

    found["hook"] = said(lambda: trainer_of("ours", devices=2).fit(looking(module()), loader()))
    found["odd"] = odd_runs(2, 30)
    found["callbacks"] = of_lightning(with_callbacks, 12)
    found["clock"] = {kind: clocked(kind, devices=2) for kind in KINDS}
    found["refused"] = refusals(devices=2)
    found["none"] = said(leaves_out)
    return found


def fails_alone(rank: int, fails: int) -> tuple[str, list[str]]:
    as_under_torchrun(rank)
    silence()
    return exceptional("alone", 2, fails, alone=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("two"))
        return run_ranks(2, two_ranks)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", ["EMAWeightAveraging", "WeightAveraging"])
def test_an_average_is_what_the_model_holds_at_the_end(two: list[dict[str, Any]], name: str) -> None:
    """And what validations see and files hold: to the bit, as all is divided by two; also where updates overlap."""
    (stock, seen, saved), *others = two[0]["averaged"][name]
    for ours, found_seen, found_saved in others[:1]:
        assert found_seen == seen
        assert distance(ours, stock) == distance(found_saved, saved) == 0.0
    for ours, _, found_saved in others[1:]:  # acco adds halves of an update in another order
        assert distance(ours, stock) <= 1e-6
        assert distance(found_saved, saved) <= 1e-6


def test_a_rank_that_alone_leaves_a_batch_out_is_named_to_the_others(two: list[dict[str, Any]]) -> None:
    assert two[1]["none"].startswith("RuntimeError: Skipping the `training_step`")
    assert "rank 1" in two[0]["none"]
    assert "Skipping the `training_step`" in two[0]["none"]


def test_a_hook_that_would_see_the_gradients_of_one_rank_is_refused(two: list[dict[str, Any]]) -> None:
    words = "ConfigError: StrettoStrategy does not work with Odd.on_after_backward: "
    assert [found for found in two if not found["hook"].startswith(words)] == []


@pytest.mark.parametrize("fails", [4, 5])
def test_after_an_exception_on_one_rank_its_cause_is_told_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Between accumulations and inside one, although callbacks ask for files."""
    monkeypatch.chdir(tmp_path)
    (told, files), (cause, _) = run_ranks(2, fails_alone, fails)
    assert cause == "ValueError: a bad sample"
    assert told.startswith("PeerFailed: rank 0")
    assert "rank 1, after step 2: ValueError: a bad sample" in told
    assert files == []


def clocked(kind: str, *, devices: int = 1) -> tuple[Any, ...]:
    """Save after every batch, and go on from the last file inside an accumulation; return what both come to."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = f"clock-{kind}-{devices}"
    every = timedelta(seconds=0)

    def saving() -> Any:
        return ModelCheckpoint(folder, filename="{epoch}-{step}", train_time_interval=every, save_top_k=-1)

    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "enable_checkpointing": True, "max_epochs": 1}
    settings["devices"] = devices
    instance = module()
    trainer = trainer_of(kind, callbacks=[saving()], **settings)
    trainer.fit(instance, loader(22 * devices), loader(4))
    resumed = module()
    trainer_of(kind, callbacks=[saving()], **settings | {"max_epochs": 2}).fit(
        resumed, loader(22 * devices), loader(4), ckpt_path=f"{folder}/epoch=0-step=2.ckpt"
    )
    files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    return values(instance), values(resumed), files


REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "StochasticWeightAveraging": lambda known: {"callbacks": [known.StochasticWeightAveraging(0.1)]},
    "LearningRateFinder": lambda known: {"callbacks": [known.LearningRateFinder()]},
    "GradientAccumulationScheduler": lambda known: {
        "callbacks": [known.GradientAccumulationScheduler({0: 1})],
        "accumulate_grad_batches": 1,
    },
    "BackboneFinetuning": lambda known: {"callbacks": [known.BackboneFinetuning()]},
    "ModelPruning": lambda known: {"callbacks": [known.ModelPruning("l1_unstructured")]},
    "LambdaCallback.on_before_optimizer_step": lambda known: {
        "callbacks": [known.LambdaCallback(on_before_optimizer_step=lambda *_: None)]
    },
    "LambdaCallback.on_after_backward": lambda known: {
        "callbacks": [known.LambdaCallback(on_after_backward=lambda *_: None)],
        "strategy": ACCO(),
    },
    "ModelCheckpoint(train_time_interval=...)": lambda known: {
        "callbacks": [known.ModelCheckpoint(train_time_interval=timedelta(1))],
        "enable_checkpointing": True,
        "strategy": ACCO(),
    },
}


def refusals(devices: int) -> dict[str, str]:
    """Return what is said to each setting that is refused, and to a search for a learning rate."""
    import lightning.pytorch.callbacks as known
    from lightning.pytorch.tuner import Tuner

    found = {
        name: said(lambda settings=settings: fit("ours", module(), devices=devices, **settings(known)))
        for name, settings in REFUSED.items()
    }
    tuner = Tuner(trainer_of("ours", devices=devices))
    found["lr_find"] = said(lambda: tuner.lr_find(module(), loader(), num_training=4))
    return found


def alone(rank: int) -> dict[str, Any]:
    silence()
    warnings.simplefilter("ignore")
    import lightning.pytorch.callbacks as known

    from stretto.integrations.lightning import StrettoStrategy

    found: dict[str, Any] = {"odd": odd_runs(1, 100), "refused": refusals(devices=1)}
    for name in ("ddp_comm_hook", "model_averaging_period", "find_unused_parameters"):
        found["refused"][name] = said(lambda name=name: StrettoStrategy(**{name: 1}))
    found["clock"] = {kind: clocked(kind) for kind in KINDS}
    found["exceptions"] = {(kind, fails): exceptional(kind, 1, fails) for kind in KINDS for fails in (4, 5)}

    class Copies(known.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.trainer = trainer
            found["copies"] = len(copy.deepcopy(trainer.callbacks))

    fit("ours", module(), callbacks=[Copies()])
    by_hand = []
    for kind in KINDS:
        trainer = trainer_of(kind)
        instance = module(fails=5)
        said(lambda trainer=trainer, instance=instance: trainer.fit(instance, loader()))
        trainer.save_checkpoint(f"by-hand-{kind}.ckpt")
        by_hand.append(list(torch.load(f"by-hand-{kind}.ckpt", weights_only=False)["state_dict"].values()))
    found["by hand"] = distance(*by_hand)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process by itself saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        return run_ranks(1, alone, backend=None)[0]


def test_whatever_is_left_out_or_ended_early_counts_as_under_ddp(one: dict[str, Any]) -> None:
    """To the bit: parameters, steps, rates, validation losses, and the gradients that a hook sees."""
    for gap, stock, ours, steps in one["odd"]:
        assert (gap, ours, steps) == (0.0, stock, stock[0])


@pytest.mark.parametrize(
    "name", [*REFUSED, "ddp_comm_hook", "model_averaging_period", "find_unused_parameters"]
)
def test_what_cannot_work_is_refused_before_the_first_batch(one: dict[str, Any], name: str) -> None:
    found = one["refused"][name]
    assert found.startswith(f"ConfigError: StrettoStrategy does not work with {name}: ")
    assert "\n" not in found


def test_two_ranks_refuse_what_one_refuses(two: list[dict[str, Any]]) -> None:
    for found in two:
        for name in REFUSED:
            words = f"ConfigError: StrettoStrategy does not work with {name}: "
            assert found["refused"][name].startswith(words)


def test_the_tuner_is_told_where_to_look_for_a_rate(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for found in (one, *two):
        words = "ConfigError: StrettoStrategy does not work with LearningRateFinder: "
        assert found["refused"]["lr_find"].startswith(words)


def test_a_file_saved_inside_an_accumulation_holds_the_last_update_as_under_ddp(
    one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    """Also on two ranks."""
    for found in (one, two[0]):
        for ours, stock in zip(found["clock"]["ours"][:2], found["clock"]["stock"][:2], strict=True):
            assert distance(ours, stock) == 0.0
        assert found["clock"]["ours"][2] == found["clock"]["stock"][2]


def test_on_two_ranks_what_ends_an_epoch_or_the_training_early_counts_as_under_ddp(
    two: list[dict[str, Any]],
) -> None:
    """Up to rounding: a mean over ranks of three micro-batches is divided in another order."""
    for gap, stock, ours, steps in two[0]["odd"]:
        assert gap <= TOLERANCE
        assert (ours[0], steps) == (stock[0], stock[0])
        assert ours[1] == pytest.approx(stock[1], abs=1e-5)


def test_on_two_ranks_callbacks_do_what_they_do_under_ddp(two: list[dict[str, Any]]) -> None:
    """What they stop, save, choose as the best and write: parameters, steps, files and validations are the same."""
    for name, stock, ours in two[0]["callbacks"]:
        gap, is_same = differences(stock[:3], ours[:3])
        assert gap <= TOLERANCE, name
        assert is_same, (name, stock[1:3], ours[1:3])
        assert ours[3] == pytest.approx(stock[3], abs=1e-5), name


@pytest.mark.parametrize("fails", [4, 5])
def test_after_an_exception_a_process_by_itself_writes_the_files_that_ddp_writes(
    one: dict[str, Any], fails: int
) -> None:
    assert one["exceptions"]["ours", fails] == one["exceptions"]["stock", fails]
    assert one["exceptions"]["ours", fails][1]


def test_callbacks_that_hold_the_trainer_can_be_copied(one: dict[str, Any]) -> None:
    assert one["copies"] == 2  # the own one is before it


def test_a_file_saved_by_hand_after_an_exception_equals_that_of_ddp(one: dict[str, Any]) -> None:
    assert one["by hand"] == 0.0
