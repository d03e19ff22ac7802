"""Guards beside strategies whose replicas may differ: at rest always, between ranks right after an average."""

import functools

import pytest

import stretto as st
from stretto_lab.faults import Fault
from tests.paft.noisy import Seen, noise, same, train

STRATEGIES = {
    "local": st.LocalSGD(rate=0.5),
    "local, state averaged": st.LocalSGD(rate=0.5, state=True),
    "paft-sync": st.PAFTSync(interval=2),
    "paft-dyn": st.PAFTDyn(first=2, maximum=2),
    "paft-sync, overlapped": st.PAFTSync(interval=2, overlap=True),
    "paft-dyn, overlapped": st.PAFTDyn(first=2, maximum=2, overlap=True),
}


@functools.cache
def clean(name: str) -> list[Seen]:
    """Train without faults and guards, once for all tests that compare with it."""
    return train(STRATEGIES[name])


def found_by(seen: Seen) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(v.guard, v.site, v.ranks) for update in seen.updates for v in update.incidents]


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("site", ["masters", "optimizer state", "reduced gradient"])
def test_a_damaged_word_at_rest_is_mended_to_the_bit(name: str, site: str) -> None:
    fault = Fault(site=site, rank=1, instant=2)  # type: ignore[arg-type]  # parametrised
    watched = train(STRATEGIES[name], faults=[fault], guards=(st.AtRest(),))
    assert [
        (left, right)
        for left, right in zip(clean(name), watched, strict=True)
        if not same(left.final, right.final)
    ] == []
    assert found_by(watched[0]) == [("rest", site, (1,))]


@pytest.mark.parametrize("name", ["local", "local, state averaged"])
def test_what_reaches_one_rank_wrong_in_an_average_is_copied_over(name: str) -> None:
    fault = Fault(site="gathered values", rank=2, instant=0, extent="chunk", pattern="zero", seed=1)
    watched = train(STRATEGIES[name], faults=[fault], guards=(st.ReplicaGuard(),))
    assert [
        (left, right)
        for left, right in zip(clean(name), watched, strict=True)
        if not same(left.final, right.final)
    ] == []
    assert {incident[0] for incident in found_by(watched[0])} == {"replica"}
    assert {incident[2] for incident in found_by(watched[0])} == {(2,)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state", [False, True])
def test_replicas_that_noise_parts_between_averages_are_not_reported(state: bool, overlap: bool) -> None:
    strategy = st.PAFTSync(interval=4, state=state, overlap=overlap)
    found = train(strategy, faults=noise(3, 1e-3), guards=(st.ReplicaGuard(),))
    assert found[0].error is None
    assert found_by(found[0]) == []
