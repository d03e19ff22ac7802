"""Checkpoints read as PyTorch reads any, without this library."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def read_into(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read a checkpoint into a bare model and a plain optimizer."""
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
