"""A curve has no more points than a screen can show, whatever the length of the run."""

import numpy as np
import pytest

from stretto_lab.page.contents import Run
from stretto_lab.page.curves import POINTS, curves


def run_of(updates: int) -> Run:
    draw = np.random.default_rng(0)
    steps = np.arange(1.0, updates + 1)
    return Run(
        name="run",
        columns={
            "loss": 1.0 + draw.random(updates),
            "step": steps,
            "training_seconds": steps / 7,
        },
        axes={"update": steps},
        evaluations=np.stack([steps, draw.random(updates)], axis=1),
        evaluation_axes={"update": steps},
        events=(),
        time=None,
    )


@pytest.mark.parametrize("updates", [1, 2, POINTS - 1, POINTS + 1, 30 * POINTS])
def test_a_curve_has_as_many_points_as_there_are_updates_and_no_more_than_a_screen_shows(
    updates: int,
) -> None:
    drawn = curves(run_of(updates))
    for chart in ("heldout", "loss"):
        lengths = {len(line) for line in drawn[chart].values()}
        assert lengths in ({updates}, {POINTS})
        assert drawn[chart]["update"] == sorted(set(drawn[chart]["update"]))
