"""A run that is killed at any moment and resumed is the run that nobody disturbed, to the bit."""

import dataclasses
import random

import pytest

from stretto.errors import WorkerFailed
from tests.train.runs import evaluations, model_bits, records, tiny_run, train, train_until_killed

NEVER = -1




def written(folder: str) -> tuple[object, ...]:
    return records(folder), evaluations(folder), model_bits(folder)


@pytest.mark.parametrize("strategy", ["acco", "wp", "dpu", "zero1", "ddp"])
def test_a_killed_run_resumes_to_the_bit(strategy: str) -> None:
    calls = train(tiny_run("whole", strategy=strategy), 2, train_until_killed, 0, NEVER)
    draw = random.Random(strategy)
    for moment in range(2):
        victim = draw.randrange(2)
        run = tiny_run(f"killed-{moment}", strategy=strategy)
        with pytest.raises(WorkerFailed, match=f"rank {victim} of 2 local workers failed: .* killed by SIGKILL"):
            train(run, 2, train_until_killed, victim, draw.randrange(1, calls[victim]))
        train(dataclasses.replace(run, resume=True))
        assert written(f"killed-{moment}") == written("whole")
