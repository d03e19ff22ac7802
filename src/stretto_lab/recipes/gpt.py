"""Language models of `transformers`, built from their configuration: nothing is downloaded."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from stretto import errors
from stretto_lab.recipes.task import extra

Architecture = Literal["gpt2", "llama"]


class Shape(NamedTuple):
    """The dimensions of a model, which decide its number of parameters."""

    layers: int
    width: int
    heads: int


SHAPES: Mapping[str, Shape] = {
    # Within a tenth of their names with 256 tokens and a context of 128, for both architectures: a layer has
    # about 12 width**2 parameters, the embeddings (256 + 128) width.
    "0.1m": Shape(3, 48, 3),
    "0.2m": Shape(4, 60, 3),
    "0.5m": Shape(4, 96, 3),
    "1m": Shape(4, 144, 4),
    "2m": Shape(4, 200, 4),
    "5m": Shape(6, 256, 4),
    "10m": Shape(6, 384, 6),
    "20m": Shape(8, 448, 7),
    "50m": Shape(8, 720, 10),
    "100m": Shape(12, 832, 13),
}


def shape_of(size: str) -> Shape:
    """Return the dimensions of a name in `SHAPES`, or of LAYERSxWIDTHxHEADS.

    Raises:
        ConfigError: The text is neither.
    """
    if size in SHAPES:
        return SHAPES[size]
    if (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", size)) is None:
        raise errors.ConfigError(
            f"size must be one of {', '.join(SHAPES)}, or LAYERSxWIDTHxHEADS as 4x200x4, found {size!r}"
        )
    return Shape(*map(int, found.groups()))


def causal_lm(
    architecture: Architecture,
    shape: Shape,
    *,
    vocabulary: int,
    context: int,
    dtype: torch.dtype,
    seed: int,
) -> nn.Module:
    """Return a causal language model: int64 tokens (sequences, at most `context`) in, an output with `logits` out.

    Input and output embeddings are one parameter. There is no dropout, and no key-value cache.

    Args:
        architecture: GPT-2 (learned positions, LayerNorm, GELU) or Llama (rotary positions, RMSNorm, SwiGLU).
        shape: Layers, width and heads.
        vocabulary: Number of tokens.
        context: Longest input.
        dtype: Dtype of the parameters.
        seed: Decides the initial parameters; the caller's random state is not changed.

    Raises:
        ConfigError: The heads do not divide the width.
        MissingExtra: `transformers` is not installed.
    """
    head_width, rest = divmod(shape.width, shape.heads)
    if rest or (architecture == "llama" and head_width % 2):
        parity = "even " if architecture == "llama" else ""
        raise errors.ConfigError(
            f"{architecture}: a width of {shape.width} cannot be cut into {shape.heads} heads of equal {parity}"
            "width: change width or heads"
        )
    transformers = extra("transformers", "a language model")
    usual = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    dimensions = _DIMENSIONS[architecture](shape, context)
    return from_config(
        transformers.AutoConfig.for_model(architecture, **{**usual, **dimensions}), dtype, seed
    )


def from_config(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a causal language model with new parameters; see `causal_lm` for the arguments.

    Args:
        config: A configuration of `transformers`.
        dtype: Dtype of the parameters.
        seed: Decides the initial parameters.
    """
    transformers = extra("transformers", "a language model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return in_dtype(model, dtype)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters of a model to another dtype, but not its buffers as `model.to` would: rotary frequencies
    stay.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _gpt2(shape: Shape, context: int) -> dict[str, Any]:
    return {
        "n_positions": context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        # The same function as GPT-2's own `gelu_new`, in one kernel instead of eight.
        "activation_function": "gelu_pytorch_tanh",
    }


def _llama(shape: Shape, context: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": context,
        "hidden_size": shape.width,
        # Three matrices of 8/3 width have the parameters of GPT-2's two of 4 width.
        "intermediate_size": round(shape.width / 3) * 8,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "attention_dropout": 0.0,
    }


_DIMENSIONS: Mapping[Architecture, Callable[[Shape, int], dict[str, Any]]] = MappingProxyType(
    {"gpt2": _gpt2, "llama": _llama}
)
