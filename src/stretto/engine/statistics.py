"""The model's floating-point buffers (BatchNorm's running statistics and the like), kept equal over ranks.

Note [Statistics]
    The forward passes of a rank change its own copy. A round carries a snapshot. The communication lane averages the
    buffers that changed on any rank, and the landing installs

        live ← average + (live - snapshot)

    so that what the compute lane added meanwhile is kept. For a synchronous strategy, `live` is the snapshot, and all
    ranks are equal at every update. For an overlapping strategy, the ranks agree on `average`, which evaluation and
    checkpoints see; `live` also holds what came after the snapshot.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stretto.engine.round import Landing
from stretto.exchange import Exchange
from stretto.flat import original_name


class Statistics:
    """The floating-point buffers of one model: their live values and the values that ranks last agreed on."""

    def __init__(self, model: nn.Module) -> None:
        named = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._owners = [_owner_of(model, name) for name in named]
        self.names = [original_name(name) for name in named]
        self.agreed = [buffer.detach().clone() for buffer in named.values()]
        """Values that are equal on all ranks; they change at landings only."""
        self.sound = self.agreed
        """What a round that is left out goes back to: what ranks agreed on, or where they step alone, what this one had
        behind its last round that counted. Nobody may write them."""

    @property
    def live(self) -> list[Tensor]:
        """The buffers as the model holds them now; modules may have replaced them."""
        return [getattr(module, attribute).detach() for module, attribute in self._owners]

    def snapshot(self) -> tuple[list[Tensor], bytes]:
        """Return copies of the live buffers, and one byte each: 1 if it differs from what ranks last agreed on."""
        copies = [buffer.clone() for buffer in self.live]
        return copies, changed_since(self.agreed, copies)

    def install(self, landing: Landing) -> None:
        """Install the averages that a round brought back for its snapshot.

        A round that was left out may have written NaN here: what was there before is restored first.
        """
        live, averages = self.live, landing.reduction.statistics
        if landing.reduction.skipped:
            for buffer, value in zip(live, self.sound, strict=True):
                buffer.copy_(value)
        for index, value in moved(live, landing.statistics, averages).items():
            self.agreed[index] = averages[index]
            live[index].copy_(value)
        if landing.reduction.alone:
            self.go_on_from_live()

    def go_on_from_live(self) -> None:
        """Take the live values, which may be this rank's own, for those that a round which is left out goes back to."""
        self.sound = [buffer.clone() for buffer in self.live]

    def agreed_after(self, landing: Landing | None) -> list[Tensor]:
        """Return what ranks will agree on once `landing`, if there is one, is installed."""
        brought = {} if landing is None else landing.reduction.statistics
        return [brought.get(index, value) for index, value in enumerate(self.agreed)]

    def agree(self) -> None:
        """Declare the live values, equal on all ranks, to be what all ranks agree on."""
        self.agreed = self.sound = [buffer.clone() for buffer in self.live]

    def exchange_live(self, values: list[Tensor]) -> list[Tensor]:
        """Put `values` into the model and return copies of what was there."""
        live = self.live
        held = [buffer.clone() for buffer in live]
        for buffer, value in zip(live, values, strict=True):
            buffer.copy_(value)
        return held


def moved(
    live: Sequence[Tensor], snapshot: Sequence[Tensor], averages: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return, by index, what live values become where averages of their snapshot are installed."""
    return {
        index: average
        if torch.equal(live[index], snapshot[index])
        else live[index] + (average - snapshot[index])
        for index, average in averages.items()
    }


def changed_since(agreed: Sequence[Tensor], values: Sequence[Tensor]) -> bytes:
    """Return one byte per buffer: 1 if its value differs from what ranks last agreed on."""
    return bytes(not torch.equal(a, b) for a, b in zip(agreed, values, strict=True))


def average_statistics(
    exchange: Exchange, own: Sequence[Tensor], changed: Sequence[bool], counts: Sequence[int]
) -> dict[int, Tensor]:
    """Return, by index, the averages of the buffers that changed on any rank; all ranks must call.

    Args:
        exchange: Connects the ranks.
        own: This rank's buffers.
        changed: Whether each buffer changed; the same on all ranks.
        counts: The ranks' weights in the average.
    """
    indices = [index for index, flag in enumerate(changed) if flag]
    if not indices or sum(counts) == 0:
        return {}
    dtype = functools.reduce(torch.promote_types, (own[index].dtype for index in indices), torch.float32)
    flat = torch.cat([own[index].flatten().to(dtype) for index in indices])
    whole = torch.empty(len(counts) * flat.numel(), dtype=flat.dtype, device=flat.device)
    exchange.gather_values(flat, whole, "average of the model's buffers")
    rows = [(count, row) for count, row in zip(counts, whole.view(len(counts), -1), strict=True) if count]
    mean, low, high = torch.zeros_like(flat), rows[0][1].clone(), rows[0][1].clone()
    for count, row in rows:
        mean.add_(row, alpha=count / sum(counts))
        torch.minimum(low, row, out=low)
        torch.maximum(high, row, out=high)
    # Rounding must not bring the mean of equal values away from them.
    mean.clamp_(low, high)
    parts = torch.split(mean, [own[index].numel() for index in indices])
    return {
        index: part.view_as(own[index]).to(own[index].dtype)
        for index, part in zip(indices, parts, strict=True)
    }


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
