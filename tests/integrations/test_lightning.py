"""`StrettoStrategy` beside Lightning's own DDP, whatever its Trainer does: equal to it, or refused at the start."""

import contextlib
import copy
import functools
import importlib.util
import random
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from stretto import ACCO, DPU, WeightPrediction
from tests.bits import unequal
from tests.docs.pages import DOCS, code_blocks
from tests.draws import draws, part
from tests.integrations.callbacks import check, of_lightning
from tests.integrations.fits import asking, loader, looking, odd, silence, trainer_of
from tests.integrations.language import as_under_torchrun, texts, tiny_gpt2
from tests.integrations.regression import distance, said, values
from tests.integrations.ways import KINDS, TOLERANCE
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: stretto[lightning]"
)
TRAINER, FABRIC = code_blocks(DOCS / "integrations.md", "tests/integrations/test_lightning.py")
Seen = dict[str, Any]
OVERLAPPING = dict(part({"acco": ACCO(), "wp": WeightPrediction()}.items()))
SELDOM = {"by epochs": {"interval": "epoch"}, "by every eighth batch": {"interval": "step", "frequency": 8}}
"""How often a schedule turns that the job does not turn itself."""


def fit(kind: str, instance: Any, **settings: Any) -> Any:
    trainer = trainer_of(kind, **settings)
    trainer.fit(instance, loader(), loader(4))
    return trainer


def odd_runs() -> list[Any]:
    """Random batches that are left out, epochs that end early, trainings that stop; return both kinds' ends."""
    found = []
    for seed in draws(40):
        draw = random.Random(seed)
        rate = draw.choice([0.1, 0.4, 0.8])
        chosen = {
            "none": {index for index in range(30) if draw.random() < rate},
            "ends": {draw.randrange(14)} if draw.random() < 0.5 else set(),
            "stops": {draw.randrange(3, 14)} if draw.random() < 0.3 else set(),
            "optimizer": draw.choice(["SGD", "AdamW"]),
        }
        settings = {
            "accumulate_grad_batches": draw.choice([1, 2, 3, 4]),
            "val_check_interval": draw.choice([1.0, 3]),
            "gradient_clip_val": draw.choice([None, None, 0.1]),
        }
        ends = []
        for kind in KINDS:
            instance = looking(odd()(**chosen))
            trainer = trainer_of(kind, **settings)
            trainer.fit(instance, loader(14), loader(2))
            ends.append((values(instance), trainer.global_step, instance.seen))
        steps, is_exact = trainer.strategy.parallel.steps, settings["gradient_clip_val"] is None
        found.append((is_exact, distance(ends[0][0], ends[1][0]), ends[0][1:], ends[1][1:], steps))
    return found


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


def asked_alone(rank: int) -> list[Any]:
    """Have one rank ask under ours, and all ranks under DDP; return both outcomes of each case.

    To stop, at any hook of the module or a callback; or to skip the rest of the epoch.
    """
    import lightning.pytorch.callbacks as known

    found = []
    for case in draws(8):
        draw = random.Random(case)
        name, asker, at = draw.choice(["zero1", "acco", "dpu"]), draw.randrange(2), draw.randint(1, 7)
        hook, by = draw.choice(HOOKS), draw.choice(["module", "callback"])
        skips = draw.random() < 0.25
        if skips:
            hook, by = "on_train_batch_start", "module"
        settings = {
            "accumulate_grad_batches": draw.choice([2, 3] if name == "acco" else [1, 2, 3]),
            # With what overlaps, a validation under way changes the numbers.
            "val_check_interval": draw.choice([1.0, 2]) if name == "zero1" else 1.0,
            "gradient_clip_val": draw.choice([None, 0.1]),
            "max_epochs": 3,
        }
        optimizer, ends = draw.choice(["SGD", "AdamW"]), []
        for kind, strategy in (("stock", None), ("ours", {"acco": ACCO(), "dpu": DPU()}.get(name))):

            def ask(trainer: Any, asks: bool = kind == "stock" or rank == asker, skips: bool = skips) -> Any:
                trainer.should_stop |= asks and not skips
                return -1 if asks and skips else None

            module = odd()(optimizer=optimizer)
            if by == "module":
                module = asking(odd(), hook, at, ask, optimizer=optimizer)
            callbacks = [asking(known.Callback, hook, at, ask)] if by == "callback" else []
            trainer = trainer_of(kind, strategy, devices=2, callbacks=callbacks, **settings)
            trainer.fit(module, loader(20), loader(4))
            ends.append(((trainer.global_step, trainer.current_epoch), values(module), module.seen))
        job = trainer.strategy.parallel
        ended = job.steps, job.job.compute.lifetime.has_finished
        found.append(((case, name, asker, hook, at, by, skips, settings), *ends, *ended))
    return found


def with_callbacks(kind: str, callbacks: list[Any], folder: str, **settings: Any) -> tuple[Any, ...]:
    """Train on two ranks with these callbacks, which see a loss of all ranks; return what it comes to."""
    instance = odd()(logs=True)
    instance.register_buffer("note", torch.zeros(3))
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
    for make in part((lambda: EMAWeightAveraging(decay=0.9), WeightAveraging)):
        for name, (kind, strategy) in kinds.items():
            callback, instance = make(), odd()()
            folder = f"average-{devices}-{type(callback).__name__}-{name}"
            saving = ModelCheckpoint(folder, filename="last", every_n_epochs=2)
            settings: Seen = {"strategy": strategy} if kind == "ours" else {}
            trainer = trainer_of(
                kind, devices=devices, callbacks=[saving, callback], enable_checkpointing=True, **settings
            )
            trainer.fit(instance, loader(24), loader(8))
            saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
            found.setdefault(type(callback).__name__, []).append(
                (values(instance), instance.seen, list(saved.values()))
            )
    return found


def saved(kind: str, folder: str, resume: str | None = None, keep: int = 2, **settings: Any) -> Seen:
    """Train three epochs of ten batches on two ranks, of which the last accumulation has two; keep some files."""
    import lightning.pytorch.callbacks as known

    instance, steps = odd()(logs=True), []

    def note(trainer: Any, *_: Any) -> None:
        steps.append((trainer.global_step, trainer.strategy.parallel.steps))

    saving = known.ModelCheckpoint(folder, save_top_k=keep, monitor="loss", save_last="link")
    callbacks = [saving, known.LambdaCallback(on_train_batch_end=None if kind == "stock" else note)]
    chosen = {"accumulate_grad_batches": 4, "max_epochs": 3, "enable_checkpointing": True, **settings}
    trainer = trainer_of(kind, devices=2, callbacks=callbacks, **chosen)
    trainer.fit(instance, loader(40), loader(8), ckpt_path=resume)
    return {
        "seen": instance.seen,
        "parameters": values(instance),
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "steps": steps,
        "turned": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "validated": trainer.callback_metrics["loss"].item(),
    }


def validated(file: str) -> float:
    """The loss of a saved model, as Lightning's own strategy finds it."""
    reader = trainer_of("stock", devices=2)
    (metrics,) = reader.validate(odd()(logs=True), loader(8), ckpt_path=file, verbose=False)
    return metrics["loss"]


def of_the_page() -> Seen:
    """Run both blocks of the page, and the loop of Fabric's own documentation."""
    import lightning

    names: Seen = {"module": odd()(), "loader": loader(40), "validation": loader(8)}
    on_cpu = "devices=2, accelerator='cpu', logger=False, enable_checkpointing=False"
    exec(compile(TRAINER.replace("devices=2", on_cpu), "integrations.md", "exec"), names)
    found: Seen = {"page": names["trainer"].strategy.parallel.steps}
    for kind in ("fabric-stock", "fabric"):
        model = tiny_gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = torch.utils.data.DataLoader(texts(32), batch_size=2)
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        if kind == "fabric":
            names = {"fabric": fabric, "model": model, "optimizer": optimizer, "loader": batches}
            names |= {"stretto": stretto, "loss_function": lambda model, batch: model(**batch).loss}
            exec(compile(FABRIC, "integrations.md", "exec"), names)
        else:
            fabric.launch()
            wrapped, stepped = fabric.setup(model, optimizer)
            for index, batch in enumerate(fabric.setup_dataloaders(batches), start=1):
                with fabric.no_backward_sync(wrapped, enabled=index % 4 != 0):
                    fabric.backward(wrapped(**batch).loss / 4)
                if index % 4 == 0:
                    stepped.step()
                    stepped.zero_grad()
        found[kind] = values(model)
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
    cause = said(lambda: trainer.fit(odd()(fails=fails_here), loader(24), loader(8)))
    return cause, sorted(path.name for path in Path(folder).rglob("*.ckpt"))


def saves(_: int, name: str) -> Seen:
    settings = {"strategy": OVERLAPPING.get(name), "keep": -1 if name in OVERLAPPING else 2}
    found: Seen = {name: saved("ours", name, **settings)}
    found["resumed"] = saved("ours", "resumed", f"{name}/epoch=1-step=6.ckpt", **settings)
    if name not in OVERLAPPING:
        clock = {kind: clocked(kind, devices=2) for kind in KINDS}
        return {**found, "stock": saved("stock", "of ddp"), "clock": clock}
    # Eight batches are two accumulations: a validation inside an epoch.
    found["inside"] = saved("ours", "inside", max_epochs=1, val_check_interval=8, **settings)
    return {**found, "validated": validated("inside/epoch=0-step=2.ckpt")}


def asks(rank: int) -> Seen:
    return {"asked": asked_alone(rank), "callbacks": of_lightning(with_callbacks, 8)}


def tries(rank: int) -> Seen:
    def leaves_out() -> None:
        trainer = trainer_of("ours", devices=2)
        trainer.fit(odd()(none={3} if rank else set()), loader(24), loader(8))

    hook = said(lambda: trainer_of("ours", devices=2).fit(looking(odd()()), loader()))
    found = {"averaged": averaged(2), "refused": refusals(2, part(REFUSED.items())), "hook": hook}
    return {**found, "none": said(leaves_out), **of_the_page()}


def two_ranks(rank: int, does: Callable[..., Seen], *of: str) -> Seen:
    as_under_torchrun(rank)
    silence()
    return does(rank, *of)


def fails_alone(rank: int, fails: int) -> tuple[str, list[str]]:
    as_under_torchrun(rank)
    silence()
    return exceptional("alone", 2, fails, alone=True)


@functools.cache
def two(does: Callable[..., Seen], *of: str) -> list[Seen]:
    """What both ranks saw."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return run_ranks(2, two_ranks, does, *of)


@pytest.mark.parametrize("name", ["zero1", *OVERLAPPING])
def test_a_resumed_run_equals_one_that_never_stopped_to_the_bit(name: str) -> None:
    whole, resumed = two(saves, name)[0][name], two(saves, name)[0]["resumed"]
    assert len(resumed["seen"]) == 10 + 2  # of the last epoch
    assert resumed["seen"] == whole["seen"][-12:]
    assert resumed["validated"] == whole["validated"]
    assert unequal(resumed["parameters"], whole["parameters"]) == []


def test_checkpoints_that_are_removed_take_their_folders_with_them() -> None:
    files = two(saves, "zero1")[0]["stock"]["files"]
    folders = [f"{name}.stretto" for name in files if name != "last.ckpt"]  # a link
    assert sorted([*files, *folders]) == two(saves, "zero1")[0]["zero1"]["files"]


@pytest.mark.parametrize(("name", "landing"), part([("acco", 6), ("wp", 8)]))
def test_an_update_lands_after_its_step_or_before_a_validation_which_is_what_is_saved(
    name: str, landing: int
) -> None:
    """`acco` lands update 1 with the first half of step 2, and `wp` at its end; at the end of an epoch all lands."""
    expected = [(batch // 4, int(batch >= landing)) for batch in range(1, 10)]
    assert two(saves, name)[0][name]["steps"][:10] == [*expected, (3, 3)]
    assert two(saves, name)[0][name]["turned"] == 9
    inside, found = (two(saves, name)[0][part] for part in ("inside", "validated"))
    assert inside["steps"][7:9] == [(2, 1), (2, 2)]  # the validation lies between
    assert found == inside["validated"]


def test_the_code_of_the_page_trains() -> None:
    found = two(tries)[0]
    assert found["page"] == 2 * 3
    assert unequal(found["fabric"], found["fabric-stock"]) == []


@pytest.mark.parametrize("name", part(["EMAWeightAveraging", "WeightAveraging"]))
def test_an_average_is_what_the_model_holds_at_the_end(name: str) -> None:
    """And what validations see and files hold: to the bit, as all is divided by two; also where updates overlap."""
    (stock, seen, saved), *others = two(tries)[0]["averaged"][name]
    for ours, found_seen, found_saved in others[:1]:
        assert found_seen == seen
        assert distance(ours, stock) == distance(found_saved, saved) == 0.0
    for ours, _, found_saved in others[1:]:  # acco adds halves of an update in another order
        assert distance(ours, stock) <= 1e-6
        assert distance(found_saved, saved) <= 1e-6


def test_a_rank_that_alone_leaves_a_batch_out_is_named_to_the_others() -> None:
    assert two(tries)[1]["none"].startswith("RuntimeError: Skipping the `training_step`")
    assert "rank 1" in two(tries)[0]["none"]
    assert "Skipping the `training_step`" in two(tries)[0]["none"]


def test_a_hook_that_would_see_the_gradients_of_one_rank_is_refused() -> None:
    words = "ConfigError: StrettoStrategy does not work with Odd.on_after_backward: "
    assert [found for found in two(tries) if not found["hook"].startswith(words)] == []


@pytest.mark.parametrize("fails", [4, 5])
def test_after_an_exception_on_one_rank_its_cause_is_told_and_nobody_waits(fails: int) -> None:
    """Between accumulations and inside one, although callbacks ask for files."""
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

    settings: Seen = {"accumulate_grad_batches": 4, "enable_checkpointing": True, "max_epochs": 1}
    settings["devices"] = devices
    instance = odd()()
    trainer = trainer_of(kind, callbacks=[saving()], **settings)
    trainer.fit(instance, loader(22 * devices), loader(4))
    resumed = odd()()
    trainer_of(kind, callbacks=[saving()], **settings | {"max_epochs": 2}).fit(
        resumed, loader(22 * devices), loader(4), ckpt_path=f"{folder}/epoch=0-step=2.ckpt"
    )
    files = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    return values(instance), values(resumed), files


def manual() -> Any:
    instance = odd()()
    instance.automatic_optimization = False
    return instance


def with_own_clipping() -> Any:
    instance = odd()()
    instance.configure_gradient_clipping = lambda *_: None
    return instance


REFUSED: dict[str, Callable[[Any], Seen]] = {
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
    "manual optimization": lambda _: {"module": manual(), "accumulate_grad_batches": 1},
    "Odd.configure_gradient_clipping": lambda _: {"module": with_own_clipping()},
    "precision='16-true'": lambda _: {"precision": "16-true"},
    "gradient_clip_algorithm='value'": lambda _: {
        "gradient_clip_val": 1,
        "gradient_clip_algorithm": "value",
    },
}
"""Settings of the Trainer, and perhaps a module."""


def refusals(devices: int, rows: Iterable[Any]) -> dict[str, str]:
    """Return what is said to each setting that is refused, and to a search for a learning rate."""
    import lightning.pytorch.callbacks as known
    from lightning.pytorch.tuner import Tuner

    found = {}
    for name, settings_of in rows:
        settings = {"module": odd()(), **settings_of(known)}
        module = settings.pop("module")
        found[name] = said(lambda m=module, s=settings: fit("ours", m, devices=devices, **s))
    tuner = Tuner(trainer_of("ours", devices=devices))
    found["lr_find"] = said(lambda: tuner.lr_find(odd()(), loader(), num_training=4))
    return found


def alone(rank: int) -> Seen:
    silence()
    import lightning.pytorch.callbacks as known

    from stretto.integrations.lightning import StrettoStrategy

    found: Seen = {"odd": odd_runs(), "refused": refusals(1, REFUSED.items())}
    for name in ("ddp_comm_hook", "model_averaging_period", "find_unused_parameters"):
        found["refused"][name] = said(lambda name=name: StrettoStrategy(**{name: 1}))
    found["clock"] = {kind: clocked(kind) for kind in KINDS}
    for name, schedule in SELDOM.items():
        for kind in KINDS:
            settings = {"strategy": ACCO()} if kind == "ours" else {}
            trainer = fit(kind, odd()(schedule=schedule), **settings)
            found[f"{name}, {kind}"] = trainer.lr_scheduler_configs[0].scheduler.last_epoch
    file = "clock-stock-1/epoch=0-step=2.ckpt"
    found["foreign"] = said(lambda: trainer_of("ours").fit(odd()(), loader(), ckpt_path=file))
    found["exceptions"] = {(kind, fails): exceptional(kind, 1, fails) for kind in KINDS for fails in (4, 5)}

    class Copies(known.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.trainer = trainer
            found["copies"] = len(copy.deepcopy(trainer.callbacks))

    fit("ours", odd()(), callbacks=[Copies()])
    by_hand = []
    for kind in KINDS:
        trainer = trainer_of(kind)
        instance = odd()(fails=5)
        said(lambda trainer=trainer, instance=instance: trainer.fit(instance, loader()))
        trainer.save_checkpoint(f"by-hand-{kind}.ckpt")
        by_hand.append(list(torch.load(f"by-hand-{kind}.ckpt", weights_only=False)["state_dict"].values()))
    found["by hand"] = distance(*by_hand)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What a process by itself saw."""
    with contextlib.chdir(tmp_path_factory.mktemp("one")):
        return run_ranks(1, alone, backend=None)[0]


def test_whatever_is_clipped_left_out_or_ended_early_counts_as_under_ddp(one: Seen) -> None:
    """Parameters, steps, rates, losses, gradients that a hook sees: to the bit, but where norms are summed."""
    for is_exact, gap, stock, ours, steps in one["odd"]:
        assert gap <= (0.0 if is_exact else TOLERANCE)
        assert (ours[0], steps) == (stock[0], stock[0])
        assert ours[1] == (stock[1] if is_exact else pytest.approx(stock[1], abs=1e-5))


def test_what_one_rank_asks_for_all_ranks_do_as_under_ddp_where_all_ask() -> None:
    for case, stock, ours, steps, has_finished in [one for found in two(asks) for one in found["asked"]]:
        assert ours[0] == stock[0], case
        assert has_finished, case
        if case[1] == "zero1":
            assert steps == stock[0][0], case
            assert distance(ours[1], stock[1]) <= TOLERANCE, case
            assert ours[2] == pytest.approx(stock[2], abs=1e-5), case


def test_a_file_of_another_strategy_is_refused(one: Seen) -> None:
    assert "expected the folder" in one["foreign"]
    assert one["foreign"].startswith("CheckpointError: ")


@pytest.mark.parametrize("name", SELDOM)
def test_a_schedule_that_does_not_turn_at_every_step_turns_as_often_as_under_ddp(
    one: Seen, name: str
) -> None:
    assert one[f"{name}, ours"] == one[f"{name}, stock"]
    assert 0 < one[f"{name}, stock"] < 2 * 6  # updates


def test_what_cannot_work_is_refused_before_the_first_batch_and_the_tuner_told_where_to_look_for_a_rate(
    one: Seen,
) -> None:
    for found in (one, *two(tries)):
        for name, told in found["refused"].items():
            named = "LearningRateFinder" if name == "lr_find" else name
            assert told.startswith(f"ConfigError: StrettoStrategy does not work with {named}: "), told
            assert "\n" not in told


def test_a_file_saved_inside_an_accumulation_holds_the_last_update_as_under_ddp(
    one: Seen,
) -> None:
    """Also on two ranks."""
    for found in (one, two(saves, "zero1")[0]):
        for ours, stock in zip(found["clock"]["ours"][:2], found["clock"]["stock"][:2], strict=True):
            assert distance(ours, stock) == 0.0
        assert found["clock"]["ours"][2] == found["clock"]["stock"][2]


def test_on_two_ranks_callbacks_do_what_they_do_under_ddp() -> None:
    check(two(asks)[0]["callbacks"])


@pytest.mark.parametrize("fails", [4, 5])
def test_after_an_exception_a_process_by_itself_writes_the_files_that_ddp_writes(
    one: Seen, fails: int
) -> None:
    assert one["exceptions"]["ours", fails] == one["exceptions"]["stock", fails]
    assert one["exceptions"]["ours", fails][1]


def test_callbacks_that_hold_the_trainer_can_be_copied(one: Seen) -> None:
    assert one["copies"] == 2  # the own one is before it


def test_a_file_saved_by_hand_after_an_exception_equals_that_of_ddp(one: Seen) -> None:
    assert one["by hand"] == 0.0
