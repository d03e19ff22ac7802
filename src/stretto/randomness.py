"""Random decisions that ranks need not talk about, and the random states of a process.

Random decisions as a function of a seed and a counter: nothing to save, nothing that ranks could draw apart.

    coin(step) = [ hash(seed, stream, step) < 2^64 p ]

A generator would have to be kept in step on every rank and saved with every checkpoint. A hash needs only the
counter, which every rank and every checkpoint has anyway.

The random states of a rank: what a forward pass may draw from.
"""

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

_RANGE = 1 << 64


def draw(seed: int, stream: str, counter: int) -> int:
    """Return the `counter`-th of the stream's independent uniform integers, from 0 to 2^64 - 1.

    Args:
        seed: Of the run.
        stream: What is decided; streams are independent of each other.
        counter: Step or round index, not negative.
    """
    return xxhash.xxh3_64_intdigest(stream.encode() + struct.pack("<qq", seed, counter))


def coin(seed: int, stream: str, counter: int, probability: float) -> bool:
    """Return True with `probability`, always the same for the same arguments, which are those of `draw`."""
    return draw(seed, stream, counter) < int(probability * _RANGE)


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
