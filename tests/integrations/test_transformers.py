"""`StrettoTrainer` where updates overlap, where something odd happens, and by the page; a table has what is plain."""

import contextlib
import importlib.util
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto import ACCO, WeightPrediction
from tests.bits import unequal
from tests.docs.pages import DOCS, code_blocks
from tests.draws import draws, part
from tests.integrations.callbacks import ASKED, asked_on_one_rank, check, of_transformers
from tests.integrations.language import as_under_torchrun, language, losses, texts, tiny_gpt2, tiny_llama
from tests.integrations.regression import Regression, distance, said, samples, values
from tests.integrations.ways import KINDS, TOLERANCE, Stream, asked, leaving_out, make, marked, silence
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: stretto[recipes]"
)
TRAINER, ACCELERATE = code_blocks(DOCS / "integrations.md", "tests/integrations/test_transformers.py")
OVERLAPPING = dict(part({"acco": ACCO(), "wp": WeightPrediction()}.items()))
STRATEGIES = {"zero1": None, **OVERLAPPING}
Seen = dict[str, Any]


def hooked(hook: str, do: Any = lambda *_, **__: None) -> Any:
    """Return a callback with one hook."""
    import transformers

    return type("Hooked", (transformers.TrainerCallback,), {hook: do})()


# What overlaps


def overlapped(name: str) -> Seen:
    """Train whole, and go on from the checkpoint in the middle; return what is seen of both."""
    seen: Seen = {"steps": []}
    for folder in (name, f"{name}-resumed"):
        trainer = make("ours", folder, **language(strategy=OVERLAPPING[name]))

        def note(_: Any, args: Any, state: Any, *__: Any, trainer: Any = trainer, **___: Any) -> None:
            update = trainer.last_update
            steps = (state.global_step, trainer.parallel.steps, 0 if update is None else update.step)
            seen["steps"].append(steps)

        if folder == name:
            for hook in ("on_step_end", "on_save"):
                trainer.add_callback(hooked(hook, note))
        trainer.train(resume_from_checkpoint=None if folder == name else f"{name}-ours/checkpoint-4")
        logs, turned = trainer.state.log_history, trainer.lr_scheduler.last_epoch
        numbers = [losses(logs, key) for key in ("loss", "eval_loss", "learning_rate")]
        seen[folder] = numbers, turned, values(trainer.model)
    seen["saved"] = [evaluated(f"{name}-ours/checkpoint-{step}") for step in (4, 8)]
    return seen


def evaluated(folder: str) -> float:
    """The loss of a saved model, as the stock Trainer finds it."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return make("stock", "reader", **language(model=model)).evaluate()["eval_loss"]


def all_overlapped(rank: int) -> Seen:
    as_under_torchrun(rank)
    silence()
    return {name: overlapped(name) for name in OVERLAPPING}


def test_an_update_lands_after_its_step_or_before_an_evaluation_which_is_what_is_saved_and_gone_on_with() -> (
    None
):
    """Step 3 ends an epoch with a short accumulation, and steps 4 and 8 evaluate and save: there all lands."""
    for name, seen in run_ranks(2, all_overlapped)[0].items():
        (logged, turned, ended), resumed = seen[name], seen[f"{name}-resumed"]
        assert (resumed[0], resumed[1], unequal(resumed[2], ended)) == (logged, turned, []), name
        assert seen["saved"] == logged[1]
        expected = [(1, 0, 0), (2, 1, 1), (3, 3, 3), (4, 3, 3), (4, 4, 4), (5, 4, 4), (6, 6, 6), (7, 6, 6)]
        assert seen["steps"] == [*expected, (8, 7, 7), (8, 8, 8)], name
        assert turned == 8
        assert logged[0][-1] < logged[0][0]


# The page


def of_the_page(rank: int) -> Seen:
    """Run both blocks of the page, and the loop of Accelerate's own documentation."""
    import accelerate
    import transformers

    as_under_torchrun(rank)
    silence()
    quiet = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 4}
    arguments = make("stock", "page", **language(**quiet)).args
    names = {"model": tiny_gpt2(), "arguments": arguments, "dataset": texts(40), "stretto": stretto}
    exec(compile(TRAINER, "integrations.md", "exec"), names)
    torch.distributed.barrier()  # rank 0 writes
    saved = transformers.AutoModelForCausalLM.from_pretrained("trained")
    found: Seen = {
        "steps": names["trainer"].parallel.steps,
        "trained": values(names["trainer"].model),
        "saved": values(saved),
    }
    for kind in ("accelerate-stock", "accelerate"):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(texts(32), batch_size=2)
        names = {"accelerate": accelerate, "model": model, "optimizer": optimizer, "loader": loader}
        names |= {"stretto": stretto, "loss_function": lambda model, batch: model(**batch).loss}
        if kind == "accelerate":
            exec(compile(ACCELERATE, "integrations.md", "exec"), names)
        else:
            accelerator = accelerate.Accelerator(gradient_accumulation_steps=4)
            wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for batch in loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        found[kind] = values(model)
    return found


def test_the_code_of_the_page_trains_and_saves_what_was_committed() -> None:
    found = run_ranks(2, of_the_page)[0]
    assert found["steps"] == 4
    assert unequal(found["saved"], found["trained"]) == []
    assert unequal(found["accelerate"], found["accelerate-stock"]) == []


# Micro-batches that are left out


def left_out(cases: int) -> list[tuple[Any, ...]]:
    """Train with random micro-batches left out, the same on all ranks; return what both kinds come to.

    On several ranks not the last of an accumulation: with it the stock Trainer would leave out the exchange.
    """
    found, several = [], torch.distributed.is_initialized()
    for seed in draws(cases):
        draw = random.Random(seed)
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


@pytest.mark.parametrize(("ranks", "tolerance"), [("one", 0.0), ("two", TOLERANCE)])
def test_a_micro_batch_that_is_left_out_or_taken_twice_counts_as_in_the_stock_trainer(
    ranks: str, tolerance: float, request: pytest.FixtureRequest
) -> None:
    """On one rank to the bit: gradients are the same sums, and are divided by one."""
    for gap, stock, ours, steps in request.getfixturevalue(ranks)["left out"]:
        assert gap <= tolerance
        assert (ours, steps) == (stock, stock[0])


def one_rank_alone(rank: int) -> Seen:
    """Leave micro-batches out on rank 1 alone: the first, and the last, of an accumulation."""
    found: Seen = {}
    for name in ("zero1", "acco"):
        base = leaving_out({1, 6} if rank else set(), set())
        trainer = make(
            "ours",
            name,
            base=base,
            strategy=STRATEGIES[name],
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
                inputs = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
                loss = loss + model(**inputs)["loss"] / 4
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * (1 - step / 3) * parameter.grad
    return values(model)


@pytest.mark.parametrize("name", ["zero1", "acco"])
def test_a_micro_batch_that_one_rank_alone_leaves_out_holds_nobody_up(both: list[Seen], name: str) -> None:
    steps, found = both[0]["alone"][name]
    assert steps == 3
    if name == "zero1":
        assert distance(found, expected_of_one_rank_alone()) <= TOLERANCE


def ended_inside_accumulations() -> tuple[int, int]:
    """Train two epochs, each of which a callback ends after six of its batches; return both counts of updates."""
    import transformers

    class End(transformers.TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.batches = 0

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.batches += 1
            control.should_epoch_stop = self.batches == 5  # and one that was the last of an accumulation

    epochs: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch"}
    trainer = make("ours", "ended", **language(strategy=ACCO(), callbacks=[End()], **epochs))
    trainer.train()
    return trainer.state.global_step, trainer.parallel.steps


def test_an_accumulation_that_a_callback_ends_becomes_an_update_of_its_own(one: Seen) -> None:
    assert one["ended"] == (2, 4)


def without_a_length() -> list[tuple[int, ...]]:
    """Train on a stream of six batches, in accumulations of four; return the micro-batches of each update."""
    counts: list[tuple[int, ...]] = []
    stream = {"train_dataset": Stream(samples(12)), "gradient_accumulation_steps": 4, "max_steps": 3}
    note = hooked("on_step_end", lambda *_, **__: counts.append(trainer.last_update.micro_batches))
    trainer = make("ours", "unsized", callbacks=[note], **stream)
    trainer.train()
    return counts


def test_what_a_stream_leaves_of_an_accumulation_is_left_out(one: Seen) -> None:
    assert one["unsized"] == [(4,), (4,), (4,)]


# Refusals


def with_adafactor_schedule() -> Any:
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = Regression()
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)
    return make("ours", "refused", model=model, optimizers=(optimizer, AdafactorSchedule(optimizer)))


def again() -> None:
    trainer = make("ours", "again", max_steps=1)
    trainer.train()
    trainer.train()


def of_another_trainer() -> None:
    make("stock", "foreign", max_steps=1, save_strategy="steps", save_steps=1).train()
    make("ours", "foreign").train(resume_from_checkpoint="foreign-stock/checkpoint-1")


REFUSED: dict[str, tuple[Any, str]] = {
    **{
        hook: (
            lambda hook=hook: make("ours", "refused", callbacks=[hooked(hook)]).train(),
            f"ConfigError: StrettoTrainer does not work with Hooked.{hook}",
        )
        for hook in ("on_pre_optimizer_step", "on_optimizer_step")
    },
    "AdafactorSchedule": (
        lambda: with_adafactor_schedule().train(),
        "ConfigError: StrettoTrainer does not work with AdafactorSchedule",
    ),
    "again": (again, "UsageError: train() was called before"),
    "foreign": (
        of_another_trainer,
        "CheckpointError: foreign-stock/checkpoint-1: expected a folder 'stretto'",
    ),
    "too few micro-batches": (
        lambda: make("ours", "acco", strategy=ACCO(), gradient_accumulation_steps=1).train(),
        "ConfigError: acco needs at least 2 micro-batches",
    ),
}


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_what_cannot_work_is_refused_in_one_line(ranks: str, request: pytest.FixtureRequest) -> None:
    for name, (_, words) in REFUSED.items():
        found = request.getfixturevalue(ranks)[name]
        assert found.startswith(words), found
        assert "\n" not in found


# Signals and exceptions


def asked_everywhere(rank: int) -> Seen:
    found: Seen = {}
    for name, strategy in STRATEGIES.items():
        whole = make("ours", f"whole-{name}", strategy=strategy, enable_jit_checkpoint=True)
        whole.train()
        for inside in (False, True):
            *seen, ended = asked(rank, f"asked-{name}-{inside}", strategy, 2, inside=inside)
            found[name, inside] = *seen, distance(ended, values(whole.model))
    return found


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_checkpoint_at_a_signal_to_one_rank_has_the_updates_in_its_name_on_all(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    for (name, inside), (folders, inside_them, steps, gap) in request.getfixturevalue(ranks)["asked"].items():
        number = folders[-1].removeprefix("checkpoint-")
        assert (len(folders), inside_them, steps) == (1, [f"000001-step-{number}"], 4), name
        if name == "zero1":  # landing earlier starts the next update as the first one did
            # Asked after step 2 means at the end of step 3: callbacks that are given come after the Trainer's own.
            assert (folders, gap) == (["checkpoint-2" if inside else "checkpoint-3"], 0.0)


def test_a_folder_is_marked_as_incomplete_until_all_ranks_have_saved(both: list[Seen]) -> None:
    assert [one["marked"] for one in both] == [False, True]


def after_an_exception() -> tuple[str, float]:
    """Fail in step 3, and save the model by hand behind it."""

    def fail(_: Any, args: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 2:
            raise ValueError("a bad sample")

    models = []
    for kind in KINDS:
        trainer = make(kind, "fails", callbacks=[hooked("on_substep_end", fail)])
        cause = said(trainer.train)
        trainer.save_model(f"fails-{kind}")
        models.append(values(trainer.model))
    return cause, distance(*models)


def test_after_an_exception_a_process_by_itself_shows_and_saves_its_last_update(one: Seen) -> None:
    assert one["exception"] == ("ValueError: a bad sample", 0.0)


# Callbacks


def test_on_two_ranks_callbacks_do_what_they_do_under_the_stock_trainer(both: list[Seen]) -> None:
    check(both[0]["callbacks"])


def test_what_a_callback_asks_for_on_one_rank_all_ranks_do(both: list[Seen]) -> None:
    for name, (_, steps, folders, evaluated_at) in both[0]["one rank asks"].items():
        assert (steps, folders) == ASKED[name], name
        assert bool(evaluated_at) == ("evaluate" in str(name)), name


# The ranks


def on_any_ranks(rank: int, cases: int) -> Seen:
    silence()
    found: Seen = {name: said(attempt) for name, (attempt, _) in REFUSED.items()}
    return {**found, "asked": asked_everywhere(rank), "left out": left_out(cases)}


def alone(rank: int) -> Seen:
    found = on_any_ranks(rank, 24)
    return {
        **found,
        "exception": after_an_exception(),
        "ended": ended_inside_accumulations(),
        "unsized": without_a_length(),
    }


def on_two_ranks(rank: int) -> Seen:
    as_under_torchrun(rank)
    return on_any_ranks(rank, 8)


def together(rank: int) -> Seen:
    as_under_torchrun(rank)
    silence()
    return {
        "alone": one_rank_alone(rank),
        "marked": marked(rank),
        "callbacks": of_transformers(rank, 8),
        "one rank asks": asked_on_one_rank(rank),
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What a process by itself saw."""
    with contextlib.chdir(tmp_path_factory.mktemp("one")):
        return run_ranks(1, alone, backend=None)[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What rank 0 of two saw of what one rank does too."""
    with contextlib.chdir(tmp_path_factory.mktemp("two")):
        return run_ranks(2, on_two_ranks)[0]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """What each of two ranks saw of the rest; they work in one folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("both")):
        return run_ranks(2, together)
