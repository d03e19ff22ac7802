"""The settings of the papers, as data: every figure with the page that it is from, or marked as our choice.

The sources are the main text of PAFT, the code that ACCO's authors have published, and for all three papers the pages
of their reviews, on which the authors answer. The main texts of the other two papers, and all appendices, were not
read.

A preset is a whole row of a table where `compare` takes it: `--strategies` names the methods that the paper compares.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from stretto.noise import Noise

ACCO = "OpenReview UV1jr2aJ2J, review 5"
ACCO_REPLY = "OpenReview UV1jr2aJ2J, reply to review 2"
ACCO_MEMORY = "OpenReview UV1jr2aJ2J, reply to review 4: parameters and gradients in bf16"
ACCO_CODE = "github.com/edouardoyallon/acco at 3bf1114, configuration acco"
ACCO_GRADIENTS = f"50,000 gradients of micro-batches, all workers together ({ACCO_CODE}, and its trainer)"
ACCO_DECAY = f"{ACCO_CODE}; its trainer makes no groups"
ACCO_ARMS = "OpenReview UV1jr2aJ2J, reviews 1 and 2"
ACCO_TUNING = "github.com/edouardoyallon/acco at 3bf1114, configuration acco-ft"
ECHO = "OpenReview 8ZA7lrzw7O, review 1"
ECHO_MODEL = "OpenReview 8ZA7lrzw7O, review 4"
ECHO_REPLY = "OpenReview 8ZA7lrzw7O, reply to review 4"
PAFT = "OpenReview cPZepCZlFW, main text"
PAFT_TABLES = "OpenReview cPZepCZlFW, main text, tables 1 and 2"
PAFT_BURSTS = "OpenReview cPZepCZlFW, main text, figure 9"
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
    """By the name of the option; the length of the run at full scale."""
    note: str = ""
    """Where sources contradict each other, or the experiment needs more than one command."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where the defaults of a command's options come from."""

    preset: str | None = None
    """Settings of a paper to begin with; `stretto presets` lists them. Options that are given win."""
    scale: float = 1.0
    """Factor to rehearse with; on the model, its input and the data, and on the length of a preset. Above 0 and at
    most 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PresetList:
    """What `stretto presets` prints."""

    name: str | None = None
    """The one to explain, with sources; None lists all."""


PAFT_STRATEGY = "paft-dyn:estimate=paper:overlap=on"
"""Algorithm 2, which averages beside training."""
PAFT_ARMS = ("ddp:noise=None", "ddp", *(f"paft-sync:interval={h}" for h in (5, 10, 50)), PAFT_STRATEGY)
"""The rows of tables 1 and 2: without noise, and with it."""
ACCO_NOTE = (
    "The sources differ on the length: the trainer counts gradients of micro-batches over all workers until 50,000, "
    "while a comment in configuration ddp calls the same number 50B tokens, which fits 50,000 updates of 32 workers "
    "with 32 sequences each. The first is taken, and the warm-up is in the same unit. The code accumulates for as long "
    "as communication takes, as --clock 1,16 does; here two micro-batches make an update. Its DDP arm has 32 sequences "
    "to a micro-batch and sums in fp32; here all arms have as many and sum in bf16. Its DPU begins with "
    "1,000 synchronous updates of one micro-batch; here it delays from the first update on."
)
NOISE = Noise(1e-2)
NOISE_NOTE = "The other degrees of noise: --noise 1e-4, 1e-3, 1e-2 or 1e-1."
ECHO_NOTE = "Without echoes: --echo none, with the same samples. ddp averages gradients at every update."


def _acco(source: str, *, warmup: int) -> dict[str, Setting]:
    """Return what ACCO's code says of all experiments.

    Args:
        source: The page that says it of this one.
        warmup: Updates until the full learning rate is reached.
    """
    return {
        "--strategy": Setting("acco", ACCO),
        "--strategies": Setting(("ddp", "dpu", "wp", "acco"), ACCO_ARMS),
        "--micro-batches": Setting(2, source),
        "--samples": Setting(400_000, ACCO_GRADIENTS if source == ACCO_CODE else source),
        "--wire": Setting("bf16", ACCO_MEMORY),
        "--accumulate": Setting("parameter", ACCO_MEMORY),
        "--task.batch": Setting(8, source),
        "--task.lr": Setting(6e-4, source),
        "--task.dtype": Setting("bf16", source),
        "--task.adamw.betas": Setting((0.9, 0.95), source),
        "--task.adamw.weight-decay": Setting(0.1, source),
        "--task.adamw.decays": Setting("all", ACCO_DECAY),
        "--task.schedule.warmup": Setting(warmup, ACCO_GRADIENTS if source == ACCO_CODE else source),
        "--task.schedule.floor": Setting(0.0, OURS),
        "--task.heldout.share": Setting(0.05, source),
    }


def _openwebtext(workers: int, *, warmup: int) -> Preset:
    return Preset(
        summary=f"GPT-Neo 125M from nothing, OpenWebText, {workers} workers",
        recipe="language",
        settings={
            **_acco(ACCO_CODE, warmup=warmup),
            "--task.model": Setting("gpt-neo-125m", ACCO),
            "--task.length": Setting(1024, ACCO_CODE),
            "--workers": Setting(workers, ACCO_REPLY),
        },
        note=ACCO_NOTE,
    )


def _echoing() -> dict[str, Setting]:
    return {
        "--strategy": Setting("local:rate=echo:plan=bernoulli", f"averages in proportion to loads: {ECHO}"),
        "--strategies": Setting(("ddp", "local:rate=echo:plan=bernoulli"), ECHO),
        "--echo": Setting(
            "bernoulli:p=cosine(1,0.25)", f"a cosine that falls: {ECHO}; its ends are our choice"
        ),
        "--micro-batches": Setting(1, OURS),
        "--workers": Setting(4, OURS),
    }


def _echoed_images(classes: int) -> Preset:
    return Preset(
        summary=f"MobileNetV2, CIFAR-{classes}, echoed",
        recipe="images",
        settings={
            **_echoing(),
            "--task.model": Setting("mobilenet-v2", ECHO_MODEL),
            "--task.batch": Setting(32, OURS),
            "--task.lr": Setting(0.05, OURS),
            "--samples": Setting(5_000_000, OURS),  # 100 epochs of 50,000 images, all fresh
        },
        note=ECHO_NOTE,
    )


def _paft(workers: int, noise: Noise, source: str) -> dict[str, Setting]:
    return {
        "--strategy": Setting(PAFT_STRATEGY, PAFT),
        "--strategies": Setting(PAFT_ARMS, PAFT_TABLES),
        "--noise": Setting(noise, source),
        "--workers": Setting(workers, PAFT),
    }


def _noisy_images(
    model: str, classes: int, *, workers: int = 4, noise: Noise = NOISE, source: str = PAFT_TABLES
) -> Preset:
    kind = "" if noise.every is None else ", bursts of noise"
    return Preset(
        summary=f"{model.replace('resnet', 'ResNet')}, CIFAR-{classes}, 120 epochs, {workers} workers{kind}",
        recipe="images",
        settings={
            **_paft(workers, noise, source),
            "--micro-batches": Setting(1, OURS),
            "--samples": Setting(6_000_000, f"120 epochs of 50,000 images: {PAFT}"),
            "--task.model": Setting(model, PAFT),
            "--task.batch": Setting(32, OURS),
            "--task.lr": Setting(0.1, PAFT),
            "--task.sgd.momentum": Setting(0.9, PAFT),
            "--task.sgd.weight-decay": Setting(5e-4, OURS),
        },
        note=NOISE_NOTE if noise.every is None else "The larger bursts: --noise 1e-4,every=500:1.",
    )


def _noisy_text(model: str, said: str) -> dict[str, Setting]:
    """Return the settings of a language model; `said` is who says so of the optimizer."""
    return {
        **_paft(4, NOISE, PAFT),
        "--workers": Setting(4, OURS),
        "--micro-batches": Setting(4, OURS),
        "--task.model": Setting(model, PAFT),
        "--task.batch": Setting(2, OURS),
        "--task.lr": Setting(1e-3, said),
        "--task.adamw.betas": Setting((0.9, 0.99), said),
    }


def _noisy_instructions(model: str, said: str) -> dict[str, Setting]:
    return {
        **_noisy_text(model, said),
        "--samples": Setting(49_402, f"one epoch: {PAFT}; of 52,002 instructions a twentieth is held out"),
        "--task.length": Setting(512, OURS),
        "--task.lora-rank": Setting(8, f"LoRA: {PAFT}; its rank is our choice"),
        "--task.lora.alpha": Setting(16.0, OURS),
        "--task.adamw.weight-decay": Setting(0.0, OURS),
        "--task.schedule.warmup": Setting(0, OURS),
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "acco-tinystories": Preset(
            summary="GPT-Neo 36M from nothing, TinyStories",
            recipe="language",
            settings={
                **_acco(OURS, warmup=63),
                "--task.model": Setting("gpt-neo-36m", f"{ACCO}; its shape is our choice"),
                "--task.length": Setting(512, OURS),
                "--workers": Setting(8, OURS),
            },
            note="Of this experiment no configuration is published: all is as for OpenWebText.",
        ),
        "acco-openwebtext": _openwebtext(8, warmup=63),
        "acco-openwebtext-32": _openwebtext(32, warmup=16),
        "acco-alpaca": Preset(
            summary="GPT-Neo 2.7B tuned, Alpaca",
            recipe="language",
            settings={
                **_acco(ACCO_TUNING, warmup=0),
                "--micro-batches": Setting(4, ACCO_TUNING),
                "--samples": Setting(200_000, ACCO_GRADIENTS.replace(ACCO_CODE, ACCO_TUNING)),
                "--task.model": Setting("gpt-neo-2.7b", ACCO),
                "--task.length": Setting(512, ACCO_TUNING),
                "--task.batch": Setting(4, ACCO_TUNING),
                "--task.lr": Setting(2e-5, ACCO_TUNING),
                "--task.adamw.weight-decay": Setting(0.0, ACCO_TUNING),
                "--workers": Setting(8, OURS),
            },
            note="The length is four epochs of 49,402 instructions, in the unit in which the code counts.",
        ),
        "echo-mobilenet-cifar10": _echoed_images(10),
        "echo-mobilenet-cifar100": _echoed_images(100),
        "echo-gpt2-wikitext2": Preset(
            summary="GPT-2, WikiText-2, echoed",
            recipe="language",
            settings={
                **_echoing(),
                "--task.model": Setting("gpt2", ECHO_REPLY),
                "--task.length": Setting(512, OURS),
                "--task.batch": Setting(4, OURS),
                "--task.lr": Setting(6e-4, OURS),
                "--samples": Setting(48_000, OURS),
            },
            note=ECHO_NOTE,
        ),
        "paft-resnet18-cifar10": _noisy_images("resnet-18", 10),
        "paft-resnet18-cifar10-bursts": _noisy_images(
            "resnet-18", 10, noise=Noise(1e-4, every=(500, 0.1)), source=PAFT_BURSTS
        ),
        "paft-resnet50-cifar100": _noisy_images("resnet-50", 100),
        "paft-resnet50-cifar100-32": _noisy_images("resnet-50", 100, workers=32),
        "paft-gpt2-openwebtext": Preset(
            summary="GPT-2 from nothing, OpenWebText",
            recipe="language",
            settings={
                **_noisy_text("gpt2", PAFT),
                "--updates": Setting(3000, PAFT),
                "--task.length": Setting(1024, OURS),
                "--task.adamw.weight-decay": Setting(0.1, OURS),
                "--task.schedule.warmup": Setting(100, OURS),
            },
            note=NOISE_NOTE,
        ),
        "paft-gpt2-alpaca": Preset(
            summary="GPT-2 tuned by LoRA, Alpaca",
            recipe="language",
            settings=_noisy_instructions("gpt2", PAFT),
            note=NOISE_NOTE,
        ),
        "paft-llama2-alpaca": Preset(
            summary="LLaMA-2 7B tuned by LoRA, Alpaca",
            recipe="language",
            settings={**_noisy_instructions("llama-2-7b", OURS), "--task.dtype": Setting("bf16", OURS)},
            note=f"{NOISE_NOTE} The learning rate is the paper's for GPT-2.",
        ),
    }
)
"""By name. A model that is tuned begins from its folder, with `--task.model FOLDER`; without one from new parameters,
as a rehearsal does."""
