"""The random states of a rank: what a forward pass may draw from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of torch, of `device`, of numpy and of Python, as they are; a checkpoint holds them so."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put `states` in place, that of a device only where `device` is one of its kind."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
