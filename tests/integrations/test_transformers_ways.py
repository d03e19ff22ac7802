"""`StrettoTrainer` where something odd happens in a training: equal to the stock one, or refused at the start."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO
from tests.integrations.callbacks import asked_on_one_rank, differences, of_transformers
from tests.integrations.language import as_under_torchrun
from tests.integrations.regression import Regression, distance, said, samples, values
from tests.integrations.test_transformers import silence
from tests.integrations.ways import KINDS, TOLERANCE, asked, leaving_out, make, marked
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
# Micro-batches that are left out


def left_out(rank: int, cases: int = 100) -> list[tuple[Any, ...]]:
    """Train with random micro-batches left out, the same on all ranks; return what both kinds come to.

    On several ranks not the last of an accumulation: with it the stock Trainer would leave out the exchange.
    """
    silence()
    draw, found, several = random.Random(0), [], torch.distributed.is_initialized()
    for _case in range(cases):
        length, rate = draw.choice([1, 2, 3, 4]), draw.choice([0.1, 0.4, 0.8])
        chosen = {index for index in range(40) if draw.random() < rate}
        twice = {index for index in range(40) if draw.random() < 0.2}
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": length,
            "max_steps": 3,
            "optim": draw.choice(["sgd", "adamw_torch"]),
            "weight_decay": 0.1,
            "logging_strategy": "no",
        }
        ends = []
        for kind in KINDS:
            trainer = make(kind, "left-out", base=leaving_out(chosen, twice, keeps_last=several), **settings)
            trainer.train()
            ends.append((values(trainer.model), trainer.state.global_step, trainer.lr_scheduler.last_epoch))
        found.append((distance(ends[0][0], ends[1][0]), ends[0][1:], ends[1][1:], trainer.parallel.steps))
    return found


def test_a_micro_batch_that_is_left_out_or_taken_twice_counts_as_in_the_stock_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: gradients are the same sums, and are divided by one."""
    monkeypatch.chdir(tmp_path)
    found = run_ranks(1, left_out, backend=None)[0]
    for gap, stock, ours, steps in found:
        assert (gap, ours, steps) == (0.0, stock, stock[0])


# Refusals, signals, exceptions


def looks(hook: str) -> Any:
    import transformers

    return type("Looks", (transformers.TrainerCallback,), {hook: lambda *_, **__: None})()


def with_adafactor_schedule() -> Any:
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = Regression()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)
    return make("ours", "refused", model=model, optimizers=(optimizer, AdafactorSchedule(optimizer)))


def after_an_exception(rank: int) -> tuple[str, float]:
    """Fail in step 3, and save the model by hand behind it."""
    import transformers

    class Fails(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                raise ValueError("a bad sample")

    models = []
    for kind in KINDS:
        trainer = make(kind, "fails", callbacks=[Fails()])
        cause = said(trainer.train)
        trainer.save_model(f"fails-{kind}")
        models.append(values(trainer.model))
    return cause, distance(*models)


def alone(rank: int) -> dict[str, Any]:
    silence()
    found: dict[str, Any] = {}
    for hook in ("on_pre_optimizer_step", "on_optimizer_step"):
        found[hook] = said(make("ours", "refused", callbacks=[looks(hook)]).train)
    found["AdafactorSchedule"] = said(with_adafactor_schedule().train)
    for strategy in (None, ACCO(), stretto.WeightPrediction()):
        for inside in (False, True):
            name = f"asked-{type(strategy).__name__}-{inside}"
            found[name] = asked(rank, name, strategy, 2, inside=inside)
    found["exception"] = after_an_exception(rank)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process by itself saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ways"))
        return run_ranks(1, alone, backend=None)[0]


@pytest.mark.parametrize("name", ["NoneType", "ACCO", "WeightPrediction"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_at_a_signal_has_the_updates_in_its_name(
    one: dict[str, Any], name: str, inside: bool
) -> None:
    folders, inside_them, steps, gap = one[f"asked-{name}-{inside}"]
    number = folders[-1].removeprefix("checkpoint-")
    assert (len(folders), inside_them, steps) == (1, [f"000001-step-{number}"], 4)
    if name == "NoneType":  # landing earlier starts the next update as the first one did
        assert gap == 0.0


@pytest.mark.parametrize("name", ["on_pre_optimizer_step", "on_optimizer_step", "AdafactorSchedule"])
def test_what_would_look_at_gradients_or_the_optimizer_is_refused_at_the_start(
    one: dict[str, Any], name: str
) -> None:
    assert one[name].startswith("ConfigError: StrettoTrainer does not work with ")
    assert name in one[name]
    assert "\n" not in one[name]


def test_after_an_exception_a_process_by_itself_shows_and_saves_its_last_update(one: dict[str, Any]) -> None:
    assert one["exception"] == ("ValueError: a bad sample", 0.0)


# One rank of two


def one_rank_alone(rank: int) -> dict[str, Any]:
    """Leave micro-batches out on rank 1 alone: the first, and the last, of an accumulation."""
    found: dict[str, Any] = {}
    for name, strategy in {"zero1": None, "acco": ACCO()}.items():
        base = leaving_out({1, 6} if rank else set(), set())
        trainer = make(
            "ours",
            name,
            base=base,
            strategy=strategy,
            include_num_input_tokens_seen="all",
            max_steps=3,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        trainer.save_model(f"{name}-left-out")  # all ranks come here
        found[name] = (trainer.parallel.steps, values(trainer.model))
    return found


def expected_of_one_rank_alone() -> list[Tensor]:
    """A plain loop, in which what is left out is a gradient of zero."""
    model, rate = Regression(), 0.05
    rows = samples()
    for step in range(3):
        loss = torch.zeros(())
        for index in (2 * step, 2 * step + 1):
            for rank in (0, 1):
                if rank and index + 1 in (1, 6):
                    continue
                batch = [rows[4 * index + 2 * rank + row] for row in (0, 1)]
                loss = (
                    loss
                    + model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]})["loss"] / 4
                )
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * (1 - step / 3) * parameter.grad
    return values(model)


def two_ranks(rank: int) -> dict[str, Any]:
    as_under_torchrun(rank)
    silence()
    found: dict[str, Any] = {
        "alone": one_rank_alone(rank),
        "left out": left_out(rank, 30),
        "marked": marked(rank),
    }
    found["callbacks"] = of_transformers(rank, 12)
    found["one rank asks"] = asked_on_one_rank(rank)
    found["asked"] = {
        (name, inside): asked(rank, f"signal-{name}-{inside}", strategy, 2, inside=inside)
        for name, strategy in {"zero1": None, "acco": ACCO()}.items()
        for inside in (False, True)
    }
    for hook in ("on_pre_optimizer_step", "on_optimizer_step"):
        found[hook] = said(make("ours", "refused", callbacks=[looks(hook)]).train)
    found["AdafactorSchedule"] = said(with_adafactor_schedule().train)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("two"))
        return run_ranks(2, two_ranks)


@pytest.fixture(scope="module")
def two(both: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 saw."""
    return both[0]


def test_a_folder_is_marked_as_incomplete_until_all_ranks_have_saved(both: list[dict[str, Any]]) -> None:
    assert [one["marked"] for one in both] == [False, True]


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_a_micro_batch_that_one_rank_alone_leaves_out_holds_nobody_up(two: dict[str, Any], name: str) -> None:
    steps, found = two["alone"][name]
    assert steps == 3
    if name == "zero1":
        assert distance(found, expected_of_one_rank_alone()) <= TOLERANCE


@pytest.mark.parametrize("name", ["zero1", "acco"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_signal_on_one_rank_saves_on_all_at_the_end_of_the_step(
    two: dict[str, Any], name: str, inside: bool
) -> None:
    folders, inside_them, steps, gap = two["asked"][name, inside]
    number = folders[-1].removeprefix("checkpoint-")
    assert (len(folders), inside_them, steps) == (1, [f"000001-step-{number}"], 4)
    if name == "zero1":
        # Asked after step 2 means: at the end of step 3, for callbacks that are handed over come after the Trainer's.
        assert (folders, gap) == (["checkpoint-2" if inside else "checkpoint-3"], 0.0)


def test_on_two_ranks_a_micro_batch_that_all_leave_out_or_take_twice_counts_as_in_the_stock_trainer(
    two: dict[str, Any],
) -> None:
    for gap, stock, ours, steps in two["left out"]:
        assert gap <= TOLERANCE
        assert (ours, steps) == (stock, stock[0])


@pytest.mark.parametrize("name", ["on_pre_optimizer_step", "on_optimizer_step", "AdafactorSchedule"])
def test_two_ranks_refuse_what_one_refuses(two: dict[str, Any], name: str) -> None:
    assert two[name].startswith("ConfigError: StrettoTrainer does not work with ")


def test_on_two_ranks_callbacks_do_what_they_do_under_the_stock_trainer(two: dict[str, Any]) -> None:
    """What they stop, save, choose as the best and write: parameters, steps, files and evaluations are the same."""
    for name, stock, ours in two["callbacks"]:
        gap, is_same = differences(stock[:3], ours[:3])
        assert gap <= TOLERANCE, name
        assert is_same, (name, stock[1:3], ours[1:3])
        assert ours[3] == pytest.approx(stock[3], abs=1e-5), name


@pytest.mark.parametrize(
    ("asked_in", "steps", "folders"),
    [
        ("on_step_end should_save", 4, ["checkpoint-2"]),
        ("on_step_end should_evaluate", 4, []),
        ("on_step_end should_training_stop", 2, []),
        ("on_substep_end should_training_stop", 2, []),
        ("on_evaluate should_training_stop", 2, []),
        ("on_step_end should_epoch_stop", 4, []),
    ],
)
def test_what_a_callback_asks_for_on_one_rank_all_ranks_do(
    two: dict[str, Any], asked_in: str, steps: int, folders: list[str]
) -> None:
    _, found_steps, found, losses = two["one rank asks"][asked_in]
    assert (found_steps, found) == (steps, folders)
    assert bool(losses) == ("evaluate" in asked_in)
