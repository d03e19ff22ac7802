"""A round goes through its stages in one order; every other order is refused, and changes nothing."""

import random

import pytest

from stretto.engine.compute_lane import Course, Stage
from stretto.engine.report import Vote
from stretto.errors import OutOfTurn
from tests.draws import seeds

STAGES = list(Stage)


def go_on(course: Course, after: Stage) -> None:
    """Let the course enter a stage."""
    if after is Stage.ACCUMULATING:
        course.land(at_boundary=True, steps=course.steps + 1, met=None)
    else:
        course.enter(after)


def state(course: Course) -> dict[str, object]:
    return dict(vars(course))


@pytest.mark.parametrize("seed", seeds(20))
def test_stages_follow_each_other_in_one_order_only(seed: int) -> None:
    draw = random.Random(seed)
    num_rounds = draw.randint(1, 3)
    course = Course(3, num_rounds)
    taken_off = 0
    for _ in range(200):
        after, before = draw.choice(STAGES), state(course)
        is_next = STAGES.index(after) == (STAGES.index(course.stage) + 1) % len(STAGES)
        if is_next:
            go_on(course, after)
            taken_off += after is Stage.IN_FLIGHT
            assert course.stage is after
            assert course.place == taken_off % num_rounds
        else:
            with pytest.raises(OutOfTurn, match=f"rank 3, after step {course.steps}: "):
                go_on(course, after)
            assert state(course) == before


@pytest.mark.parametrize("vote", [Vote.GO_ON, Vote.EXHAUSTED, Vote.STOP])
@pytest.mark.parametrize("forgets", [True, False])
def test_a_rank_that_has_handed_over_what_was_left_says_again_what_it_said(vote: Vote, forgets: bool) -> None:
    course = Course(3, 1)
    if vote is Vote.EXHAUSTED:
        course.exhaust()
    elif vote is Vote.STOP:
        course.stop()
    course.resume_pass([vote])
    with course.finishing(forgets=forgets):
        assert course.vote is Vote.LEFT
    assert course.vote is vote
    assert course.votes == ([] if forgets else [vote])


def test_a_stop_stays_over_passes_and_the_end_of_data_does_not() -> None:
    course = Course(3, 1)
    course.exhaust()
    course.resume_pass([Vote.EXHAUSTED, Vote.EXHAUSTED])
    course.begin_pass()
    assert not course.is_pass_over("any")
    course.resume_pass([Vote.GO_ON, Vote.STOP])
    for _ in range(2):
        course.begin_pass()
        assert course.is_pass_over("all")
