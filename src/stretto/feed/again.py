"""The position of a pass over a loader without a state, such as a `DataLoader`.

A checkpoint holds the draws with which the pass began, and the number of its batches so far. `load` begins the pass
again with these draws, and reads and drops as many. The last of them shows whether the loader gives the same batches
again.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset

from stretto.checksums import digest
from stretto.echo.state import set_epoch
from stretto.echo.statistics import leaves_of
from stretto.errors import CheckpointError
from stretto.random_states import (
    kept_random_states,
    read_random_states,
    restore_random_states,
    written_random_states,
)


def has_state(loader: object) -> bool:
    """Return whether a loader has a state with its position."""
    return not isinstance(loader, type) and all(
        callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
    )


def draws_of(loader: Any, device: torch.device) -> dict[str, Any]:
    """Return the random states and the epoch that determine the batches of a loader's next pass."""
    return {
        "random": written_random_states(device),
        "generators": [one.get_state() for one in _generators(loader)],
        "epoch": getattr(getattr(loader, "sampler", None), "epoch", None),
    }


def draw_as(loader: Any, draws: Mapping[str, Any]) -> None:
    """Set the generators of a loader to the draws from `draws_of`.

    Raises:
        CheckpointError: It has other generators.
    """
    generators = _generators(loader)
    if len(generators) != len(draws["generators"]):
        raise CheckpointError(
            f"loader: expected {len(draws['generators'])} generators, as in the saved loader, found "
            f"{len(generators)}: build it with the same generator= and sampler="
        )
    for one, state in zip(generators, draws["generators"], strict=True):
        one.set_state(state)


def rest_of_pass(
    loader: Iterable[Any], saved: Mapping[str, Any], device: torch.device
) -> tuple[Iterator[Any], str]:
    """Return the remaining batches, and a note if they are not exact.

    Raises:
        CheckpointError: The loader has fewer batches.
    """
    position = saved["position"]
    with kept_random_states(device):
        restore_random_states(read_random_states(saved["begun"]["random"]), device)
        draw_as(loader, saved["begun"])
        if isinstance(saved["begun"]["epoch"], int):
            set_epoch(loader, saved["begun"]["epoch"])
        batches = iter(loader)
        last = deque(enumerate(islice(batches, position), start=1), maxlen=1)
    if not last or last[0][0] < position:
        raise CheckpointError(
            f"loader: it has ended before batch {position}, after which the checkpoint was saved: expected "
            "the same data"
        )
    is_same = _orders_by_draws(loader) or 0 < saved["digest"] == digest_of(last[0][1])
    note = (
        f"the loader has no state, and its pass began again: batch {position} differs from the earlier batch "
        f"{position}, or cannot be compared; give it a sampler that draws the same order in every process"
    )
    return batches, "" if is_same else note


def digest_of(batch: object) -> int:
    """Return a digest of a batch's content; 0 if it cannot be computed."""
    try:
        leaves = [torch.as_tensor(one) if isinstance(one, np.ndarray) else one for one in leaves_of(batch)]
        told = [(digest(one), one.shape) if isinstance(one, Tensor) else one for one in leaves]
        known = all(isinstance(one, str | bytes | int | float | tuple | None) for one in told)
        return xxhash.xxh3_64_intdigest(repr(told).encode()) if told and known else 0
    except Exception:  # a batch may be any object, and no save fails for it
        return 0


def _orders_by_draws(loader: Any) -> bool:
    """Return whether the order is known to repeat; batches themselves may hold other draws of this process."""
    order = [type(getattr(loader, name, None)).__module__ for name in ("sampler", "batch_sampler")]
    is_streamed = isinstance(getattr(loader, "dataset", None), IterableDataset)
    known = all(module.startswith("torch.utils.data.") for module in order)
    return known and not is_streamed and not loader.num_workers


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of PyTorch that a loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, inner, getattr(loader, "dataset", None)]
    found = {
        id(one): one for part in parts if isinstance(one := getattr(part, "generator", None), torch.Generator)
    }
    return list(found.values())
