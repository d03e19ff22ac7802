"""What a built site must keep, or else the build fails: a hook of mkdocs.

Every public name of the library is on a page, no page loads anything from another host, and the search answers
everyday words.
"""

import importlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocstrings import Inventory

MODULES = (
    "stretto",
    "stretto.checkpoint",
    "stretto.echo",
    "stretto.guards",
    "stretto.strategies",
    "stretto_lab.faults",
    "stretto_lab.plan",
    "stretto_lab.recipes",
    "stretto_lab.testing",
    "stretto_lab.virtual",
)
"""Those whose `__all__` is public."""
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\s>]*")
"""A tag that makes a browser ask another host."""

ANSWERS = {
    "hang": "faq.html#my-run-hangs-how-to-debug-it",
    "stuck": "faq.html#my-run-hangs-how-to-debug-it",
    "debug": "faq.html#my-run-hangs-how-to-debug-it",
    "wandb": "faq.html#how-do-i-log-to-wandb-mlflow-or-tensorboard",
    "moe": "faq.html#can-i-train-a-mixture-of-experts-moe",
    "save_pretrained": "faq.html#how-do-i-save-a-hugging-face-model-with-save_pretrained",
    "gradient clipping": "faq.html#how-do-i-use-gradient-clipping-or-accumulation",
    "gradient accumulation": "faq.html#how-do-i-use-gradient-clipping-or-accumulation",
    "memory per parameter": "faq.html#how-much-memory-does-it-take-per-parameter-out-of-memory-oom",
    "tensor parallel": "faq.html#what-about-tensor-pipeline-or-sequence-parallelism",
    "mixed precision": "faq.html#how-do-i-use-mixed-precision-amp-autocast-bf16-float16",
    "bf16 autocast": "faq.html#how-do-i-use-mixed-precision-amp-autocast-bf16-float16",
    "learning rate": "faq.html#which-learning-rate-for-diloco-too",
    "diloco learning rate": "faq.html#which-learning-rate-for-diloco-too",
    "loss worse": "faq.html#why-is-my-loss-different-from-ddps-or-worse",
    "worse ddp": "faq.html#why-is-my-loss-different-from-ddps-or-worse",
    "lora": "faq.html#does-it-work-with-lora-and-peft",
    "peft": "faq.html#does-it-work-with-lora-and-peft",
    "torch.compile": "faq.html#does-it-work-with-torchcompile",
    "fsdp2": "faq.html#can-i-use-it-with-fsdp2-for-a-model-that-does-not-fit-one-gpu",
    "torchft": "faq.html#what-is-the-difference-to-deepspeed-torchfts-or-pytorchs-diloco",
    "deepspeed": "faq.html#what-is-the-difference-to-deepspeed-torchfts-or-pytorchs-diloco",
    "machine dies": "faq.html#what-if-a-node-dies-crash-or-i-resume-on-fewer-machines-or-ranks",
    "resume": "faq.html#what-if-a-node-dies-crash-or-i-resume-on-fewer-machines-or-ranks",
    "hugging face": "faq.html#how-do-i-save-a-hugging-face-model-with-save_pretrained",
    "batch size": "faq.html#how-large-is-the-batch-size-of-an-update",
    "windows": "faq.html#does-it-run-on-windows-or-macos-or-on-gpus-of-amd-or-apple-or-tpus",
    "amd": "faq.html#does-it-run-on-windows-or-macos-or-on-gpus-of-amd-or-apple-or-tpus",
    "fit gpu": "faq.html#can-i-use-it-with-fsdp2-for-a-model-that-does-not-fit-one-gpu",
    "license": "faq.html#which-licence-license",
    "early stopping": "faq.html#how-do-i-stop-early-early-stopping",
    "profile": "faq.html#how-do-i-profile-it-where-does-the-time-go",
    "vpn": "faq.html#can-i-train-over-the-internet-between-homes-or-offices",
    "pytorch version": "faq.html#how-do-i-install-it-and-which-versions-does-it-need",
    "pip install": "faq.html#how-do-i-install-it-and-which-versions-does-it-need",
    "float16": "faq.html#how-do-i-use-mixed-precision-amp-autocast-bf16-float16",
    "evaluate": "faq.html#how-do-i-evaluate-or-validate-during-training",
    "slow data": "faq.html#my-data-loader-is-slow-a-bottleneck-what-to-do",
    "slow loader": "faq.html#my-data-loader-is-slow-a-bottleneck-what-to-do",
    "spot instances": "faq.html#can-i-use-spot-instances-or-survive-preemption",
    "preemption": "faq.html#can-i-use-spot-instances-or-survive-preemption",
    "torchrun": "clusters.html#torchrun",
    "slurm": "clusters.html#slurm",
    "node dies": "faq.html#what-if-a-node-dies-crash-or-i-resume-on-fewer-machines-or-ranks",
    "crash": "faq.html#what-if-a-node-dies-crash-or-i-resume-on-fewer-machines-or-ranks",
    "resume fewer machines": "faq.html#what-if-a-node-dies-crash-or-i-resume-on-fewer-machines-or-ranks",
    "silent data corruption": "faq.html#what-if-a-machine-computes-wrong-silent-data-corruption-sdc-a-bad-gpu",
    "sdc": "faq.html#what-if-a-machine-computes-wrong-silent-data-corruption-sdc-a-bad-gpu",
    "bad gpu": "faq.html#what-if-a-machine-computes-wrong-silent-data-corruption-sdc-a-bad-gpu",
    "oom": "faq.html#how-much-memory-does-it-take-per-parameter-out-of-memory-oom",
    "out of memory": "faq.html#how-much-memory-does-it-take-per-parameter-out-of-memory-oom",
    "data loader bottleneck": "faq.html#my-data-loader-is-slow-a-bottleneck-what-to-do",
    "gradient compression": "faq.html#does-it-use-gradient-compression-quantization-for-little-bandwidth",
    "quantization": "faq.html#does-it-use-gradient-compression-quantization-for-little-bandwidth",
    "bandwidth": "faq.html#does-it-use-gradient-compression-quantization-for-little-bandwidth",
    "which strategy 100 mbit/s": "faq.html#which-strategy-for-my-link-10-100-mbits-1-gbits",
    "speedup": "faq.html#is-it-faster-than-ddp-and-what-is-the-speedup",
    "reproducible": "faq.html#is-it-deterministic-and-reproducible",
    "docker": "faq.html#can-i-run-it-in-docker-or-another-container",
    "jax": "faq.html#does-it-work-with-",
    "s3": "faq.html#does-it-work-with-",
    "unused parameters": "failures.html#unused-parameters",
    "install": "faq.html#how-do-i-install-it-and-which-versions-does-it-need",
}
"""What people type into the search, and the section that should answer."""
_TITLE = 1000.0
"""How much more a word counts in a title; it is the search's own default."""
_TAG = re.compile(r"<[^>]*>")


@event_priority(-100)  # behind the plugins that write
def on_post_build(config: MkDocsConfig) -> None:
    """Look at the built site."""
    site = Path(config.site_dir)
    with (site / "objects.inv").open("rb") as inventory:
        missing = missing_names(Inventory.parse_sphinx(inventory))
    if missing:
        raise PluginError(f"no page of docs/reference shows {', '.join(missing)}")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    for words, section in ANSWERS.items():
        if section not in (first := answers(index, words)[:2]):
            raise PluginError(f"who searches for {words!r} is shown {first}, and not {section}")
    for page in site.rglob("*.html"):
        if found := LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads from another host: {found[0]}")


def missing_names(shown: Iterable[str]) -> list[str]:
    """Return the public names that are not among those that the site shows."""
    found = list(shown)
    public = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    # A module stands for what is in it, and so does the function that has a file of its name.
    return [name for name in public if not any(one == name or one.startswith(f"{name}.") for one in found)]


def answers(index: dict[str, Any], words: str) -> Sequence[str]:
    """Return the sections that have all words, as the search does: first those with the words in the title.

    A section counts by the boost of its page. The search itself weighs rare words more and long texts less besides.

    Args:
        index: The built index.
        words: What somebody types. Each stands for all words that begin with it.
    """
    apart = re.compile(index["config"]["separator"])
    asked = apart.split(words.lower())
    ranked = []
    for section in index["docs"]:
        titled, text = (apart.split(_TAG.sub(" ", section[part]).lower()) for part in ("title", "text"))
        counts = [[sum(word.startswith(one) for word in found) for found in (titled, text)] for one in asked]
        if all(in_title or in_text for in_title, in_text in counts):
            score = sum(_TITLE * in_title + in_text for in_title, in_text in counts)
            ranked.append((-section.get("boost", 1.0) * score, section["location"]))
    return [location for _, location in sorted(ranked)]
