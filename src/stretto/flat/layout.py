"""Which flat elements every parameter occupies, and which rank owns them.

Note [Layout]
    Parameters of one dtype and device form a flat set. A set is cut into buckets, a bucket travels in one
    collective, and rank r owns the r-th equal slice of *every* bucket. Every parameter starts at a multiple
    of `ALIGNMENT` elements and so does every slice, so that an optimizer kernel sees the same vector lanes
    however a set is cut: fused CPU optimizers are invariant to cuts at multiples of 8 to 64 elements and not
    to others. Padding holds zero gradients and zero masters for ever.
"""

import dataclasses
import hashlib

import torch

ALIGNMENT = 64
"""Elements; the widest vector unit times the unrolling of PyTorch's fused CPU optimizers divides it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter."""

    name: str
    """First name under `model.named_parameters()`; tied parameters have one slot."""
    index: int
    """Position in `Layout.slots`, also the parameter's bit in the roll call."""
    set_index: int
    start: int
    """First element in the flat set."""
    numel: int
    shape: tuple[int, ...]
    group: int
    """Index of the optimizer's parameter group."""

    @property
    def stop(self) -> int:
        """One past the last element in the flat set, without padding."""
        return self.start + self.numel


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A range of one flat set that travels in one collective."""

    set_index: int
    start: int
    numel: int
    """Elements, a multiple of `world_size * ALIGNMENT`."""

    @property
    def stop(self) -> int:
        """One past the last element in the flat set."""
        return self.start + self.numel

    def owned_range(self, rank: int, num_owners: int) -> tuple[int, int]:
        """Return the half-open range of the flat set that `rank` owns, of equal length for all owners."""
        shard_numel = self.numel // num_owners
        return self.start + rank * shard_numel, self.start + (rank + 1) * shard_numel


@dataclasses.dataclass(frozen=True, slots=True)
class FlatSet:
    """All parameters of one dtype on one device."""

    dtype: torch.dtype
    """Of the parameters."""
    accumulation_dtype: torch.dtype
    """Of the gradient buffer; float32 unless the user asked for the parameters' own."""
    device: torch.device
    numel: int
    """Elements with padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The agreed map from parameters to flat elements to owners."""

    world_size: int
    sets: tuple[FlatSet, ...]
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of all sets with padding."""
        return sum(flat.numel for flat in self.sets)

    def text(self) -> str:
        """Return everything that ranks must agree on, a line each: not which device of its kind a rank has."""
        slots = [
            f"parameter {slot.name}: {slot.shape} {self.sets[slot.set_index].dtype}, optimizer group {slot.group}, "
            f"elements {slot.start} to {slot.stop} of set {slot.set_index}"
            for slot in self.slots
        ]
        sets = [f"set of {s.numel} {s.dtype}, {s.accumulation_dtype} on {s.device.type}" for s in self.sets]
        return "\n".join([*slots, *sets, *map(str, self.buckets), f"{self.world_size} ranks"])

    def digest(self) -> str:
        """Return a hexadecimal SHA-256 of `text`."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def slots_of_set(self, set_index: int) -> list[Slot]:
        """Return the slots of one flat set in flat order."""
        return [slot for slot in self.slots if slot.set_index == set_index]
