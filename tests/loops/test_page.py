"""Every loop of the page runs as it is printed."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.docs.pages import DOCS, code_blocks
from tests.loops.habits import batches, job, network

BLOCKS = code_blocks(DOCS / "loops.md", "tests/loops/test_page.py")


def names() -> dict[str, Any]:
    """What the loops of the page take for granted."""
    model, generator, critic = network(), nn.Linear(4, 4), nn.Linear(4, 1)
    return {
        "torch": torch,
        "model": model,
        "parallel": job(model),
        "generator": generator,
        "generator_job": job(generator),
        "critic": critic,
        "critic_job": job(critic),
        "loader": batches(),
        "loss_function": lambda output: output.square().mean(),
    }


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_loop_of_the_page_runs_and_commits_its_updates(index: int) -> None:
    found = names()
    exec(compile(BLOCKS[index], "loops.md", "exec"), found)
    if "Clipped" in found:
        found["parallel"].finish()
        parallel = job(found["model"], make_optimizer=lambda model: found["Clipped"](model.parameters()))
        parallel.backward(found["loss_function"](found["model"](batches()[0])))
        parallel.finish()
        assert [p for p in found["model"].parameters() if not float(p.detach().abs().max()) <= 0.011] == []
        return
    jobs = ["generator_job", "critic_job"] if "critic_job" in BLOCKS[index] else ["parallel"]
    for name in jobs:
        found[name].finish()
        assert found[name].steps == 4
