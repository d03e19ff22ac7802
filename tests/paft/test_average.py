"""Averaging after an all-reduce: free where replicas are the same, the mean where they are not, never infinite."""

import functools

import pytest
import torch

import stretto as st
from stretto.noise import Noise
from stretto_lab.faults import Fault
from stretto_lab.testing import differing
from tests.paft.noisy import NUMEL, Seen, flat, noise, same, train

STATES = pytest.mark.parametrize("state", [False, True])


@functools.cache
def synchronous(ranks: int) -> list[Seen]:
    return train(st.DDP(), ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "strategy",
    [
        st.PAFTSync(interval=3),
        st.PAFTSync(interval=1, state=True),
        st.PAFTSync(interval=2, overlap=True),
        st.PAFTDyn(first=1, maximum=2),
        st.PAFTDyn(first=1, maximum=2, overlap=True),
    ],
    ids=repr,
)
def test_without_noise_it_is_ddp_to_the_bit(strategy: st.Strategy, ranks: int) -> None:
    guards = (st.ReplicaGuard(), st.AtRest())
    for found, expected in zip(train(strategy, ranks=ranks, guards=guards), synchronous(ranks), strict=True):
        assert differing([expected.shown, expected.final], [found.shown, found.final]) == []
        assert [(u.step, u.loss, u.samples, u.incidents) for u in found.updates] == [
            (u.step, u.loss, u.samples, ()) for u in expected.updates
        ]


def test_replicas_that_are_the_same_are_not_sent() -> None:
    sent = sum(update.sent_bytes for update in train(st.PAFTSync(interval=1))[0].updates)
    plain = sum(update.sent_bytes for update in synchronous(3)[0].updates)
    assert (
        0 < sent - plain < 8 * 3 * 24
    )  # a standing of 17 bytes per update and other rank, and the last one's
    assert sent - plain < 8 * NUMEL * 4 / 10


def test_averaging_the_state_changes_the_next_step() -> None:
    with_state, without = (
        train(st.PAFTSync(interval=4, state=state), faults=noise(3, 1e-3)) for state in (True, False)
    )
    assert same(with_state[0].shown[4], without[0].shown[4])
    assert not same(with_state[0].shown[5], without[0].shown[5])


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


@pytest.mark.parametrize(
    "strategy", [st.PAFTSync(interval=1), st.PAFTSync(interval=3, overlap=True)], ids=repr
)
def test_where_no_replica_is_finite_the_job_ends_and_says_so(strategy: st.Strategy) -> None:
    lost = [Fault(site="step", rank=r, instant=2, extent="all", pattern="nan") for r in range(3)]
    found = train(strategy, faults=lost)
    assert "NonFinite: rank" in str(found[0].error)
    assert "step 3: no replica is finite:" in str(found[0].error)


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
