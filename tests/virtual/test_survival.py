"""Ranks of a virtual cluster die and come at an update, and the job goes on as on real processes."""

import random

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto_lab.virtual import Died, VirtualCluster, survive
from tests.survive.lived import Samples, batch_of, network

TOTAL = st.Total(7)
UPDATES = 20
AGREE_NS = 10**9


def lived(
    strategy: st.Strategy, ranks: int, losses: dict[int, int], every: int, again_ns: int | None = None
) -> tuple[list[Tensor], list[tuple[int, tuple[int, ...], int]]]:
    """Return what every rank's model is that lived to the end, and terms with their seats and first updates."""
    terms: list[tuple[int, tuple[int, ...], int]] = []

    def train(term: st.Term) -> Tensor:
        seat = term.seats[term.rank]
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parallel = st.DataParallel(model, optimizer, strategy, micro_batches=TOTAL, group=term.group)
        samples = Samples(term.rank, term.world_size)
        restored = term.go_on(parallel, loader=samples)
        if restored is not None and len(restored.loader_states) != term.world_size:
            samples.deal(restored.loader_states)
        if term.rank == 0:
            terms.append((term.number, term.seats, parallel.steps))

        def on_update(update: st.Update) -> None:
            if losses.get(seat) == update.step:
                raise Died
            term.keep(parallel, loader=samples)

        with parallel:
            for number in parallel.feed(samples, updates=UPDATES, on_update=on_update):
                inputs, targets = batch_of(number)
                parallel.backward((model(inputs) - targets).square().mean())
            parallel.finish()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    found = survive(VirtualCluster(ranks, seed=1), train, every=every, agree_ns=AGREE_NS, again_ns=again_ns)
    return list(found.values), terms


def test_those_that_live_go_on_from_the_last_state_and_end_as_if_nothing_had_been() -> None:
    ((alone,), _) = lived(st.ZeRO1(), 1, {}, every=4)
    models, terms = lived(st.ZeRO1(), 3, {1: 10}, every=4)
    assert terms == [(0, (0, 1, 2), 0), (1, (0, 2), 8)]
    assert len(models) == 2
    assert torch.equal(*models)
    torch.testing.assert_close(models[0], alone, rtol=0, atol=1e-4)  # sums of floats in another order


def test_one_that_comes_ends_a_term_where_a_state_is_kept() -> None:
    models, terms = lived(st.ACCO(), 3, {0: 6}, every=3, again_ns=AGREE_NS + 5_000_000)
    (_, first), (_, left), (number, whole) = [one[:2] for one in terms]
    assert (first, left, whole) == ((0, 1, 2), (1, 2), (1, 2, 3))
    assert terms[2][2] > terms[1][2]
    assert len(models) == 3
    assert all(torch.equal(model, models[0]) for model in models)
    assert number == 2


@pytest.mark.parametrize("seed", range(6))
def test_equal_runs_lose_and_go_on_alike(seed: int) -> None:
    rng = random.Random(seed)
    strategy = rng.choice(
        [st.DDP(), st.ZeRO1(), st.DPU(), st.WeightPrediction(), st.ACCO(), st.DiLoCo(interval=3)]
    )
    losses = {seat: rng.randint(1, UPDATES) for seat in rng.sample(range(3), rng.randint(1, 2))}
    if len(set(losses.values())) < len(losses):
        losses.popitem()  # two at once may take a share and its copy
    again = rng.choice([None, 1_000_000, AGREE_NS + 10_000_000])
    (models, terms), (others, same) = (lived(strategy, 3, losses, 2, again) for _ in range(2))
    assert terms == same
    assert all(torch.equal(model, models[0]) for model in [*models, *others])
