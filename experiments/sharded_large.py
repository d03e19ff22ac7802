"""A model of 125 million parameters on 2 nodes of 2 shards, all on this machine: 20 updates, killed and resumed.

The model is a GPT-Neo with its 50,257 tokens, from its configuration; the rows of text are made up. Each run is
`stretto train --shard 2`. Once its record of update 12 is there, all of its processes are killed at once. `stretto
resume` goes on from its last checkpoint. Kept are the losses of all updates, their times, and the peak memory of rank
0.

    PYTHONPATH=. python experiments/sharded_large.py --out benchmarks/results/DATE-sharded-large

Linux only; about 20 GiB of memory. `--width 384 --layers 8` is a model of 34 million, in a third of it.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from large_model import write_stories

from stretto.machine import describe_environment
from stretto_lab.observe import read_json_lines, replace_json

ARMS = ("acco:wire=int4", "diloco:interval=5:fragments=1")
UPDATES, SAVED_EVERY, KILLED_AFTER = 20, 5, 12


def config_of(folder: Path, width: int, layers: int) -> tuple[Path, int]:
    """Write the configuration of a GPT-Neo; return its file, and how many parameters the model has."""
    config = transformers.GPTNeoConfig(
        hidden_size=width,
        num_layers=layers,
        num_heads=width // 64,
        attention_types=[[["global", "local"], layers // 2]],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return folder / "config.json", sum(parameter.numel() for parameter in model.parameters())


def updates_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run so far."""
    file = run / "updates.jsonl"
    return read_json_lines(file) if file.exists() else []


def killed(command: Sequence[str], run: Path) -> int:
    """Run a command until `KILLED_AFTER` updates, kill all of its processes, and return how many it has made."""
    with subprocess.Popen(command, start_new_session=True) as process:
        while len(updates_of(run)) < KILLED_AFTER:
            if process.poll() is not None:
                raise SystemExit(f"{command} ended by itself, with {process.returncode}")
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    return len(updates_of(run))


def tried(arm: str, model: Path, data: Path, run: Path, length: int) -> dict[str, Any]:
    """Train under one strategy, killed and resumed; return what was seen."""
    words = (
        f"--task.data {data} --task.model {model} --task.length {length} --task.batch 1 --task.readers 0 "
        f"--task.heldout.samples 2 --task.sample 1 --workers 4 --shard 2 --micro-batches 2 "
        f"--updates {UPDATES} --checkpoint-every {SAVED_EVERY} --evaluate-every None "
        f"--no-tensorboard --strategy {arm} --run-dir {run}"
    )
    stretto = [sys.executable, "-m", "stretto"]
    made = killed([*stretto, "train", "language", *words.split()], run)
    subprocess.run([*stretto, "resume", str(run)], check=True)
    records = updates_of(run)
    memory = read_json_lines(run / "memory.jsonl")
    return {
        "arm": arm,
        "made_before_the_kill": made,
        "steps": [one["step"] for one in records],
        "losses": [one["loss"] for one in records],
        "seconds": [one["training_seconds"] for one in records],
        "peak_bytes_of_rank_0": max(one["peak_bytes"] for one in memory),
        "heldout": read_json_lines(run / "evaluations.jsonl"),
    }


def main() -> None:
    """Try both strategies and write `sharded_large.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for sharded_large.json")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--length", type=int, default=16, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12, help="an even number")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_stories(Path(folder), seed=0)
        model, parameters = config_of(Path(folder, "model"), options.width, options.layers)
        found = []
        for number, arm in enumerate(options.arms.split(",")):
            run = Path(folder, f"run-{number}")
            found.append(one := tried(arm, model, Path(folder, "stories.jsonl"), run, options.length))
            print(
                arm, one["steps"], one["losses"], f"{one['peak_bytes_of_rank_0'] / 2**30:.2f} GiB", flush=True
            )
            content = {"parameters": parameters, "length": options.length, "runs": found}
            replace_json(
                options.out / "sharded_large.json", {**content, "environment": describe_environment()}
            )


if __name__ == "__main__":
    main()
