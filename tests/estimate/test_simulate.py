"""`stretto estimate` agrees with `stretto simulate`, which runs the strategies' own code on as many ranks."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto.link import Link
from stretto_lab.estimate import Work, time_of
from stretto_lab.evidence import OF_WIRES
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import MicroBatches, Task
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.draws import seeds
from tests.train.tiny import Plane, Points, heldout_loss, quadrant_loss

CLOSE = 0.1
ARMS = (
    "zero1",
    "acco",
    "wp",
    "dpu",
    "local:rate=0.25",
    "average:4",
    "average:2",
    "diloco:interval=4:fragments=2",
)
WARM_UP = 4
"""First updates, in which overlapping only begins; a whole interval of what sends now and then."""
UPDATES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """A model without buffers that is as large as it is told."""

    width: int
    """Hidden values."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 4))
        everywhere = Plane(64, seed=1)
        return Task(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            scheduler=None,
            loader=MicroBatches(Plane(512, seed=0), 2, rank=rank, world_size=world_size, seed=seed),
            loss=quadrant_loss,
            evaluate=lambda model: heldout_loss(model, Points(everywhere.places, everywhere.quadrants)),
        )


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(20))
def test_a_random_job_takes_as_long_as_in_a_simulation(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    arm, width = parse_arm(ARMS[seed % len(ARMS)]), draw.randrange(4_000, 16_000)
    ranks, micro_batches = draw.choice((2, 3, 4, 6)), draw.randint(2, 6)
    milliseconds = draw.uniform(5, 50)
    update = micro_batches * milliseconds / 1000
    # A link on which an exact exchange takes from a quarter to sixteen times an update's computing.
    bits = 8 * 8 * 7 * width / (update * 2 ** draw.uniform(-2, 4))
    bucket_bytes = 7 * width * 4 // draw.randint(1, 6)
    wire = draw.choice(tuple(OF_WIRES))
    simulate(
        SimulateConfig(
            task=Wide(width=width),
            strategy=arm.text,
            wire=wire,
            ranks=ranks,
            micro_batches=micro_batches,
            micro_batch_ms=milliseconds,
            network=f"{bits / 1e3:.3f}kbit",
            bucket_bytes=bucket_bytes,
            updates=WARM_UP + UPDATES,
            run_dir=str(tmp_path / "run"),
        )
    )
    ends = [record["training_seconds"] for record in read_json_lines(tmp_path / "run" / "updates.jsonl")]
    work = Work(
        parameters=7 * width + 4,
        update_seconds=update,
        ranks=ranks,
        micro_batches=micro_batches,
        link=Link(bits_per_second=bits),
        bucket_bytes=bucket_bytes,
    )
    found = (ends[-1] - ends[WARM_UP - 1]) / UPDATES
    assert time_of(work, arm.strategy(), wire).seconds == pytest.approx(found, rel=CLOSE)
