"""When a held-out loss counts as reached."""

from stretto_lab.train.outcome import Evaluation, seconds_to_loss

REACHED: list[tuple[list[float], float, float | None]] = [
    ([4.0, 2.0, 2.0], 3.5, 2.5),  # from 4 at 0 s to 2 at 10 s: after a quarter of the way
    ([4.0, 2.0, 4.0], 3.0, None),  # one lucky evaluation is not enough
    ([4.0, 2.0], 3.0, None),
    ([4.0, 2.0, 4.0, 2.0, 1.0], 3.0, 25.0),  # nor does its luck count later: from 4 at 20 s to 2 at 30 s
    ([4.0, 3.0, 3.0], 3.0, 10.0),  # met exactly
    ([2.0, 2.0], 3.0, 0.0),
    ([], 3.0, None),
]
"""Losses of evaluations every ten seconds, from 0; the target, and when it is reached."""


def test_a_loss_is_reached_where_the_line_to_it_crosses_the_target_and_the_next_stays_below() -> None:
    for losses, target, seconds in REACHED:
        evaluations = [
            Evaluation(step=index, training_seconds=10.0 * index, heldout_loss=loss)
            for index, loss in enumerate(losses)
        ]
        assert seconds_to_loss(evaluations, target=target) == seconds, losses
