"""State of any tensors is saved by one number of ranks and continued by another, to the bit, whole or in pieces.

Only rank 0 contributes, with micro-batches that do not depend on the rank, so that sums are the same on any number of
ranks. The others step what they own, and where ranks step alone their share of an average is zero.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, optim
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

from stretto import DataParallel, checkpoint
from stretto.errors import ForeignCheckpoint
from stretto.strategies import STRATEGIES, ZeRO1
from stretto_lab.virtual import VirtualCluster
from tests.checkpoint.plainly import read_into
from tests.optimizer.bowls import SMALL, Bowls, assert_equal
from tests.optimizer.test_whole import AVERAGES, SHAPES
from tests.optimizer.test_whole import OPTIMIZERS as WHOLE

SAVED_AT, UPDATES = 2, 4
OPTIMIZERS = {**WHOLE, "sgd": lambda model: optim.SGD(model.values, lr=0.05, momentum=0.9, dampening=0.5)}
"""The last is element by element."""


def shapes_for(name: str) -> list[tuple[int, ...]]:
    """Return the shapes that an optimizer can step: Adafactor divides by the number of elements."""
    return [shape for shape in SHAPES if name != "adafactor" or 0 not in shape]


def run(
    name: str,
    strategy: str,
    world_size: int,
    *,
    source: Path | None = None,
    target: Path | None = None,
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Train, from a checkpoint or to one; return the parameters and what the load noted."""

    def program(rank: int, group: Any) -> tuple[list[Tensor], tuple[str, ...]]:
        model = Bowls(shapes_for(name))
        optimizer = OPTIMIZERS[name](model)
        chosen = AVERAGES.get(strategy) or STRATEGIES[strategy]()
        several = isinstance(optimizer, list)
        scheduler = [ExponentialLR(optimizer[0], 0.5), LinearLR(optimizer[1])] if several else None
        job = DataParallel(
            model, optimizer, chosen, micro_batches=2, scheduler=scheduler, group=group, options=SMALL
        )
        with job:
            notes = checkpoint.load(job, source).notes if source else ()
            while job.steps < (SAVED_AT if target else UPDATES):
                job.backward(model(0), weight=float(rank == 0))
            if target:
                checkpoint.save(job, target)
            with job.settled():
                return [p.detach().clone() for p in model.values], notes

    return VirtualCluster(world_size).run(program).values[-1]


CASES = [
    *itertools.product(("muon and adamw", "adafactor", "sgd"), STRATEGIES),
    ("lamb", "zero1"),
    ("lars", "local"),
]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_two_ranks_save_and_three_or_one_go_on_to_the_bit(name: str, strategy: str, tmp_path: Path) -> None:
    straight, _ = run(name, strategy, 1)
    run(name, strategy, 2, target=tmp_path)
    index = list(STRATEGIES).index(strategy)
    # Every strategy and every optimizer goes on with one, two and three ranks, in one case or another.
    for world_size in (1, 3) if (index + (name == "adafactor")) % 2 else (2, 3):
        found, notes = run(name, strategy, world_size, source=tmp_path)
        assert_equal(found, straight)
        # Every load notes that the place in the data is not known; of another number of ranks there is a second note.
        assert len(notes) == 1 + (world_size != 2), notes


def test_another_strategy_takes_the_state_over(tmp_path: Path) -> None:
    straight, _ = run("adafactor", "zero1", 1)
    run("adafactor", "ddp", 2, target=tmp_path)
    assert_equal(run("adafactor", "zero1", 3, source=tmp_path)[0], straight)
    run("adafactor", "zero1", 3, target=tmp_path / "other")
    assert_equal(run("adafactor", "ddp", 2, source=tmp_path / "other")[0], straight)


def test_state_is_stored_as_the_optimizer_keeps_it(tmp_path: Path) -> None:
    run("adafactor", "zero1", 2, target=tmp_path)
    state = checkpoint.read(tmp_path)["optimizer"]
    assert {
        name: tuple(state[f"state.values.2.{name}"].shape) for name in ("row_var", "col_var", "step")
    } == {
        "row_var": (40, 1),
        "col_var": (1, 70),
        "step": (),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")
def test_a_plain_loop_goes_on_from_it(tmp_path: Path) -> None:
    straight, _ = run("adafactor", "zero1", 1)
    run("adafactor", "zero1", 3, target=tmp_path)
    (folder,) = tmp_path.iterdir()
    model = Bowls(shapes_for("adafactor"))
    optimizer = OPTIMIZERS["adafactor"](model)
    read_into(model, optimizer, folder)
    assert [len(entries) for entries in optimizer.state.values()] == [2 + (p.dim() > 1) for p in model.values]
    for _ in range(SAVED_AT, UPDATES):
        optimizer.zero_grad()
        model(0).backward()
        optimizer.step()
    assert_equal([p.detach() for p in model.values], straight)


def test_several_optimizers_are_named_where_others_were_saved(tmp_path: Path) -> None:
    run("muon and adamw", "zero1", 2, target=tmp_path)
    with pytest.raises(ForeignCheckpoint, match="holds the state of Muon and AdamW, expected Lamb"):
        run("lamb", "zero1", 2, source=tmp_path)


def test_schedules_of_both_optimizers_go_on(tmp_path: Path) -> None:
    run("muon and adamw", "zero1", 1, target=tmp_path)
    model = Bowls(shapes_for("muon and adamw"))
    muon, adamw = OPTIMIZERS["muon and adamw"](model)
    schedulers = [ExponentialLR(muon, 0.5), LinearLR(adamw)]
    with DataParallel(model, [muon, adamw], ZeRO1(), micro_batches=2, scheduler=schedulers) as job:
        checkpoint.load(job, tmp_path)
        assert [one.last_epoch for one in schedulers] == [SAVED_AT, SAVED_AT]
        assert muon.param_groups[0]["lr"] == 0.05 * 0.5**SAVED_AT
        assert adamw.param_groups[0]["lr"] == schedulers[1].get_last_lr()[0]
