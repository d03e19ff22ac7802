"""Every preset on real workers, killed half-way and resumed: does it end, to the bit, as one that nobody disturbed?

Each preset runs at a small scale over made-up files of the format that its data have: stories, instructions, CIFAR's
binaries. A run of two local workers is killed by SIGKILL about half-way, a worker or the launcher in turns, and goes on
by `stretto resume`. Records, evaluations and model must equal those of an undisturbed run; only what a rank measured
may differ.

    PYTHONPATH=. python experiments/presets.py --runs FOLDER --out benchmarks/results/DATE-presets

Launchers and workers are forked from a server that has imported what they need. Linux only.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from kill_and_resume import WORKERS, written
from launched import _running, until

from stretto import checkpoint
from stretto.machine import describe_environment
from stretto_lab.cli.presets import PRESETS
from stretto_lab.observe import read_json_lines, replace_json
from tests.processes import Command, start_server_of_ranks

IMPORTED = (
    "datasets",
    "peft",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    "transformers.models.llama.modeling_llama",
)
HIT = ("worker 1", "launcher", "worker 0")


def write_data(root: Path, seed: int) -> None:
    """Write files of the papers' kinds: rows of text, rows of instructions, and pictures with their classes."""
    draws = np.random.default_rng(seed)
    words = ["".join(draws.choice(list("aeionrst"), 4)) for _ in range(200)]
    texts = [" ".join(draws.choice(words, draws.integers(5, 60))) for _ in range(600)]
    instructions = [
        {"instruction": text[:30], "input": "" if index % 2 else text[30:50], "output": text[-40:]}
        for index, text in enumerate(texts)
    ]
    for name, rows in (("stories", [{"text": text} for text in texts]), ("alpaca", instructions)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, file, labels in (("cifar10", "data_batch_1.bin", 1), ("cifar100", "train.bin", 2)):
        (root / name).mkdir(exist_ok=True)
        pictures = draws.integers(0, 256, (600, labels + 3072), dtype=np.uint8)
        pictures[:, :labels] %= 10
        (root / name / file).write_bytes(pictures.tobytes())


def data_of(name: str, root: Path) -> Path:
    """Return the data for a preset."""
    for kind in ("alpaca", "cifar100", "cifar10"):
        if kind in name:
            return root / (kind if "cifar" in kind else f"{kind}.jsonl")
    return root / "stories.jsonl"


def words_of(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the command of a run."""
    return [
        "train", PRESETS[name].recipe, "--preset", name, "--scale", str(options.scale),
        "--updates", str(options.updates), "--workers", str(WORKERS), "--run-dir", str(folder),
        "--checkpoint-every", "3", "--evaluate-every", "5", "--no-tensorboard",
        "--task.data", str(data_of(name, options.runs)), *options.more.split(),
    ]  # fmt: skip


def completed(words: list[str]) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: It failed.
    """
    with Command("-m", "stretto", *words) as command:
        printed = command.communicate()
        if command.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with exit code {command.returncode}: {printed}")


def kill(words: list[str], folder: Path, whom: str, update: int) -> int:
    """Run a command, kill it once it has recorded `update`, and return how many updates it has recorded at its end."""
    with Command("-m", "stretto", *words) as command:
        until(lambda: len(read_json_lines(folder / "updates.jsonl")) >= update, f"update {update}")
        if whom == "launcher":
            command.kill()
        else:
            found = _running()
            servers = {pid for pid, parent, _ in found if parent == command.pid}
            workers = sorted(pid for pid, parent, _ in found if parent in servers)
            os.kill(workers[int(whom[-1])], signal.SIGKILL)
        command.communicate()  # until the last of its processes has closed the pipes
    return len(read_json_lines(folder / "updates.jsonl"))


def tried(name: str, whom: str, update: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one preset undisturbed, then killed and resumed, and return how both ended."""
    whole, hit = options.runs / f"{name}-whole", options.runs / f"{name}-killed"
    completed(words_of(name, whole, options))
    recorded = kill(words_of(name, hit, options), hit, whom, update)
    latest = checkpoint.latest(hit / "checkpoints")
    completed(["resume", str(hit)])
    records, evaluations, model = written(hit)
    digest = xxhash.xxh3_64_hexdigest(b"".join(itertools.chain.from_iterable(sorted_bits(model))))
    return {
        "preset": name,
        "killed": whom,
        "updates_recorded": recorded,
        "resumed_from": None if latest is None else latest.name,
        "updates": len(records),
        "heldout_losses": [loss for _, loss in evaluations],
        "model_digest": digest,
        "equal": (records, evaluations, model) == written(whole),
    }


def sorted_bits(model: dict[str, bytes]) -> list[tuple[bytes, bytes]]:
    """Return names and bits of a model's tensors, in the order of names."""
    return [(name.encode(), bits) for name, bits in sorted(model.items())]


def main() -> int:
    """Try all presets, write and print the outcomes, and return 0 if all ended as they should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for presets.json")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the data and the runs")
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="presets whose names hold this")
    parser.add_argument("--more", default="", help="more options of every run")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start_server_of_ranks(*IMPORTED)
    options.runs.mkdir(parents=True, exist_ok=True)
    write_data(options.runs, options.seed)
    draw, found = random.Random(options.seed), []
    for name, whom in zip(PRESETS, itertools.cycle(HIT)):
        update = draw.randint(options.updates * 2 // 5, options.updates * 3 // 5)
        if options.only not in name:
            continue
        found.append(tried(name, whom, update, options))
        print(json.dumps(found[-1]), flush=True)
        settings = {name: getattr(options, name) for name in ("scale", "updates", "seed", "more")}
        replace_json(
            options.out / "presets.json",
            {**settings, "runs": found, "environment": describe_environment()},
        )
    return 0 if all(run["equal"] for run in found) else 1


if __name__ == "__main__":
    sys.exit(main())
