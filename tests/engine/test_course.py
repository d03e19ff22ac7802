"""A round goes through its stages in one order; every other order is refused, and changes nothing."""

import random

import pytest

from stretto.engine.compute_lane import RoundState, Stage
from stretto.engine.report import Vote
from stretto.errors import OutOfTurn
from tests.draws import seeds

STAGES = list(Stage)


def go_on(rounds: RoundState, after: Stage) -> None:
    """Let the course enter a stage."""
    if after is Stage.ACCUMULATING:
        rounds.install(at_boundary=True, steps=rounds.steps + 1, met=None)
    else:
        rounds.enter(after)


def state(rounds: RoundState) -> dict[str, object]:
    return dict(vars(rounds))


@pytest.mark.parametrize("seed", seeds(20))
def test_stages_follow_each_other_in_one_order_only(seed: int) -> None:
    draw = random.Random(seed)
    num_rounds = draw.randint(1, 3)
    rounds = RoundState(3, num_rounds)
    taken_off = 0
    for _ in range(200):
        after, before = draw.choice(STAGES), state(rounds)
        is_next = STAGES.index(after) == (STAGES.index(rounds.stage) + 1) % len(STAGES)
        if is_next:
            go_on(rounds, after)
            taken_off += after is Stage.IN_FLIGHT
            assert rounds.stage is after
            assert rounds.place == taken_off % num_rounds
        else:
            with pytest.raises(OutOfTurn, match=f"rank 3, after step {rounds.steps}: "):
                go_on(rounds, after)
            assert state(rounds) == before


@pytest.mark.parametrize("vote", [Vote.GO_ON, Vote.DATA_ENDED, Vote.STOP])
@pytest.mark.parametrize("forgets", [True, False])
def test_a_rank_that_has_handed_over_what_was_left_says_again_what_it_said(vote: Vote, forgets: bool) -> None:
    rounds = RoundState(3, 1)
    if vote is Vote.DATA_ENDED:
        rounds.end_data()
    elif vote is Vote.STOP:
        rounds.stop()
    rounds.resume_pass([vote])
    with rounds.finishing(forgets=forgets):
        assert rounds.vote is Vote.PASS_LEFT
    assert rounds.vote is vote
    assert rounds.votes == ([] if forgets else [vote])


def test_a_stop_stays_over_passes_and_the_end_of_data_does_not() -> None:
    rounds = RoundState(3, 1)
    rounds.end_data()
    rounds.resume_pass([Vote.DATA_ENDED, Vote.DATA_ENDED])
    rounds.begin_pass()
    assert not rounds.is_pass_over("any")
    rounds.resume_pass([Vote.GO_ON, Vote.STOP])
    for _ in range(2):
        rounds.begin_pass()
        assert rounds.is_pass_over("all")
