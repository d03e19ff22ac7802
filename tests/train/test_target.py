"""When a held-out loss counts as reached."""

from stretto_lab.train.loop import seconds_to_loss
from stretto_lab.train.outcome import Evaluation


def evaluations(*losses: float) -> list[Evaluation]:
    """One evaluation every ten seconds, from 0."""
    return [
        Evaluation(step=index, training_seconds=10.0 * index, heldout_loss=loss)
        for index, loss in enumerate(losses)
    ]


def test_the_time_lies_where_the_line_between_two_evaluations_crosses_the_target() -> None:
    # From 4 at 0 s to 2 at 10 s: 3.5 after a quarter of the way.
    assert seconds_to_loss(evaluations(4.0, 2.0, 2.0), target=3.5) == 2.5


def test_one_lucky_evaluation_is_not_enough() -> None:
    assert seconds_to_loss(evaluations(4.0, 2.0, 4.0), target=3.0) is None
    assert seconds_to_loss(evaluations(4.0, 2.0), target=3.0) is None
    # The luck at 10 s does not count later either: from 4 at 20 s to 2 at 30 s.
    assert seconds_to_loss(evaluations(4.0, 2.0, 4.0, 2.0, 1.0), target=3.0) == 25.0


def test_a_target_that_is_met_exactly_is_met() -> None:
    assert seconds_to_loss(evaluations(4.0, 3.0, 3.0), target=3.0) == 10.0


def test_a_model_that_begins_below_the_target_needs_no_time() -> None:
    assert seconds_to_loss(evaluations(2.0, 2.0), target=3.0) == 0.0


def test_no_evaluations_reach_nothing() -> None:
    assert seconds_to_loss([], target=3.0) is None
