"""`StrettoStrategy` beside Lightning's own DDP, on two ranks: the same data, settings and seeds."""

import dataclasses
import importlib.util
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO, Strategy, WeightPrediction, errors
from tests.bits import unequal
from tests.docs.pages import DOCS, code_blocks
from tests.integrations.language import as_under_torchrun, texts, tiny_gpt2
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: stretto[lightning]"
)
TRAINER, FABRIC = code_blocks(DOCS / "integrations.md", "tests/integrations/test_lightning.py")
EPOCHS = 4
OVERLAPPING = {"acco": ACCO(), "wp": WeightPrediction()}
BY_STEPS = {"interval": "step"}
SELDOM = {"by epochs": {"interval": "epoch"}, "by every eighth batch": {"interval": "step", "frequency": 8}}
"""How often a schedule turns that the job does not turn itself."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one rank saw of one training."""

    losses: list[float]
    """Of each batch."""
    validated: list[float]
    """The loss of each validation, of all ranks."""
    rates: list[float]
    """The learning rate that is shown before each batch."""
    parameters: list[Tensor]
    files: list[str]
    steps: list[tuple[int, int]]
    """After each batch, Lightning's and the job's."""
    turned: list[int]
    """How often the schedule was turned, at the end."""


def module(seen: Run, schedule: Mapping[str, Any] = BY_STEPS) -> Any:
    """A tiny GPT-2 with a warm-up."""
    import lightning

    class Language(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = tiny_gpt2()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.network(**batch).loss
            seen.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.network(**batch).loss, sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                seen.validated.append(self.trainer.callback_metrics["val_loss"].item())

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            seen.rates.append(self.optimizers().param_groups[0]["lr"])

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (job := getattr(self.trainer.strategy, "parallel", None)) is not None:
                seen.steps.append((self.trainer.global_step, job.steps))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-2)
            warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, **schedule}}

    return Language()


def trainer_of(name: str, strategy: Strategy | None = None, keep: int = 2, **settings: Any) -> Any:
    """Return a Trainer under Lightning's DDP, where the name ends with "stock", or under ours."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from stretto.integrations.lightning import StrettoStrategy

    kind = {"process_group_backend": "gloo"}
    saving = ModelCheckpoint(dirpath=name, save_top_k=keep, monitor="val_loss", save_last="link")
    return lightning.Trainer(
        **{
            "strategy": DDPStrategy(**kind) if name.endswith("stock") else StrettoStrategy(strategy, **kind),
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": EPOCHS,
            "accumulate_grad_batches": 4,  # ten batches in an epoch: the last accumulation has two
            "callbacks": [saving],
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        }
    )


def validation() -> Any:
    return torch.utils.data.DataLoader(texts(8, seed=1), batch_size=2)


def train(
    name: str, resume: str | None = None, schedule: Mapping[str, Any] = BY_STEPS, **settings: Any
) -> Run:
    """Train with the Trainer of this name."""
    seen = Run([], [], [], [], [], [], [])
    model = module(seen, schedule)
    torch.manual_seed(1)
    trainer = trainer_of(name, **settings)
    trainer.fit(model, torch.utils.data.DataLoader(texts(40), batch_size=2), validation(), ckpt_path=resume)
    seen.parameters.extend(parameter.detach().clone() for parameter in model.parameters())
    seen.files.extend(sorted(path.name for path in Path(name).iterdir()))
    seen.turned.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
    return seen


def validated(file: str) -> float:
    """The loss of a saved model, as Lightning's own strategy finds it."""
    trainer = trainer_of("reader-stock")
    (metrics,) = trainer.validate(
        module(Run([], [], [], [], [], [], [])), validation(), ckpt_path=file, verbose=False
    )
    loss: float = metrics["val_loss"]
    return loss


def of_the_page() -> dict[str, Any]:
    """Run both blocks of the page, and the loop of Fabric's own documentation."""
    import lightning

    model = module(Run([], [], [], [], [], [], []))
    loader = torch.utils.data.DataLoader(texts(40), batch_size=2)
    names: dict[str, Any] = {"module": model, "loader": loader, "validation": validation()}
    on_cpu = TRAINER.replace(
        "devices=2", "devices=2, accelerator='cpu', logger=False, enable_checkpointing=False"
    )
    exec(compile(on_cpu, "integrations.md", "exec"), names)
    found: dict[str, Any] = {"page": names["trainer"].strategy.parallel.steps}
    for kind in ("fabric-stock", "fabric"):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(texts(32), batch_size=2)
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        if kind == "fabric":
            names = {"fabric": fabric, "model": model, "optimizer": optimizer, "loader": loader}
            names |= {"stretto": stretto, "loss_function": lambda model, batch: model(**batch).loss}
            exec(compile(FABRIC, "integrations.md", "exec"), names)
        else:
            fabric.launch()
            wrapped, stepped = fabric.setup(model, optimizer)
            for index, batch in enumerate(fabric.setup_dataloaders(loader), start=1):
                with fabric.no_backward_sync(wrapped, enabled=index % 4 != 0):
                    fabric.backward(wrapped(**batch).loss / 4)
                if index % 4 == 0:
                    stepped.step()
                    stepped.zero_grad()
        found[kind] = [parameter.detach().clone() for parameter in model.parameters()]
    return found


def silence() -> None:
    warnings.simplefilter("ignore")  # Lightning has many
    logging.getLogger("lightning").setLevel(logging.ERROR)


def two_ranks(rank: int) -> dict[str, Any]:
    as_under_torchrun(rank)
    silence()
    clipped: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3, "max_epochs": 2}
    found: dict[str, Any] = {
        "stock": train("stock"),
        "ours": train("ours"),
        "ours-resumed": train("resumed", "ours/epoch=2-step=9.ckpt"),
        "clipped-stock": train("clipped-stock", **clipped),
        "clipped": train("clipped", **clipped),
    }
    for name, strategy in OVERLAPPING.items():
        settings: dict[str, Any] = {"strategy": strategy, "keep": -1, "max_epochs": 3}
        found[name] = train(name, **settings)
        found[f"{name}-resumed"] = train(f"{name}-resumed", f"{name}/epoch=1-step=6.ckpt", **settings)
        # Eight batches are two accumulations: a validation inside an epoch.
        inside = {**settings, "max_epochs": 1, "val_check_interval": 8}
        found[f"{name}-inside"] = train(f"{name}-inside", **inside)
        found[f"{name}-saved"] = validated(f"{name}-inside/epoch=0-step=2.ckpt")
    return found | of_the_page()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw; both ranks work in one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trainers"))
        return run_ranks(2, two_ranks)[0]


def test_the_default_strategy_equals_ddp_to_the_bit(runs: dict[str, Any]) -> None:
    """Also in the last, shorter accumulation, which Lightning divides by four too."""
    stock, ours = runs["stock"], runs["ours"]
    assert ours.losses == stock.losses
    assert ours.validated == stock.validated
    assert len(ours.validated) == EPOCHS
    assert ours.rates == stock.rates
    assert ours.turned == stock.turned == [3 * EPOCHS]
    assert unequal(ours.parameters, stock.parameters) == []


def test_clipped_by_threes_it_equals_ddp(runs: dict[str, Any]) -> None:
    """A gradient differs by at most 8 roundings, each 2**-24 of it.

    Adam turns this into lr × 8 × 2**-24 per element and step, √8000 times that in norm, and a loss whose gradient has a
    norm of at most 2 follows: 8 × 0.01 × 4.8e-7 × 90 × 2.
    """
    stock, ours = runs["clipped-stock"], runs["clipped"]
    assert ours.losses == pytest.approx(stock.losses, rel=0, abs=7e-6)
    assert ours.validated == pytest.approx(stock.validated, rel=0, abs=7e-6)
    assert (
        abs(ours.losses[-1] - runs["stock"].losses[len(ours.losses) - 1]) > 1e-4
    )  # so clipping changed something


@pytest.mark.parametrize("name", ["ours", *OVERLAPPING])
def test_a_resumed_run_equals_one_that_never_stopped_to_the_bit(runs: dict[str, Any], name: str) -> None:
    whole, resumed = runs[name], runs[f"{name}-resumed"]
    assert len(resumed.losses) == 10  # of the last epoch
    assert resumed.losses == whole.losses[-10:]
    assert resumed.validated == whole.validated[-1:]
    assert unequal(resumed.parameters, whole.parameters) == []


def test_checkpoints_that_are_removed_take_their_folders_with_them(runs: dict[str, Any]) -> None:
    kept = [name for name in runs["ours"].files if not name.endswith(".stretto")]
    assert kept == runs["stock"].files
    files = [name for name in kept if name != "last.ckpt"]  # a link
    assert sorted([*files, *(f"{name}.stretto" for name in files), "last.ckpt"]) == runs["ours"].files


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_is_validated_and_saved_is_what_was_committed(runs: dict[str, Any], name: str) -> None:
    inside = runs[f"{name}-inside"]
    assert [runs[f"{name}-saved"]] == inside.validated
    assert inside.steps[7:9] == [(2, 1), (2, 2)]  # the validation lies between


@pytest.mark.parametrize(("name", "landing"), [("acco", 6), ("wp", 8)])
def test_between_validations_an_update_lands_after_its_step(
    runs: dict[str, Any], name: str, landing: int
) -> None:
    """`acco` lands update 1 with the first half of step 2, and `wp` at its end; at the end of an epoch all lands."""
    expected = [(batch // 4, int(batch >= landing)) for batch in range(1, 10)]
    assert runs[name].steps[:10] == [*expected, (3, 3)]
    assert runs[name].turned == [9]
    assert runs[name].validated[-1] < runs[name].validated[0]


def test_the_code_of_the_page_trains(runs: dict[str, Any]) -> None:
    assert runs["page"] == 2 * 3
    assert unequal(runs["fabric"], runs["fabric-stock"]) == []


def alone(rank: int) -> dict[str, Any]:
    silence()
    found: dict[str, Any] = {
        "stock": train("stock", max_epochs=1, devices=1),
        "ours": train("ours", max_epochs=1, devices=1),
    }

    for name, schedule in SELDOM.items():
        for how, strategy in {"stock": {}, "ours": {"strategy": ACCO()}}.items():
            trained = train(f"{name}, {how}", schedule=schedule, max_epochs=2, devices=1, **strategy)
            found[f"{name}, {how}"] = trained.turned

    def refused(change: Callable[[Any], None] = lambda _: None, **settings: Any) -> str:
        model = module(Run([], [], [], [], [], [], []))
        change(model)
        try:
            trainer_of("refused", devices=1, **settings).fit(model, validation())
        except errors.StrettoError as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def manual(model: Any) -> None:
        model.automatic_optimization = False

    def with_hook(model: Any) -> None:
        model.configure_gradient_clipping = lambda *_: None

    found["refused"] = {
        "manual optimization": refused(manual, accumulate_grad_batches=1),
        "Language.configure_gradient_clipping": refused(with_hook),
        "precision='16-true'": refused(precision="16-true"),
        "gradient_clip_algorithm='value'": refused(gradient_clip_val=1, gradient_clip_algorithm="value"),
    }
    try:
        train("foreign", f"stock/{found['stock'].files[0]}", devices=1)
    except errors.CheckpointError as error:
        found["foreign"] = str(error)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process by itself saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trainer"))
        return run_ranks(1, alone, backend=None)[0]


def test_one_process_equals_lightning_to_the_bit(one: dict[str, Any]) -> None:
    assert one["ours"].losses == one["stock"].losses
    assert unequal(one["ours"].parameters, one["stock"].parameters) == []


@pytest.mark.parametrize("name", SELDOM)
def test_a_schedule_that_does_not_turn_at_every_step_turns_as_often_as_under_ddp(
    one: dict[str, Any], name: str
) -> None:
    assert one[f"{name}, ours"] == one[f"{name}, stock"]
    assert 0 < one[f"{name}, stock"][0] < one["stock"].turned[0] * 2


def test_what_cannot_work_is_refused_in_one_line(one: dict[str, Any]) -> None:
    for setting, message in one["refused"].items():
        assert message.startswith(f"ConfigError: StrettoStrategy does not work with {setting}: ")
        assert "\n" not in message
    assert "expected the folder" in one["foreign"]
