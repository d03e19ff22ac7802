"""Tiny language models, their data, and the environment that torchrun gives a rank."""

import os
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = 8
VOCABULARY = 32


def as_under_torchrun(rank: int, world_size: int = 2) -> None:
    """Set what a launcher sets for each rank; the process group is there already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # nobody connects
    )


def tiny_gpt2() -> nn.Module:
    """About 8 thousand parameters, with dropout, the same every time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def tiny_llama() -> nn.Module:
    """About 6 thousand parameters, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
        )
    )


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of unequal lengths: labels after the end of one do not count, so ranks have unequal tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        start, step, length = torch.randint(2, CONTEXT, (3,), generator=generator).tolist()
        tokens = (start + step * torch.arange(CONTEXT)) % VOCABULARY
        labels = torch.where(torch.arange(CONTEXT) < length, tokens, -100)
        found.append({"input_ids": tokens, "labels": labels})
    return found


def language(**settings: Any) -> dict[str, Any]:
    """Return arguments of a Trainer for a tiny GPT-2, whose ranks have unequal tokens.

    On two ranks an epoch has ten batches: the last of its accumulations has two.
    """
    own = {"model": tiny_gpt2(), "train_dataset": texts(40), "eval_dataset": texts(8, seed=1)}
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    return {"gradient_accumulation_steps": 4, "max_steps": 8, "warmup_steps": 2, **own, **often, **settings}


def losses(logs: list[dict[str, Any]], key: str = "loss") -> list[float]:
    """One number of every log that has it."""
    return [log[key] for log in logs if key in log]
