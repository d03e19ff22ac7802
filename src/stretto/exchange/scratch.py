"""Memory that transfers use repeatedly, for as many buckets as are sent at a time."""

import torch
from torch import Tensor

IN_FLIGHT = 4
"""Number of buckets that are sent at a time: enough to keep a link busy while one is summed."""


class Scratch:
    """Reusable memory of the transfers of one exchange, which use it in the order of their indices."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, role: str, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` elements for a role in the `index`-th transfer, valid until that transfer ends."""
        key = (role, index % IN_FLIGHT, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            if held is not None and device.type == "cuda":
                # Another stream than the one that allocated it may still be about to use it.
                held.record_stream(torch.cuda.current_stream(device))
            held = self._held[key] = torch.empty(numel, dtype=dtype, device=device)
        return held if held.numel() == numel else held[:numel]

    @property
    def held(self) -> list[Tensor]:
        """Return all of the memory."""
        return list(self._held.values())
