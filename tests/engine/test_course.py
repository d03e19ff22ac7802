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
        course.land(at_boundary=True, steps=course.steps + 1, votes=None)
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


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_updates_in_sight_are_those_whose_last_round_is_closed(num_rounds: int) -> None:
    course = Course(3, num_rounds)
    for number in range(3 * num_rounds):
        steps, ends_update = number // num_rounds, number % num_rounds == num_rounds - 1
        assert course.steps_in_sight == course.steps == steps
        course.enter(Stage.READY)
        assert course.steps_in_sight == steps + ends_update
        course.enter(Stage.IN_FLIGHT)
        assert course.steps_in_sight == steps + ends_update
        course.enter(Stage.ARRIVED)
        assert course.steps_in_sight == steps + ends_update
        course.land(at_boundary=ends_update, steps=steps + ends_update, votes=None)


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


@pytest.mark.parametrize("votes", [[], [Vote.GO_ON] * 2, [Vote.EXHAUSTED, Vote.GO_ON], [Vote.EXHAUSTED] * 2])
def test_a_pass_ends_when_any_or_all_have_no_data(votes: list[Vote]) -> None:
    course = Course(3, 1)
    course.resume_pass(votes)
    exhausted = [vote is Vote.EXHAUSTED for vote in votes]
    assert course.is_pass_over("any") == course.have_data_ended("any") == any(exhausted)
    assert course.is_pass_over("all") == course.have_data_ended("all") == (bool(votes) and all(exhausted))
