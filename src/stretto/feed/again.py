"""Where a pass stands over a loader without a state of its own, such as a `DataLoader`.

A checkpoint holds the draws with which the pass began, and how many batches were given out. `load` begins the pass
again with these draws, and reads and drops as many. The last one tells whether the loader gives the same ones again.
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
from stretto.errors import CheckpointError
from stretto.feed.passes import leaves_of
from stretto.random_states import (
    kept_random_states,
    read_random_states,
    restore_random_states,
    written_random_states,
)


def has_state(loader: object) -> bool:
    """Return whether a loader says itself where it stands."""
    return not isinstance(loader, type) and all(
        callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict")
    )


def draws_of(loader: Any, device: torch.device) -> dict[str, Any]:
    """Return what decides, beside the loader's own code, which batches its next pass has."""
    return {
        "random": written_random_states(device),
        "generators": [one.get_state() for one in _generators(loader)],
        "epoch": getattr(getattr(loader, "sampler", None), "epoch", None),
    }


def draw_as(loader: Any, draws: Mapping[str, Any]) -> None:
    """Let the generators of a loader go on from what `draws_of` has returned.

    Raises:
        CheckpointError: It has others.
    """
    generators = _generators(loader)
    if len(generators) != len(draws["generators"]):
        raise CheckpointError(
            f"loader: expected {len(draws['generators'])} generators, as the one that was saved had, found "
            f"{len(generators)}: build it with the same generator= and sampler="
        )
    for one, state in zip(generators, draws["generators"], strict=True):
        one.set_state(state)


def rest_of_pass(
    loader: Iterable[Any], saved: Mapping[str, Any], device: torch.device
) -> tuple[Iterator[Any], str]:
    """Return the batches behind those that were given out, and what is not exact in words.

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
            f"loader: it has ended before batch {position}, behind which the checkpoint was saved: expected the same "
            "data"
        )
    is_same = _orders_by_draws(loader) or 0 < saved["digest"] == digest_of(last[0][1])
    note = (
        f"the loader has no state, and its pass began again: batch {position} differs from that before, or cannot be "
        "compared; give it a sampler that draws the same order in every process"
    )
    return batches, "" if is_same else note


def digest_of(batch: object) -> int:
    """Return a digest of what a batch holds; 0 where that cannot be told."""
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
