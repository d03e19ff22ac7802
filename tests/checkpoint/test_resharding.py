"""A checkpoint continues at another world size, and under another strategy."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import ACCO, DDP, DPU, DataParallel, WeightPrediction, ZeRO1, checkpoint
from stretto.strategies import Strategy
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster, VirtualGroup
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


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 2)])
def test_of_files_each_rank_reads_what_it_needs_and_ranks_send_each_other_none_of_it(
    before: int, after: int, tmp_path: Path
) -> None:
    def made(group: VirtualGroup) -> tuple[nn.Module, DataParallel]:
        model = nn.Linear(512, 256)
        return model, DataParallel(
            model, torch.optim.AdamW(model.parameters()), ACCO(), micro_batches=2, group=group
        )

    def saving(rank: int, group: VirtualGroup) -> None:
        torch.manual_seed(0)
        model, parallel = made(group)
        for batch in parallel.feed([torch.ones(2, 512)] * 8):
            parallel.backward(model(batch).square().sum())
        checkpoint.save(parallel, tmp_path)

    def loading(rank: int, group: VirtualGroup) -> tuple[int, Tensor]:
        model, parallel = made(group)
        sent = parallel.sent_bytes
        checkpoint.load(parallel, tmp_path)
        sent = parallel.sent_bytes - sent
        with parallel.settled():
            return sent, model.weight.detach().clone()

    VirtualCluster(before).run(saving)
    expected = checkpoint.read(tmp_path)["model"]["weight"]
    for sent, weight in VirtualCluster(after).run(loading).values:
        assert torch.equal(weight, expected)
        assert sent < 0.02 * 12 * expected.numel()


def test_a_model_that_has_grown_takes_what_fits_and_the_notes_name_all_else(tmp_path: Path) -> None:
    def model(width: int, *more: nn.Module) -> nn.Sequential:
        torch.manual_seed(width)
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width), *more)

    def program(rank: int, group: VirtualGroup, net: nn.Sequential, source: Path | None) -> dict[str, Any]:
        parallel = DataParallel(
            net, torch.optim.AdamW(net.parameters()), ACCO(), micro_batches=2, group=group
        )
        notes = () if source is None else checkpoint.load(parallel, source, partly=True).notes
        for batch in parallel.feed([torch.ones(2, 4)] * 4 if source is None else []):
            parallel.backward(net(batch).square().sum())
        checkpoint.save(parallel, tmp_path / str(source is None))
        return {"notes": notes, "steps": parallel.steps}

    VirtualCluster(3).run(lambda rank, group: program(rank, group, model(2), None))
    saved = checkpoint.read(tmp_path / "True")
    grown = [model(3, nn.Linear(3, 1)) for _ in range(2)]
    before = {name: value.clone() for name, value in grown[0].state_dict().items()}
    found = (
        VirtualCluster(2).run(lambda rank, group: program(rank, group, grown[rank], tmp_path / "True")).values
    )
    loaded = checkpoint.read(tmp_path / "False")
    for name, value in loaded["model"].items():
        assert torch.equal(value, saved["model"][name] if name.startswith("0.") else before[name]), name
    for name, value in loaded["optimizer"].items():
        if name.startswith("state."):
            assert name.startswith("state.0.")
            assert torch.equal(value, saved["optimizer"][name]), name
    assert found[0]["steps"] == saved["job"]["step"] > 0
    assert [note.split(":")[0] for note in found[0]["notes"][:4]] == [
        "'1.bias' is torch.float32 of shape (2,) in the checkpoint, torch.float32 of shape (3,) in the model",
        "'1.weight' is torch.float32 of shape (2, 6) in the checkpoint, torch.float32 of shape (3, 6) in the model",
        "'2.bias' is missing in the checkpoint",
        "'2.weight' is missing in the checkpoint",
    ]
