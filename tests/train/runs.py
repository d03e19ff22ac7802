"""Runs of the tiny task in folders, and what is compared of them."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stretto_lab.observe import read_json_lines
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.outcome import Outcome, prepare_run_folder
from stretto_lab.train.rank import train_rank
from stretto_lab.train.workers import RankInfo, host_store, run_workers
from tests.train.tiny import Tiny

OWN = {
    "seconds",
    "lane_seconds",
    "exposed_seconds",
    "training_seconds",
    "cpu_seconds",
    "sent_bytes",
    "wait_seconds",
}
"""Fields of a record that two equal runs do not share: what a rank measured. A checkpoint is traffic too."""


def tiny_run(folder: str | None = None, **settings: Any) -> RunConfig[Tiny]:
    """A run of the tiny task; without TensorBoard, whose import would take longer than the run."""
    chosen = {"updates": 10, "micro_batches": 2, "evaluate_every": 4, "checkpoint_every": 3, "task": Tiny()}
    return RunConfig(run_dir=folder, tensorboard=False, timeout_seconds=120, **{**chosen, **settings})


def train(run: RunConfig[Tiny], world_size: int = 2, function: Any = train_rank, *args: Any) -> list[Outcome]:
    """Call `function(info, run, 0, False, *args)` on local workers and return what every rank returned."""
    prepare_run_folder(run)
    store = host_store("127.0.0.1", 0)
    infos = [
        RankInfo(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            host="127.0.0.1",
            port=store.port,
        )
        for rank in range(world_size)
    ]
    return run_workers(function, infos, run, 0, False, *args)


def train_until_killed(
    info: RankInfo, run: RunConfig[Tiny], warmup_updates: int, shows_progress: bool, victim: int, calls: int
) -> int:
    """Train; on rank `victim` the process kills itself at the `calls`-th function call or return.

    Returns:
        The calls and returns of this rank, if it lives.
    """
    seen = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        seen += 1
        if seen == calls and info.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    train_rank(info, run, warmup_updates, shows_progress)
    sys.setprofile(None)
    return seen


def train_until_hit_in_write(
    info: RankInfo,
    run: RunConfig[Tiny],
    warmup_updates: int,
    shows_progress: bool,
    victims: tuple[int, ...],
    number: signal.Signals,
    save: int,
) -> Outcome:
    """Train; on `victims` the process sends itself a signal when a piece of that save is written."""
    files, was_sent = 0, False

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal files, was_sent
        files += event == "call" and frame.f_code.co_qualname == "_Writing._write"
        is_written = event == "return" and frame.f_code.co_qualname == "Written.chunks"
        if is_written and files == save and info.rank in victims and not was_sent:
            was_sent = True
            os.kill(os.getpid(), number)

    threading.setprofile(count)
    sys.setprofile(count)  # a save that is not beside training
    return train_rank(info, run, warmup_updates, shows_progress)


def records(folder: str) -> list[dict[str, Any]]:
    """The records of all updates, without times."""
    return [
        {name: value for name, value in record.items() if name not in OWN}
        for record in read_json_lines(Path(folder, "updates.jsonl"))
    ]


def evaluations(folder: str) -> list[tuple[int, float]]:
    """Step and loss of all evaluations."""
    return [
        (record["step"], record["heldout_loss"])
        for record in read_json_lines(Path(folder, "evaluations.jsonl"))
    ]


def written(folder: str) -> tuple[object, ...]:
    """All that two equal runs share."""
    return records(folder), evaluations(folder), model_bits(folder)


def model_bits(folder: str) -> dict[str, bytes]:
    """The trained model, tensor by tensor."""
    state = torch.load(Path(folder, "model.pt"))
    # As bytes, because NumPy knows no bfloat16.
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}
