"""What is drawn: every promise in turn, and the same for the same seed."""

from collections import Counter
from itertools import islice

from stretto.campaign.drawing import CAMPAIGNED, EXTENTS, ROWS, SAMPLED, STRATEGIES_OF, draw, draw_real

CELLS = [
    (promise, name) for promise in ROWS for name in CAMPAIGNED if name in STRATEGIES_OF[promise.strategies]
]


def test_every_promise_is_tried_as_often_in_the_jobs_of_every_strategy() -> None:
    drawn = list(islice(draw(5), 10 * len(CELLS)))
    assert Counter((one.promise, one.strategy) for one in drawn) == dict.fromkeys(CELLS, 10)
    for one in drawn:
        assert one.fault.site == one.promise.site
        assert one.fault.extent in EXTENTS[one.promise.extent]
        assert 0 <= one.moment < 1


def test_a_number_and_a_seed_decide_a_fault() -> None:
    assert list(islice(draw(5), 40)) == list(islice(draw(5), 90))[:40]
    assert list(islice(draw(5), 40)) != list(islice(draw(6), 40))


def test_damage_is_of_many_kinds_and_strikes_again_only_where_somebody_is_to_notice() -> None:
    drawn = list(islice(draw(0), 2000))
    assert len({one.fault.pattern for one in drawn}) > 10
    lasting = [one for one in drawn if one.lasts]
    assert len(lasting) > 100
    assert all(one.promise.seen_by is not None and one.promise != SAMPLED for one in lasting)


def test_a_moment_is_a_place_among_the_opportunities_of_a_job() -> None:
    drawn = next(draw(0))
    assert all(3 <= one.within(3, 7).instant < 7 for one in islice(draw(0), 200))
    assert drawn.within(0, 0).instant == 0


def test_faults_on_real_workers_are_as_many_as_wished() -> None:
    numbers = draw_real(0, 200, 20)
    assert len(numbers) == 20
    assert numbers <= set(range(200))
    assert numbers == draw_real(0, 200, 20)
