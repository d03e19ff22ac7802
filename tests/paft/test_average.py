"""Averaging after an all-reduce: free where replicas are the same, the mean where they are not, never infinite."""

import functools

import pytest
import torch

import stretto as st
from stretto.noise import Noise
from stretto_lab.faults import Fault
from tests.paft.noisy import NUMEL, Seen, flat, noise, same, train

STATES = pytest.mark.parametrize("state", [False, True])


@functools.cache
def synchronous(ranks: int) -> list[Seen]:
    return train(st.DDP(), ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "strategy", [st.PAFTSync(interval=3), st.PAFTSync(interval=1, state=True), st.PAFTDyn(first=1, maximum=2)]
)
def test_without_noise_it_is_ddp_to_the_bit(strategy: st.Strategy, ranks: int) -> None:
    for found, expected in zip(train(strategy, ranks=ranks), synchronous(ranks), strict=True):
        assert len(found.shown) == len(expected.shown)
        assert [pair for pair in zip(found.shown, expected.shown, strict=True) if not same(*pair)] == []
        assert same(found.final, expected.final)
        assert [(u.step, u.loss, u.samples) for u in found.updates] == [
            (u.step, u.loss, u.samples) for u in expected.updates
        ]


def test_replicas_that_are_the_same_are_not_sent() -> None:
    sent = sum(update.sent_bytes for update in train(st.PAFTSync(interval=1))[0].updates)
    plain = sum(update.sent_bytes for update in synchronous(3)[0].updates)
    assert (
        0 < sent - plain < 8 * 3 * 24
    )  # a standing of 17 bytes per update and other rank, and the last one's
    assert sent - plain < 8 * NUMEL * 4 / 10


@STATES
def test_every_interval_replicas_become_their_mean_in_rank_order(state: bool) -> None:
    faults = noise(3, 1e-3)
    alone = train(st.DDP(), faults=faults)
    found = train(st.PAFTSync(interval=4, state=state), faults=faults)
    for rank in range(3):
        for step in range(4):
            assert same(found[rank].shown[step], alone[rank].shown[step])
        gaps = [update.gap for update in found[rank].updates]
        assert gaps == [1, 2, 3, 0, 1, 2, 3, 0]
    third = torch.tensor(1 / 3)
    parts = [flat(seen.shown[4]) * third for seen in alone]
    assert torch.equal(flat(found[0].shown[4]), (parts[0] + parts[1]) + parts[2])
    assert [seen for seen in found if not same(seen.shown[4], found[0].shown[4])] == []
    assert not same(found[0].shown[5], found[1].shown[5])


def test_averaging_the_state_changes_the_next_step() -> None:
    with_state, without = (
        train(st.PAFTSync(interval=4, state=state), faults=noise(3, 1e-3)) for state in (True, False)
    )
    assert same(with_state[0].shown[4], without[0].shown[4])
    assert not same(with_state[0].shown[5], without[0].shown[5])


def test_all_ranks_end_with_the_same_values() -> None:
    found = train(st.PAFTSync(interval=100), faults=noise(3, 1e-3))
    assert not same(found[0].shown[-1], found[1].shown[-1])
    assert same(found[0].final, found[1].final)


@STATES
@pytest.mark.parametrize("pattern", ["nan", "infinity"])
def test_a_replica_that_is_not_finite_takes_the_mean_of_the_others(pattern: str, state: bool) -> None:
    lost = Fault(site="reduced gradient", rank=1, instant=2, extent="all", pattern=pattern)
    found = train(st.PAFTSync(interval=1, state=state), faults=[lost])
    assert [seen for seen in found if seen.error is not None] == []
    for seen in found:
        assert [values for values in seen.shown if not torch.isfinite(flat(values)).all()] == []
        assert same(seen.final, found[0].final)
    # The others hold what they would have without it: of two equal replicas the mean is either, to the bit.
    assert same(found[0].shown[3], synchronous(3)[0].shown[3])
    assert same(found[0].final, synchronous(3)[0].final)


def test_state_that_is_not_finite_counts_as_a_lost_replica() -> None:
    lost = Fault(site="optimizer state", rank=2, instant=3, extent="all", pattern="nan")
    for seen in train(st.PAFTSync(interval=1), faults=[lost]):
        assert seen.error is None
        assert torch.isfinite(flat(seen.final)).all()


def test_where_no_replica_is_finite_the_job_ends_and_says_so() -> None:
    lost = [Fault(site="step", rank=r, instant=2, extent="all", pattern="nan") for r in range(3)]
    found = train(st.PAFTSync(interval=1), faults=lost)
    assert "NonFinite: rank" in str(found[0].error)
    assert "step 3: no replica is finite any more" in str(found[0].error)


def struck_average(seed: int) -> list[Fault | Noise]:
    """Rank 0 is noised, so that replicas differ; a gathered value reaches rank 2 wrong during the first average.

    An update gathers once, for its gradients, and an average once more; the broadcast at the start is none.
    """
    return [
        *noise(3, 1e-3, of=1),
        Fault(site="gathered values", rank=2, instant=2, extent="chunk", pattern="zero", seed=seed),
    ]


def test_an_average_that_is_hit_leaves_one_replica_apart_until_the_next() -> None:
    found = train(st.PAFTSync(interval=2), faults=struck_average(3))
    assert same(found[0].shown[2], found[1].shown[2])
    assert not same(found[0].shown[2], found[2].shown[2])
    assert same(found[0].shown[4], found[2].shown[4])


def test_a_verified_average_that_is_hit_is_sent_again() -> None:
    options = st.Options(bucket_bytes=2**20, verified=True)
    healthy = train(st.PAFTSync(interval=2), faults=noise(3, 1e-3, of=1), options=options)
    found = train(st.PAFTSync(interval=2), faults=struck_average(3), options=options)
    for left, right in zip(found, healthy, strict=True):
        assert same(left.final, right.final)
    incidents = [incident for update in found[0].updates for incident in update.incidents]
    assert {(incident.site, incident.action) for incident in incidents} == {("gathered values", "sent again")}


def test_an_average_that_arrives_infinite_ends_the_job() -> None:
    faults = [
        *noise(3, 1e-3, of=1),
        Fault(site="gathered values", rank=2, instant=2, extent="all", pattern="infinity"),
    ]
    found = train(st.PAFTSync(interval=2), faults=faults)
    assert "StateCorrupt: rank 2, step 2: the average of finite replicas is not finite" in str(found[0].error)
