"""Language models from a folder, from a configuration, or by the name of a size. Nothing is downloaded.

A folder of `transformers` contains parameters to continue from. A configuration or a name gives only a shape, and the
parameters are new.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from stretto import errors
from stretto.fields import unknown_name
from stretto_lab.recipes.gpt import Architecture, Shape, causal_lm, from_config, in_dtype
from stretto_lab.recipes.task import extra


class NamedShape(NamedTuple):
    """The shape of a well-known model."""

    family: Architecture
    shape: Shape
    context: int
    """Longest input in tokens."""


SIZES: Mapping[str, NamedShape] = MappingProxyType(
    {
        "gpt2": NamedShape("gpt2", Shape(12, 768, 12), context=1024),
        "llama-tiny": NamedShape("llama", Shape(6, 256, 4), context=1024),
    }
)
"""Shapes by name; the vocabulary is the tokenizer's."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model(name: str) -> None:
    """Raise unless `name` is a size, a configuration or a folder with a model; reads no parameters.

    Raises:
        UnknownName: There is no such size, file or folder.
        ConfigError: It is not a model.
    """
    path = Path(name)
    if name in SIZES:
        return
    if not path.exists():
        raise unknown_name("model is no folder, no config.json and no size:", name, SIZES)
    config = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(config.read_bytes())
        kind = found["model_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise errors.ConfigError(
            f"model {config} is not the configuration of a model of transformers ({type(error).__name__}: {error})"
        ) from error
    if path.is_dir() and not any((path / weights).is_file() for weights in WEIGHTS):
        raise errors.ConfigError(
            f"model {path} has no {WEIGHTS[0]}: expected a folder written by save_pretrained; to begin with new "
            f"parameters name its configuration, {config} ({kind})"
        )


def tokenizer_of(name: str) -> str | None:
    """Return the folder of a model if it contains a tokenizer."""
    return name if any(Path(name, file).is_file() for file in TOKENIZERS) else None


def language_model(name: str, *, vocabulary: int, length: int, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a causal language model.

    Args:
        name: A folder, a configuration or a size.
        vocabulary: Tokens of the tokenizer.
        length: Longest input.
        dtype: Of the parameters.
        seed: Decides new parameters; the caller's random state is not changed.

    Raises:
        ConfigError: It cannot be read, or is too small for the tokenizer or the input.
        MissingExtra: `transformers` is not installed.
    """
    check_model(name)
    if name in SIZES:
        size = SIZES[name]
        model = causal_lm(
            size.family,
            size.shape,
            vocabulary=vocabulary,
            context=size.context,
            dtype=dtype,
            seed=seed,
        )
    else:
        model = _read(name, dtype, seed)
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise errors.ConfigError(
            f"length {length} is longer than the {positions} positions that {name} reads"
        )
    if config.vocab_size < vocabulary:
        raise errors.ConfigError(
            f"the tokenizer has {vocabulary} tokens and {name} knows {config.vocab_size}: expected the model's own"
        )
    return model


def _read(name: str, dtype: torch.dtype, seed: int) -> nn.Module:
    transformers = extra("transformers", "the recipe language")
    transformers.logging.disable_progress_bar()  # every rank would write one into the display
    path = Path(name)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config.use_cache = False
        if path.is_file():
            return from_config(config, dtype, seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise errors.ConfigError(f"model {name} cannot be read: {reason}") from error
    return in_dtype(model, dtype).train()


def with_lora(model: nn.Module, rank: int, alpha: float, seed: int) -> nn.Module:
    """Return `model` with low-rank adapters for every linear layer; only they are trained.

    Source: Hu et al., 2021, arXiv:2106.09685. An adapter adds `alpha / rank * B A x` to the layer's output.

    Args:
        model: The model; its own parameters are frozen.
        rank: Rank of the adapters.
        alpha: Factor on them, times the rank.
        seed: Decides `A`; `B` begins with zeros.

    Raises:
        MissingExtra: `peft` is not installed.
    """
    peft = extra("peft", "LoRA (lora_rank)")
    adapters = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    # One warning says that GPT-2 stores its matrices the other way round, which peft then heeds.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(model, adapters)
    return adapted
