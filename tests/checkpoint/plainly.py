"""Checkpoints in plain PyTorch."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from stretto import checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def read_into(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read a checkpoint into a bare model and a plain optimizer."""
    state = checkpoint.read(path)
    get_optimizer_state_dict(model, optimizer, options=FLAT)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
