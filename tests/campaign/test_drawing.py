"""What is drawn: every promise in turn, and the same for the same seed."""

from collections import Counter
from itertools import islice

from stretto_lab.campaign.drawing import draw_faults, draw_real_numbers
from stretto_lab.campaign.promises import AUDITABLE, EXTENTS, ROWS, SAMPLED, STRATEGIES_OF

CELLS = [
    (row, name)
    for row in ROWS
    for name in STRATEGIES_OF[row.strategies]
    if row.audit_rate is None or name in AUDITABLE
]


def test_every_promise_is_tried_as_often_in_the_jobs_of_every_strategy() -> None:
    drawn = list(islice(draw_faults(5), 10 * len(CELLS)))
    assert Counter((one.row, one.job.strategy) for one in drawn) == dict.fromkeys(CELLS, 10)
    for one in drawn:
        assert one.fault.site == one.row.site
        assert one.fault.extent in EXTENTS[one.row.extent]
        assert 0 <= one.moment < 1


def test_a_number_and_a_seed_decide_a_fault() -> None:
    assert list(islice(draw_faults(5), 40)) == list(islice(draw_faults(5), 90))[:40]
    assert list(islice(draw_faults(5), 40)) != list(islice(draw_faults(6), 40))


def test_damage_is_of_many_kinds_and_strikes_again_only_where_somebody_is_to_notice() -> None:
    drawn = list(islice(draw_faults(0), 2000))
    assert len({one.fault.pattern for one in drawn}) > 10
    lasting = [one for one in drawn if one.lasts]
    assert len(lasting) > 100
    assert all(one.row.seen_by is not None and one.row != SAMPLED for one in lasting)
    assert {one.job.ranks for one in drawn} == {2, 3, 5}
    assert {"page", "chunk", "run", "element"} == {one.fault.extent for one in drawn}


def test_a_moment_is_a_place_among_the_opportunities_of_a_job() -> None:
    drawn = next(draw_faults(0))
    assert all(3 <= one.fault_within(3, 7).instant < 7 for one in islice(draw_faults(0), 200))
    assert drawn.fault_within(0, 0).instant == 0


def test_faults_on_real_workers_are_as_many_as_wished() -> None:
    numbers = draw_real_numbers(0, 200, 20)
    assert len(numbers) == 20
    assert numbers <= set(range(200))
    assert numbers == draw_real_numbers(0, 200, 20)
