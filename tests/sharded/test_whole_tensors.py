"""Optimizers that step whole tensors do so over the shards of a node, as PyTorch does over FSDP2's parameters."""

import dataclasses
import functools
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto import ACCO, DDP, AtRest, DataParallel, DiLoCo, Options, ReplicaGuard, ZeRO1, checkpoint
from stretto.errors import UnsupportedOptimizer
from stretto.optimizer import as_one
from tests.optimizer.written import Lars
from tests.processes import run_ranks
from tests.sharded.jobs import (
    STRATEGIES,
    WORLD_SIZE,
    Case,
    Outcome,
    Values,
    batch,
    loss_of,
    mesh_of,
    run_sharded,
    run_whole,
    sharded,
    unsharded,
    whole,
)
from tests.sharded.test_laws import plainly, tolerance
from tests.sharded.test_saved import committed, go_on


def beside(other: Any, kind: type[torch.optim.Optimizer], prefixes: tuple[str, ...], model: nn.Module) -> Any:
    """An optimizer for the matrices whose names begin so, and another one for the rest."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = {name: p for name, p in trained.items() if p.ndim == 2 and name.startswith(prefixes)}
    rest = [p for name, p in trained.items() if name not in chosen]
    return as_one([kind(chosen.values(), lr=0.02), other(rest)])


adamw = functools.partial(torch.optim.AdamW, lr=0.01)
muon = functools.partial(beside, adamw, torch.optim.Muon, ("mix", "back"))
lars = functools.partial(
    beside, functools.partial(torch.optim.SGD, lr=0.2, momentum=0.9), Lars, ("mix", "back")
)
INT8 = 0.02
"""A tenth of what training changes: blocks are cut elsewhere, and int8 rounds to a 254th of the largest in each."""
PACKED = Options(bucket_bytes=512, wire="int8", clip_norm=0.5)
CASES = {
    **{one.name: Case(strategy=one, optimizer=lars) for one in STRATEGIES},
    "zero1, rows that do not divide": Case(optimizer=lars, width=11),
    "acco, rows that do not divide": Case(strategy=ACCO(), optimizer=lars, width=11),
    "acco on int8": Case(strategy=ACCO(), optimizer=lars, options=PACKED),
    "diloco on int8": Case(strategy=DiLoCo(interval=2, fragments=2), optimizer=lars, options=PACKED),
}


def as_others_do(rank: int) -> dict[str, float]:
    """How far each job is from what it should be equal to."""
    found = {}
    for name, case in CASES.items():
        one = dataclasses.replace(case, optimizer=muon)
        found[f"{name}, nodes of one shard"] = run_sharded(one, rank, WORLD_SIZE, 1).distance(
            run_whole(one, rank)
        )
    for strategy in (DDP(), ZeRO1()):
        case = Case(strategy=strategy, optimizer=muon, micro_batches=1)
        plain = Outcome(values=plainly(case, rank, mesh_of(1, WORLD_SIZE)["shard"]), updates=[])
        found[f"{strategy.name}, one node"] = run_sharded(case, rank, 1, WORLD_SIZE).distance(plain)
    return found


@pytest.mark.long
def test_muon_over_shards_is_what_it_is_over_whole_models_and_in_pytorch_to_the_bit() -> None:
    for found in run_ranks(WORLD_SIZE, as_others_do):
        assert found == dict.fromkeys(found, 0.0)


def dealt(rank: int) -> list[list[tuple[int, ...]]]:
    """Of random jobs: set, place and bucket of every matrix that stays whole."""
    draws, found = random.Random(72), []
    for _ in range(12):
        nodes, shards = draws.choice([(2, 2), (1, WORLD_SIZE)])
        strategy = draws.choice([ZeRO1(), ACCO(), DDP()])
        options = Options(bucket_bytes=draws.choice([256, 512, 4096]))
        width = draws.randint(13, 40)
        case = Case(strategy=strategy, optimizer=lars, options=options, width=width)
        _, parallel = sharded(case, nodes, shards)
        layout = parallel.job.layout
        whole_sets = {slot.set_index for slot in layout.slots if slot.is_whole}
        places = [(slot.index, slot.set_index, slot.start) for slot in layout.slots if slot.is_whole]
        buckets = [
            (one.set_index, one.start, one.numel) for one in layout.buckets if one.set_index in whole_sets
        ]
        found.append([*places, *buckets])
        parallel.finish()
    return found


def test_all_ranks_deal_whole_tensors_alike_however_many_rows_they_hold() -> None:
    first, *others = run_ranks(WORLD_SIZE, dealt)
    assert all(first)
    assert others == [first] * len(others)


def under_guards(rank: int) -> dict[str, bool]:
    """Whether guards change nothing, and find nothing."""
    found = {}
    for strategy in (DDP(), ZeRO1(), ACCO()):
        case = Case(strategy=strategy, optimizer=muon)
        guarded = dataclasses.replace(case, guards=(ReplicaGuard(), AtRest()))
        plain, outcome = run_sharded(case, rank, 2, 2), run_sharded(guarded, rank, 2, 2)
        found[strategy.name] = plain.equals(outcome) and not any(one.incidents for one in outcome.updates)
    return found


@pytest.mark.long
def test_guards_find_steps_over_shards_equal() -> None:
    for found in run_ranks(WORLD_SIZE, under_guards):
        assert found == dict.fromkeys(found, True)


def two_nodes_of_two(rank: int) -> dict[str, tuple[float, float]]:
    """How far each job is from ranks with whole models, and how far it may be."""
    found = {}
    for name, case in CASES.items():
        expected = run_whole(case, rank, nodes=2)
        allowed = INT8 if case.options is PACKED else 2 * tolerance(case, expected)
        found[name] = run_sharded(case, rank, 2, 2).distance(expected), allowed
    return found


@pytest.mark.long
def test_under_every_strategy_two_nodes_of_two_shards_train_as_two_ranks_with_whole_models() -> None:
    for found in run_ranks(WORLD_SIZE, two_nodes_of_two):
        for name, (distance, allowed) in found.items():
            assert distance <= allowed, name


SAVED = ("ddp", "zero1", "acco on int8", "local", "diloco on int8")
WHOLE = (0, 0)
"""Every rank holds a whole model."""


def gone_on(model: nn.Module, parallel: DataParallel, rank: int) -> Values:
    """Train three updates more."""
    for index in range(6):
        parallel.backward(loss_of(model, batch(rank, 100 + index)))
    parallel.finish()
    return whole(model)


def saved(rank: int, folder: str) -> dict[str, tuple[Values, Values]]:
    """What is committed at a checkpoint, and three updates later."""
    found = {}
    for name in SAVED:
        model, parallel = sharded(CASES[name], 2, 2)
        go_on(model, parallel, rank, 2)
        checkpoint.save(parallel, Path(folder, name))
        before = committed(model, parallel)
        found[name] = before, gone_on(model, parallel, rank)
    return found


def loaded(rank: int, folder: str) -> dict[tuple[str, tuple[int, int]], tuple[Values, Values]]:
    """The same after a load, at the same numbers of nodes and shards and at others."""
    found = {}
    for name, shape in itertools.product(SAVED, ((2, 2), (4, 1), (1, 4), WHOLE)):
        model, parallel = unsharded(CASES[name]) if shape == WHOLE else sharded(CASES[name], *shape)
        checkpoint.load(parallel, Path(folder, name))
        before = committed(model, parallel)
        found[name, shape] = before, gone_on(model, parallel, rank)
    return found


@pytest.mark.long
def test_a_checkpoint_is_gone_on_from_by_any_number_of_nodes_and_shards(tmp_path: Path) -> None:
    before = run_ranks(WORLD_SIZE, saved, str(tmp_path))
    after = run_ranks(WORLD_SIZE, loaded, str(tmp_path))
    for expected, found in zip(before, after, strict=True):
        for (name, shape), (start, end) in found.items():
            at_checkpoint, at_end = (Outcome(values=one, updates=[]) for one in expected[name])
            assert Outcome(values=start, updates=[]).distance(at_checkpoint) == 0, (name, shape)
            distance = Outcome(values=end, updates=[]).distance(at_end)
            if shape == (2, 2):
                assert distance == 0, name
            elif name in ("ddp", "zero1"):  # others have replicas, or roundings, of their own
                assert distance <= 2 * tolerance(CASES[name], at_end), (name, shape)


REFUSED = {
    "shape": Case(optimizer=functools.partial(beside, adamw, torch.optim.Adafactor, ("mix",))),
    "of its 3 rows": Case(optimizer=functools.partial(beside, adamw, torch.optim.Muon, ("few",))),
}


def refused(rank: int) -> dict[str, str]:
    found = {}
    for name, case in REFUSED.items():
        with pytest.raises(UnsupportedOptimizer) as raised:
            sharded(case, 1, WORLD_SIZE)
        found[name] = str(raised.value)
    return found


def test_what_cannot_be_stepped_over_shards_is_refused_before_training() -> None:
    for found in run_ranks(WORLD_SIZE, refused):
        for name, text in found.items():
            assert name in text
            assert "AdamW" in text
