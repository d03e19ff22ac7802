"""The settings of the papers, as data: every figure with the page that it is from, or marked as our choice.

The papers themselves were not at hand when this was written, but for the main text of PAFT. The sources are the pages
of their reviews, on which the authors answer, and the authors' own code.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ACCO = "OpenReview UV1jr2aJ2J, review 5"
ACCO_REPLY = "OpenReview UV1jr2aJ2J, reply to review 2"
ACCO_CODE = "github.com/edouardoyallon/acco at 3bf1114, configuration acco"
ACCO_TUNING = "github.com/edouardoyallon/acco at 3bf1114, configuration acco-ft"
ECHO = "OpenReview 8ZA7lrzw7O, review 1"
ECHO_MODEL = "OpenReview 8ZA7lrzw7O, review 4"
ECHO_REPLY = "OpenReview 8ZA7lrzw7O, reply to review 4"
PAFT = "OpenReview cPZepCZlFW, main text"
PAFT_REVIEW = "OpenReview cPZepCZlFW, review 3"
OURS = "our choice"


class Setting(NamedTuple):
    """The value of one option."""

    value: Any
    """As the option's type has it."""
    source: str
    """The page that says so, or `OURS`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One experiment of a paper."""

    summary: str
    """What is trained, on which data, for one line."""
    recipe: str
    """The recipe that it sets."""
    settings: Mapping[str, Setting]
    """By the name of the option; `--updates` at full scale."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where the defaults of a command's options come from."""

    preset: str | None = None
    """Settings of a paper to begin with; `stretto presets` lists them. Options that are given win."""
    scale: float = 1.0
    """Factor to rehearse with; on the model, its input and the data, and on the updates of a preset. Above 0 and at
    most 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresetList:
    """What `stretto presets` prints."""

    name: str | None = None
    """The one to explain, with sources; None lists all."""


def _pretraining(source: str) -> dict[str, Setting]:
    """Return what ACCO's configuration says of pre-training, with the page that says it of this experiment."""
    return {
        "--strategy": Setting("acco", ACCO),
        "--micro-batches": Setting(2, source),
        "--updates": Setting(50_000, source),
        "--task.batch": Setting(8, source),
        "--task.lr": Setting(6e-4, source),
        "--task.dtype": Setting("bf16", source),
        "--task.adamw.betas": Setting((0.9, 0.95), source),
        "--task.adamw.weight-decay": Setting(0.1, source),
        "--task.schedule.warmup": Setting(1000, source),
        "--task.schedule.floor": Setting(0.0, OURS),
        "--task.heldout.share": Setting(0.05, source),
    }


def _echoing() -> dict[str, Setting]:
    return {
        "--strategy": Setting("local:rate=0.5:plan=bernoulli", OURS),
        "--echo": Setting("bernoulli:p=cosine(1,0.25)", OURS),
        "--micro-batches": Setting(1, OURS),
        "--workers": Setting(4, OURS),
    }


def _echoed_images() -> dict[str, Setting]:
    return {
        **_echoing(),
        "--task.model": Setting("mobilenet-v2", ECHO_MODEL),
        "--task.batch": Setting(32, OURS),
        "--task.lr": Setting(0.05, OURS),
        "--updates": Setting(39_063, OURS),  # 100 epochs of 50,000 images
    }


def _noisy_images(model: str) -> dict[str, Setting]:
    return {
        "--strategy": Setting("paft-dyn", PAFT),
        "--workers": Setting(4, PAFT),
        "--micro-batches": Setting(1, OURS),
        "--task.model": Setting(model, PAFT_REVIEW),
        "--task.batch": Setting(32, OURS),
        "--task.lr": Setting(0.1, PAFT),
        "--task.sgd.momentum": Setting(0.9, PAFT),
        "--task.sgd.weight-decay": Setting(5e-4, OURS),
        # 120 epochs, which main text and review 3 state, of 50,000 images in our batches of 4 x 32.
        "--updates": Setting(46_875, f"120 epochs ({PAFT_REVIEW}) at our batch"),
    }


def _noisy_instructions(model: str) -> dict[str, Setting]:
    return {
        "--strategy": Setting("paft-dyn", PAFT),
        "--workers": Setting(4, OURS),
        "--micro-batches": Setting(4, OURS),
        "--task.model": Setting(model, PAFT_REVIEW),
        "--task.length": Setting(512, OURS),
        "--task.batch": Setting(2, OURS),
        "--task.lr": Setting(1e-3, PAFT),
        "--task.adamw.betas": Setting((0.9, 0.99), PAFT),
        "--task.adamw.weight-decay": Setting(0.0, OURS),
        "--task.schedule.warmup": Setting(0, OURS),
        # 52,002 instructions without the held-out twentieth, in our batches of 4 x 4 x 2.
        "--updates": Setting(1544, f"one epoch ({PAFT_REVIEW}) at our batch"),
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "acco-tinystories": Preset(
            summary="GPT-Neo 36M from nothing, TinyStories",
            recipe="language",
            settings={
                **_pretraining(OURS),
                "--task.model": Setting("gpt-neo-36m", f"{ACCO}; its shape is our choice"),
                "--task.length": Setting(512, OURS),
                "--workers": Setting(8, OURS),
            },
        ),
        "acco-openwebtext": Preset(
            summary="GPT-Neo 125M from nothing, OpenWebText",
            recipe="language",
            settings={
                **_pretraining(ACCO_CODE),
                "--task.model": Setting("gpt-neo-125m", ACCO),
                "--task.length": Setting(1024, ACCO_CODE),
                "--workers": Setting(8, ACCO_REPLY),
            },
        ),
        "acco-alpaca": Preset(
            summary="GPT-Neo 2.7B tuned, Alpaca",
            recipe="language",
            settings={
                **_pretraining(ACCO_TUNING),
                "--micro-batches": Setting(4, ACCO_TUNING),
                "--updates": Setting(386, OURS),  # one epoch of 52,002 instructions
                "--task.model": Setting("gpt-neo-2.7b", ACCO),
                "--task.length": Setting(512, ACCO_TUNING),
                "--task.batch": Setting(4, ACCO_TUNING),
                "--task.lr": Setting(2e-5, ACCO_TUNING),
                "--task.adamw.weight-decay": Setting(0.0, ACCO_TUNING),
                "--task.schedule.warmup": Setting(0, ACCO_TUNING),
                "--workers": Setting(8, OURS),
            },
        ),
        "echo-mobilenet-cifar10": Preset(
            summary="MobileNetV2, CIFAR-10, echoed", recipe="images", settings=_echoed_images()
        ),
        "echo-mobilenet-cifar100": Preset(
            summary="MobileNetV2, CIFAR-100, echoed", recipe="images", settings=_echoed_images()
        ),
        "echo-gpt2-wikitext2": Preset(
            summary="GPT-2, WikiText-2, echoed",
            recipe="language",
            settings={
                **_echoing(),
                "--task.model": Setting("gpt2", ECHO_REPLY),
                "--task.length": Setting(512, OURS),
                "--task.batch": Setting(4, OURS),
                "--task.lr": Setting(6e-4, OURS),
                "--updates": Setting(3000, OURS),
            },
        ),
        "paft-resnet18-cifar10": Preset(
            summary="ResNet-18, CIFAR-10, 120 epochs", recipe="images", settings=_noisy_images("resnet-18")
        ),
        "paft-resnet50-cifar100": Preset(
            summary="ResNet-50, CIFAR-100, 120 epochs", recipe="images", settings=_noisy_images("resnet-50")
        ),
        "paft-gpt2-openwebtext": Preset(
            summary="GPT-2 from nothing, OpenWebText",
            recipe="language",
            settings={
                **_noisy_instructions("gpt2"),
                "--task.length": Setting(1024, OURS),
                "--task.lr": Setting(6e-4, OURS),
                "--task.adamw.betas": Setting((0.9, 0.95), OURS),
                "--task.adamw.weight-decay": Setting(0.1, OURS),
                "--task.schedule.warmup": Setting(100, OURS),
                "--updates": Setting(3000, PAFT_REVIEW),
            },
        ),
        "paft-gpt2-alpaca": Preset(
            summary="GPT-2 tuned, Alpaca", recipe="language", settings=_noisy_instructions("gpt2")
        ),
        "paft-llama2-alpaca": Preset(
            summary="LLaMA-2 7B tuned whole, Alpaca",
            recipe="language",
            settings={**_noisy_instructions("llama-2-7b"), "--task.dtype": Setting("bf16", OURS)},
        ),
        "paft-llama2-alpaca-lora": Preset(
            summary="LLaMA-2 7B tuned by LoRA, Alpaca",
            recipe="language",
            settings={
                **_noisy_instructions("llama-2-7b"),
                "--task.dtype": Setting("bf16", OURS),
                "--task.lora-rank": Setting(8, f"LoRA: {PAFT_REVIEW}; its rank is our choice"),
            },
        ),
    }
)
"""By name. A model that is tuned begins from its folder, with `--task.model FOLDER`; without one from new parameters,
as a rehearsal does."""
