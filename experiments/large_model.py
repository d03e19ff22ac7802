"""A model of 125 million parameters on two local workers, under every strategy: does it train, and in how much memory?

The model is GPT-Neo of 125 million parameters with its 50,257 tokens, from its configuration; the rows of text are made
up. What a rank holds is its peak resident memory, less that before the model was wrapped, and is set beside what the
ledger says. The ledger leaves out activations; the gradient of the embedding before it is added, and four buckets.

    PYTHONPATH=. python experiments/large_model.py --out benchmarks/results/DATE-large-model

Linux only.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from stretto.machine import describe_environment
from stretto.strategies.ledger import ledger_of
from stretto_lab.observe import replace_json
from stretto_lab.recipes.language import Language
from stretto_lab.recipes.rows import Heldout
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.launch import Ranks
from stretto_lab.train.rank import train_rank

ARMS = (
    "ddp", "zero1", "dpu", "wp", "acco", "local:rate=0.5", "diloco:interval=2", "paft-sync:interval=2", "paft-dyn",
)  # fmt: skip
WORKERS = 2


def write_stories(root: Path, seed: int) -> None:
    """Write rows of made-up text."""
    draws = np.random.default_rng(seed)
    words = ["".join(draws.choice(list("aeionrst"), 4)) for _ in range(200)]
    texts = [" ".join(draws.choice(words, draws.integers(5, 60))) for _ in range(600)]
    (root / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def config_of(folder: Path) -> tuple[Path, int]:
    """Write the configuration of GPT-Neo 125M; return its file, and how many parameters the model has."""
    config = transformers.GPTNeoConfig(
        hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]]
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return folder / "config.json", sum(parameter.numel() for parameter in model.parameters())


def tried(arm: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train under one strategy, and return what the ranks held and lost."""
    task = Language(
        data=str(options.data),
        model=str(model),
        length=options.length,
        batch=1,
        readers=0,
        heldout=Heldout(samples=2),
        sample=1,
    )
    run = RunConfig(
        task=task, strategy=arm, updates=options.updates, micro_batches=2, workers=WORKERS, tensorboard=False
    ).run_of(parse_arm(arm))
    ranks = Ranks.local(WORKERS).call(train_rank, run, 1, False)
    strategy = parse_arm(arm).strategy()
    # The parameters are there before the model is wrapped.
    held = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=WORKERS) - 4
    return {
        "arm": arm,
        "updates": [rank.updates for rank in ranks],
        "heldout_losses": [ranks[0].heldout_before, ranks[0].heldout_loss],
        "peak_bytes": [rank.peak_bytes for rank in ranks],
        "before_wrapping_bytes": [rank.baseline_bytes for rank in ranks],
        "ledger_bytes_per_parameter": held,
    }


def main() -> None:
    """Try every strategy, write `large_model.json` and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for large_model.json")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)  # otherwise the peak shows how glibc keeps freed blocks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        write_stories(Path(folder), seed=0)
        options.data = Path(folder, "stories.jsonl")
        model, parameters = config_of(Path(folder, "model"))
        found = []
        print("strategy               peak GiB  above wrapping, B/param  ledger  loss")
        for arm in options.arms.split(","):
            found.append(one := tried(arm, model, options))
            above = np.subtract(one["peak_bytes"], one["before_wrapping_bytes"]).max() / parameters
            print(
                f"{arm:22} {max(one['peak_bytes']) / 2**30:8.2f}  {above:22.2f}"
                f"  {one['ledger_bytes_per_parameter']:6.1f}  {one['heldout_losses']}",
                flush=True,
            )
            content = {
                "parameters": parameters,
                "updates": options.updates,
                "length": options.length,
                "runs": found,
            }
            replace_json(options.out / "large_model.json", {**content, "environment": describe_environment()})


if __name__ == "__main__":
    main()
