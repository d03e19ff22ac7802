"""Every stock method trains what the plain loop trains, on two ranks of a counting group."""

import functools
import os

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.groups import Link, register_throttled
from stretto_lab.testing import differing
from tests.peers import training
from tests.peers.training import MICRO_BATCHES, NUM_PARAMETERS, UPDATES, WORLD_SIZE, run_counted
from tests.processes import rank_outcomes, run_ranks


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        # fp32: a rank's mean and the sum over ranks round differently from one sum, by a last bit of a gradient;
        # four Adam steps of at most 1e-2 each turn a relative 1e-6 into well under 1e-6.
        ("torch-ddp", 1e-6),
        ("torch-ddp-zero", 1e-6),
        ("torch-fsdp2", 1e-6),
        # bf16 keeps 8 bits: a gradient is off by up to 2^-9 of itself, twice (narrowing, sum), a step of 1e-2 by
        # about as much of itself, four steps by 4 · 1e-2 · 2^-8 = 1.6e-4. A norm is off by up to 2^-8 = 25 · 1.6e-4.
        ("torch-ddp-bf16", 1.6e-4),
    ],
)
def test_a_stock_method_equals_the_plain_loop(name: str, tolerance: float) -> None:
    """With weights that differ, two parameter groups, clipping and a schedule."""
    expected, losses, norms = training.plain_loop(clip_norm=0.05)
    for parameters, updates in run_counted(training.train, name, 0.05):
        assert parameters.keys() == expected.keys()
        for key, value in expected.items():
            assert (parameters[key] - value).abs().max() < tolerance, key
        assert [update.step for update in updates] == [1, 2, 3, 4]
        assert [update.loss for update in updates] == pytest.approx(losses, abs=max(1e-6, tolerance))
        assert min(norms) > 0.05  # every update is clipped
        assert [update.gradient_norm for update in updates] == pytest.approx(norms, rel=25 * tolerance)
        assert [update.learning_rates for update in updates] == [
            (1e-2 * 0.5**turn, 3e-3 * 0.5**turn) for turn in range(UPDATES)
        ]
        assert {update.micro_batches for update in updates} == {(MICRO_BATCHES, MICRO_BATCHES)}
        assert {update.samples for update in updates} == {WORLD_SIZE * MICRO_BATCHES * 4}


@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("torch-ddp", 4), ("torch-ddp-bf16", 2)])
def test_ddp_sends_each_gradient_once(name: str, bytes_per_parameter: int) -> None:
    # 2 (N-1)/N = 1 on two ranks; torch arranges its buckets anew in the second update, and tells their sizes then.
    for _, updates in run_counted(training.train, name):
        sent = [update.sent_bytes for update in updates]
        assert sent[0] == sent[2] == sent[3] == bytes_per_parameter * NUM_PARAMETERS


def test_zero_sends_the_gradients_and_then_the_parts() -> None:
    ranks = run_counted(training.train, "torch-ddp-zero")
    sent = [updates[-1].sent_bytes for _, updates in ranks]
    assert sum(sent) == 2 * 4 * NUM_PARAMETERS + 4 * NUM_PARAMETERS


def train_whole(rank: int, name: str) -> dict[str, Tensor]:
    return training.train(rank, name, 0.05, whole_updates=UPDATES)[0]


@pytest.mark.parametrize("name", ["torch-ddp-powersgd", "torch-local-sgd"])
def test_first_updates_of_a_method_that_sends_less_are_those_of_ddp(name: str) -> None:
    """To the bit: neither a hook that only adds up nor weights that differ round in another way."""
    expected, _ = run_counted(training.train, "torch-ddp", 0.05)[0]
    for parameters in run_counted(train_whole, name):
        assert differing(expected, parameters) == []


def train_compressed(rank: int) -> tuple[dict[str, Tensor], list[int]]:
    parameters, updates = training.train(rank, "torch-ddp-powersgd")
    return parameters, [update.sent_bytes for update in updates]


def test_powersgd_sends_whole_gradients_first_and_then_matrices_of_rank_one() -> None:
    (first, sent), (second, _) = run_counted(train_compressed)
    thin = 3 * (6 + 6) + 3 * 6 + 6  # two vectors for each matrix, and what has one dimension as it is
    assert sent[0] == 4 * NUM_PARAMETERS
    assert sent[2:] == [4 * thin, 4 * thin]
    assert differing(first, second) == []


def train_in_buckets(rank: int) -> bool:
    """A model of more than DDP's first bucket; return whether the loss fell."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = training.make_peer("torch-ddp-powersgd", model, optimizer, 1)
    inputs = torch.randn(4, 256)
    losses = []
    for _ in range(12):
        loss = (peer.model(inputs) - inputs).square().mean()
        peer.backward(loss)
        losses.append(float(loss.detach()))
    return losses[-1] < losses[0]


def test_powersgd_keeps_the_order_of_its_all_reduces_over_several_buckets() -> None:
    assert run_ranks(WORLD_SIZE, train_in_buckets) == [True, True]


def ddp_as_a_peer(rank: int) -> dict[str, Tensor]:
    model = training.new_model()
    peer = training.make_peer("torch-ddp", model, training.new_optimizer(model), MICRO_BATCHES)
    for inputs, _ in training.shard(rank):
        peer.backward(training.loss_of(peer.model, inputs))
    peer.finish()
    return dict(model.state_dict())


def test_ddp_behind_a_slow_link_equals_ddp_on_plain_gloo_to_the_bit() -> None:
    plain = run_ranks(WORLD_SIZE, ddp_as_a_peer)[0]
    slow = run_counted(ddp_as_a_peer, link="10mbit,1ms")[1]
    assert differing(plain, slow) == []


def look_between_updates(rank: int) -> tuple[float, dict[str, Tensor]]:
    """Rank 0 alone evaluates, twice, between updates; then training goes on."""
    model = training.new_model()
    peer = training.make_peer("torch-fsdp2", model, training.new_optimizer(model), MICRO_BATCHES)
    seen = 0.0
    for _ in training.run(peer, training.shard(rank)):
        before = peer.group.sent.copy()
        with peer.settled():
            gathered = peer.group.sent["all_gather"] - before["all_gather"]
            if rank == 0:
                with torch.no_grad():
                    inputs, _ = training.micro_batch(999)
                    losses = [float(training.loss_of(model, inputs)) for _ in range(2)]
                assert losses[0] == losses[1]
                seen += losses[0]
        assert peer.group.sent["all_gather"] - before["all_gather"] == gathered > 0
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())  # in shards again
    with peer.settled():
        parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    return seen, parameters


def test_looking_at_a_sharded_model_needs_one_rank_and_changes_nothing() -> None:
    looked = run_counted(look_between_updates)
    undisturbed = run_counted(training.train, "torch-fsdp2")[0][0]
    assert looked[0][0] > 0
    for _, parameters in looked:
        assert differing(undisturbed, parameters) == []


def outlive_a_rank(rank: int) -> str:
    model = training.new_model()
    peer = training.make_peer("torch-ddp", model, training.new_optimizer(model), 1)
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        peer.backward(training.loss_of(peer.model, training.micro_batch(0)[0]))
    return str(caught.value)


def test_ddp_behind_a_slow_link_reports_what_gloo_reports_of_a_dead_rank() -> None:
    prepare = functools.partial(register_throttled, Link.parse("1mbit"))
    alive, _ = rank_outcomes(WORLD_SIZE, outlive_a_rank, backend="throttled", prepare=prepare)
    assert alive.error is None
    assert "peer" in alive.value
