"""How a stock method's loop begins, ends and counts."""

import pytest
from torch import nn

from stretto.errors import ConfigError, UnknownName
from tests.bits import unequal
from tests.peers import training
from tests.peers.training import MICRO_BATCHES, make_peer
from tests.processes import run_ranks

CANNOT: list[tuple[str, type[Exception], str]] = [
    ("horovod", UnknownName, "torch-ddp-powersgd, torch-ddp-zero"),
    ("torch-ddp", ConfigError, r"torch-ddp needs torch\.distributed"),
]


def test_what_no_stock_method_can_do_is_named() -> None:
    for name, error, words in CANNOT:
        model = training.new_model()
        with pytest.raises(error, match=words):
            make_peer(name, model, training.new_optimizer(model), 1)


def test_a_lone_rank_that_only_computes_equals_plain_pytorch() -> None:
    model, plain = training.new_model(), training.new_model()
    peer = make_peer("compute", model, training.new_optimizer(model), 1, clip_norm=0.05)
    optimizer = training.new_optimizer(plain)
    for position in range(3):
        inputs, _ = training.micro_batch(position)
        update = peer.backward(training.loss_of(peer.model, inputs), samples=4)
        loss = training.loss_of(plain, inputs)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert update is not None
        assert (update.step, update.loss, update.gradient_norm) == (position + 1, loss.item(), norm.item())
        assert update.round_index == position
        assert update.sent_bytes == 0
    assert peer.finish() == []
    assert unequal(model.parameters(), plain.parameters()) == []


def stop_on_one_rank(rank: int, name: str) -> list[int]:
    """Rank 1 alone wants to stop, in its second update, with data without end."""
    model = training.new_model()
    peer = make_peer(name, model, training.new_optimizer(model), MICRO_BATCHES)
    steps = []
    for position, (inputs, weight) in enumerate(peer.feed(training.shard(rank, num=10**9))):
        if rank == 1 and position == MICRO_BATCHES:
            peer.stop()
        if update := peer.backward(training.loss_of(peer.model, inputs), weight):
            steps.append(update.step)
    peer.finish()
    return steps


def test_a_wish_to_stop_ends_all_ranks_at_the_same_update() -> None:
    assert run_ranks(2, stop_on_one_rank, "torch-ddp") == [[1, 2], [1, 2]]


def test_replicas_that_never_talk_stop_all_the_same() -> None:
    listener, asker = run_ranks(2, stop_on_one_rank, "compute")
    assert asker == [1, 2]
    assert listener  # ends at an update of its own


def uneven_data(rank: int) -> list[tuple[int, ...]]:
    """Rank 0 has two updates and a micro-batch, rank 1 four updates."""
    model = training.new_model()
    peer = make_peer("torch-ddp", model, training.new_optimizer(model), MICRO_BATCHES)
    batches = training.shard(rank, num=[2 * MICRO_BATCHES + 1, 4 * MICRO_BATCHES][rank])
    counts = []
    for inputs, weight in peer.feed(batches):
        if update := peer.backward(training.loss_of(peer.model, inputs), weight):
            counts.append(update.micro_batches)
    peer.finish()
    return counts


def test_a_rank_whose_data_have_ended_goes_on_without_weight_to_the_agreed_end() -> None:
    expected = [(3, 3), (3, 3), (1, 3)]
    assert run_ranks(2, uneven_data) == [expected, expected]


def test_an_empty_loader_is_refused() -> None:
    model = training.new_model()
    peer = make_peer("compute", model, training.new_optimizer(model), 1)
    with pytest.raises(ConfigError, match="rank 0: the loader has no batch"):
        next(peer.feed([]))
