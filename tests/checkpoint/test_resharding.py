"""A checkpoint continues at another world size, and under another strategy."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto import ACCO, DDP, DPU, WeightPrediction, ZeRO1, checkpoint
from stretto.strategies import Strategy
from stretto_lab.testing import differing
from tests.checkpoint.jobs import SAVED_AT, Case, Job
from tests.processes import run_ranks


def passed_on(rank: int, world_size: int, source: str, target: str) -> None:
    job = Job(Case(optimizer="adamw"), rank)
    if source:
        checkpoint.load(job.parallel, source)
    else:
        job.train(SAVED_AT)
    job.save(Path(target))


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")
def test_every_entry_passes_through_other_world_sizes_to_the_bit(tmp_path: Path) -> None:
    found, source = [], ""
    for world_size in (3, 2, 1):
        target = str(tmp_path / str(world_size))
        run_ranks(world_size, passed_on, world_size, source, target)
        source = target
        found.append(checkpoint.read(target))
    for entries in found[1:]:
        for part in ("model", "carry", "optimizer"):
            assert entries[part].keys() == found[0][part].keys()
            for name, value in found[0][part].items():
                other = entries[part][name]
                assert torch.equal(other, value) if isinstance(value, Tensor) else other == value, name
    assert len(list((tmp_path / "3").glob("*/*.share"))) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DDP(), ZeRO1()),
        (ZeRO1(), ACCO()),
        (ACCO(), WeightPrediction()),
        (WeightPrediction(), DPU()),
        (DPU(), DDP()),
    ],
    ids=lambda strategy: strategy.name,
)
def test_another_strategy_takes_over_parameters_and_optimizer(
    before: Strategy, after: Strategy, tmp_path: Path
) -> None:
    saving = Job(Case(strategy=before)).train(SAVED_AT)
    saving.save(tmp_path)
    continuing = Job(Case(strategy=after))
    restored = continuing.load(tmp_path)
    dropped = [note for note in restored.notes if "dropped" in note]
    assert bool(dropped) == before.overlaps
    with saving.parallel.settled():
        expected = {n: v for n, v in saving.holds().items() if n != "losses" and not n.startswith("buffer")}
    found = continuing.holds()
    assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
    continuing.train(SAVED_AT + 1)


def test_another_layout_reads_the_same_checkpoint_to_the_bit(tmp_path: Path) -> None:
    saving = Job(Case()).train(SAVED_AT)
    saving.save(tmp_path)
    options = dataclasses.replace(Case().options, bucket_bytes=10**9)
    continuing = Job(Case(options=options))
    assert continuing.load(tmp_path).notes == ()
    expected = {n: v for n, v in saving.holds().items() if n.startswith(("shown", "exp_avg"))}
    found = continuing.holds()
    for name, parameter in continuing.model.named_parameters():
        assert torch.equal(found[f"shown {name}"], expected[f"shown {name}"])
        if parameter.requires_grad:
            pieces = sorted(
                (int(n.rpartition(" ")[2]), v)
                for n, v in expected.items()
                if n.startswith(f"exp_avg of {name} from")
            )
            assert torch.equal(found[f"exp_avg of {name} from 0"], torch.cat([v for _, v in pieces]))


@pytest.mark.parametrize("wire", ["int4", "int8"])
def test_the_residual_of_a_packed_wire_goes_on_under_another_one(wire: str, tmp_path: Path) -> None:
    options = Case().options
    packed = Case(strategy=ZeRO1(), options=dataclasses.replace(options, wire="int8"))
    saving = Job(packed).train(SAVED_AT)
    saving.save(tmp_path)
    loading = Job(Case(strategy=ZeRO1(), options=dataclasses.replace(options, wire=wire)))
    assert loading.load(tmp_path).notes == ()
    found = loading.parallel.job.exchange.feedback.state_dict()
    residuals = saving.parallel.job.exchange.feedback.state_dict()
    assert any(bool(debt.any()) for debt in residuals.values())
    assert differing(found, residuals) == []
