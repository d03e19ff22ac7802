"""Plain PyTorch reads a checkpoint with its own tools, and the job's state goes through them both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from stretto import DPU, DataParallel, Options, WeightPrediction, ZeRO1, checkpoint
from stretto.checkpoint.manifest import Manifest
from stretto_lab import testing
from stretto_lab.testing import differing
from tests.bits import unequal
from tests.checkpoint.jobs import NAMES, SAVED_AT, STRATEGIES, Case, Job
from tests.checkpoint.plainly import read_into
from tests.draws import part
from tests.processes import run_ranks
from tests.sharded import jobs

# What PyTorch says of every save and load in a single process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable:UserWarning")


def read_plainly(path: Path, case: testing.Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Read into a bare model and a plain optimizer, as one would read any checkpoint of PyTorch's."""
    model, optimizer, _ = case.parts()
    read_into(model, optimizer, path)
    return model, optimizer


def saved(rank: int, directory: str, world_size: int, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    expected = {}
    for strategy in STRATEGIES:
        if strategy.name in names:
            job = Job(Case(strategy=strategy), rank).train(SAVED_AT)
            job.save(Path(directory, strategy.name))
            with job.parallel.settled():
                expected[strategy.name] = {k: v.clone() for k, v in job.model.state_dict().items()}
    return expected


@pytest.mark.parametrize("world_size", part([1, 2]))
def test_a_bare_model_and_a_plain_optimizer_read_every_strategy(world_size: int, tmp_path: Path) -> None:
    expected = run_ranks(world_size, saved, str(tmp_path), world_size, NAMES)[0]
    for strategy in STRATEGIES:
        (path,) = (tmp_path / strategy.name).iterdir()
        model, optimizer = read_plainly(path, Case())
        found = model.state_dict()
        assert {n for n, v in found.items() if not torch.equal(v, expected[strategy.name][n])} == set()
        # What the owner holds in segments is what the plain optimizer holds by parameter.
        continuing = Job(Case(strategy=strategy))
        continuing.load(path)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = continuing.holds()
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                pieces = [
                    (int(name.rpartition(" ")[2]), piece.reshape(-1))
                    for name, piece in held.items()
                    if name.startswith(f"{key} of {names[id(parameter)]} from ")
                ]
                whole = torch.cat([piece for _, piece in sorted(pieces, key=lambda item: item[0])])
                assert torch.equal(value.reshape(-1), whole[: value.numel()]), key
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [group["lr"] for group in continuing.optimizer.param_groups] != [0.01]


def test_a_plain_step_after_a_checkpoint_is_the_step_the_job_takes(tmp_path: Path) -> None:
    case = Case(strategy=ZeRO1(), micro_batches=1, options=Options(allow_unused=True))
    job = Job(case, evaluates=True).train(SAVED_AT)
    path = job.save(tmp_path)
    model, optimizer = read_plainly(path, case)
    model.eval()
    inputs, targets, used = next(iter(job.batches))
    job.batches.position -= 1
    (model(inputs, used) - targets).float().square().mean().backward()
    optimizer.step()
    job.train(SAVED_AT + 1)
    assert unequal(model.parameters(), job.model.parameters()) == []


def test_a_bfloat16_model_is_saved_beside_its_masters(tmp_path: Path) -> None:
    case = Case(strategy=DPU(), dtype=torch.bfloat16)
    job = Job(case).train(SAVED_AT)
    path = job.save(tmp_path)
    model, _ = read_plainly(path, case)
    assert unequal(model.parameters(), job.model.parameters()) == []
    masters = {f"master.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert masters == {name for name in stored_names(path) if name.startswith("master.")}


def test_values_that_installing_does_not_round_have_no_masters_beside_them(tmp_path: Path) -> None:
    assert not any(name.startswith("master.") for name in stored_names(Job(Case()).save(tmp_path)))


def test_the_estimate_is_never_taken_for_the_parameters(tmp_path: Path) -> None:
    case = Case(strategy=WeightPrediction())
    job = Job(case).train(SAVED_AT)
    path = job.save(tmp_path)
    model, _ = read_plainly(path, case)
    shown = [p.detach().clone() for p in job.model.parameters()]
    with job.parallel.settled():
        assert unequal(model.parameters(), job.model.parameters()) == []
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), shown, strict=True))
    assert {f"shown.{name}" for name, p in model.named_parameters() if p.requires_grad} <= stored_names(path)


def saved_by_shards(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model, parallel = jobs.sharded(jobs.Case(strategy=ZeRO1(), optimizer=jobs.adamw), 1, 2)
    for index in range(4):
        parallel.backward(jobs.loss_of(model, jobs.batch(rank, index)))
    checkpoint.save(parallel, folder)
    with parallel.settled():
        return jobs.whole(model)


def saved_by_replicas(rank: int, folder: str) -> dict[str, torch.Tensor]:
    job = Job(Case(strategy=DPU(), dtype=torch.bfloat16), rank).train(SAVED_AT)
    job.save(Path(folder))
    with job.parallel.settled():
        return jobs.whole(job.model)


@pytest.mark.parametrize("saved", part([saved_by_shards, saved_by_replicas]))
def test_a_model_leaves_as_safetensors_however_its_ranks_hold_it(saved: Any, tmp_path: Path) -> None:
    expected = run_ranks(2, saved, str(tmp_path / "saved"))[0]
    found = load_file(checkpoint.export(tmp_path / "saved", tmp_path / "model"))
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert {n for n in found if not torch.equal(found[n], expected[n])} == set()


def test_a_hugging_face_model_leaves_as_a_folder_that_from_pretrained_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=7)
    model = GPT2LMHeadModel(config)
    parallel = DataParallel(model, torch.optim.AdamW(model.parameters()), ZeRO1(), micro_batches=1)
    tokens = torch.arange(7)[None]
    parallel.backward(model(tokens, labels=tokens).loss)
    checkpoint.save(parallel, tmp_path / "saved")
    checkpoint.export(tmp_path / "saved", tmp_path / "model", config=model.config)
    read = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    with parallel.settled():
        assert unequal(read.parameters(), model.parameters()) == []


def test_the_moments_of_a_plain_optimizer_are_taken_in(tmp_path: Path) -> None:
    case = Case(strategy=ZeRO1())
    path = Job(case, evaluates=True).train(SAVED_AT).save(tmp_path)
    model, optimizer = read_plainly(path, case)
    fresh, loaded = Job(case, evaluates=True), Job(case, evaluates=True)
    loaded.load(path)
    counts = {"step": SAVED_AT, "round_index": SAVED_AT}
    fresh.parallel.load_state_dict(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "job": counts}
    )
    assert differing(fresh.holds(), loaded.holds()) == []


def through_plain_tools(rank: int, directory: str, world_size: int) -> None:
    for strategy in STRATEGIES:
        case = Case(strategy=strategy)
        job = Job(case, rank, evaluates=True).train(SAVED_AT)
        path = Path(directory, strategy.name)
        dcp.save(job.parallel.state_dict(), checkpoint_id=path, no_dist=world_size == 1)
        with job.parallel.settled():
            expected = {k: v for k, v in job.holds().items() if k != "losses"}
        fresh = Job(case, rank, evaluates=True)
        state = fresh.parallel.state_dict()
        dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
        fresh.parallel.load_state_dict(state)
        found = fresh.holds()
        assert {name for name in expected if not torch.equal(expected[name], found[name])} == set()
        assert fresh.parallel.steps == SAVED_AT
        fresh.train(SAVED_AT + 1)


@pytest.mark.parametrize("world_size", part([1, 2]))
def test_state_dict_goes_through_plain_save_and_load(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, through_plain_tools, str(tmp_path), world_size)


def test_a_job_is_a_stateful_of_its_own(tmp_path: Path) -> None:
    job = Job(Case(), evaluates=True).train(SAVED_AT)
    dcp.save({"app": job.parallel}, checkpoint_id=tmp_path, no_dist=True)
    fresh = Job(Case(), evaluates=True)
    dcp.load({"app": fresh.parallel}, checkpoint_id=tmp_path, no_dist=True)
    assert isinstance(fresh.parallel, DataParallel)
    assert unequal(fresh.model.parameters(), job.model.parameters()) == []


def stored_names(path: Path) -> set[str]:
    return {
        name
        for rank in range(len(Manifest.read(path).shares))
        for name in Manifest.read(path).share(path, rank).entries
    }
