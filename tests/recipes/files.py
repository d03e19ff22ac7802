"""Small files of the formats that people have, and runs over them on a virtual cluster."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.recipes import TaskConfig
from stretto.train.configuration import RunConfig
from stretto.train.outcome import Outcome, prepare_run_folder
from stretto.train.rank import RankContext, train_at
from stretto.virtual import VirtualCluster, VirtualGroup

STORIES = [f"Story {number}: " + "the cat saw a bird. " * (number % 5 + 1) for number in range(40)]
"""Documents of several lengths, all different."""
INSTRUCTIONS = [
    {
        "instruction": f"Add {number} and 1.",
        "input": "" if number % 2 else "Be brief.",
        "output": str(number + 1),
    }
    for number in range(24)
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what `datasets` converts out of the home folder; tests import this."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_over(task: TaskConfig, folder: str | None = None, **settings: Any) -> RunConfig[TaskConfig]:
    """A run of a task, without TensorBoard, whose import would take longer than the run."""
    chosen = {"updates": 4, "micro_batches": 2, "evaluate_every": None, "checkpoint_every": None, **settings}
    return RunConfig(task=task, run_dir=folder, tensorboard=False, **chosen)


def train_virtually(run: RunConfig[TaskConfig], ranks: int) -> list[Outcome]:
    """Train on virtual ranks, checkpoints included."""

    def program(rank: int, group: VirtualGroup) -> Outcome:
        context = RankContext(rank=rank, world_size=ranks, device=torch.device("cpu"), group=group)
        return train_at(context, run, warmup_updates=0, shows_progress=False)

    prepare_run_folder(run)
    return list(VirtualCluster(ranks).run(program).values)


def parameters(folder: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder, "model.pt"))
