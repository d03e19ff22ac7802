"""When a held-out loss counts as reached.

A single evaluation at or below the target may be luck of one update, so the next one has to confirm it. The time
is where the straight line between the last evaluation above the target and the first of the two below crosses it,
which makes it finer than the distance between evaluations:

    t = t0 + (t1 - t0) (l0 - X) / (l0 - l1),      l0 > X >= l1
"""

from collections.abc import Sequence

from stretto.train.outcome import Evaluation


def seconds_to_loss(evaluations: Sequence[Evaluation], target: float) -> float | None:
    """Return the training time at which `target` was reached for good, or None.

    Args:
        evaluations: In the order of time.
        target: Held-out loss.
    """
    for index in range(len(evaluations) - 1):
        first, confirming = evaluations[index], evaluations[index + 1]
        if first.heldout_loss <= target and confirming.heldout_loss <= target:
            return _crossing(evaluations[index - 1], first, target) if index else first.training_seconds
    return None


def _crossing(above: Evaluation, below: Evaluation, target: float) -> float:
    # The evaluation before a confirmed pair is above the target, or it would have been the pair's first.
    share = (above.heldout_loss - target) / (above.heldout_loss - below.heldout_loss)
    return above.training_seconds + share * (below.training_seconds - above.training_seconds)
