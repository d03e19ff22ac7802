"""A checkpoint of replicas that differ: exact where it can be, their mean everywhere else."""

import copy
import random
from pathlib import Path

import pytest
import torch

from stretto import LocalSGD
from stretto.averaging.mean import ReplicaMean
from stretto.checkpoint.manifest import Manifest
from stretto.exchange import FP32, Exchange
from stretto.flat import plan_layout
from stretto.groups import SoloGroup
from stretto.optimizer import ShardedOptimizer, piece_states
from stretto.optimizer.settings import read_hyperparameters
from tests.bits import unequal
from tests.checkpoint.jobs import SAVED_AT, Case, Job
from tests.optimizer.owners import OPTIMIZERS, gradients_for, groups_of, model_of, reduced


def test_equal_replicas_are_saved_once(tmp_path: Path) -> None:
    sizes, have_replicas = [], []
    for state in (True, False):
        job = Job(Case(strategy=LocalSGD(rate=0.5, state=state))).train(SAVED_AT)
        path = job.save(tmp_path / str(state))
        have_replicas.append("replica.0" in Manifest.read(path).share(path, 0).entries)
        sizes.append(sum(file.stat().st_size for file in path.iterdir()))
    masters = sum(p.numel() for p in job.model.parameters() if p.requires_grad) * 4
    assert have_replicas == [False, True]
    assert sizes[1] > sizes[0] + 3 * masters  # masters and two moments of this rank's own


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replica_comes_back_in_whatever_order_its_buckets_go(name: str) -> None:
    for seed in range(20):
        draws, model = random.Random(seed), model_of(seed)
        optimizer = OPTIMIZERS[name](groups_of(list(model.parameters())))
        bucket_bytes = draws.choice([256, 1024, 4096])
        layout, parameters = plan_layout(
            model, optimizer, world_size=1, bucket_bytes=bucket_bytes, widen=True
        )
        layout = layout.filled_by(draws.sample(range(len(layout.slots)), len(layout.slots)))
        saved, loaded = (
            ShardedOptimizer(layout, parameters, optimizer, rank=0, num_owners=1) for _ in range(2)
        )
        for step in range(3):
            unused = {
                slot.name for slot in layout.slots if draws.random() < 0.3
            }  # cuts segments in its own way
            saved.step(
                reduced(saved, gradients_for(layout, step, unused)), read_hyperparameters(optimizer), 1.0
            )
        exchange = Exchange(SoloGroup(), layout, FP32, lambda work, what: None)
        state = copy.deepcopy(ReplicaMean(exchange, saved).state_dict())
        ReplicaMean(exchange, loaded).load_state_dict(state)
        assert unequal(saved.masters.flats, loaded.masters.flats) == [], seed
        before, after = dict(piece_states(saved)), dict(piece_states(loaded))
        for piece in saved.pieces:
            assert before[piece].keys() == after[piece].keys(), seed
            for key, value in before[piece].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[piece][key])), (seed, key)
