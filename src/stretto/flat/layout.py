"""The layout: which flat elements each trainable parameter occupies, and which rank owns them.

Note [Layout]
    Parameters of one dtype, device and cut form a flat set. A set is cut into buckets, a bucket is sent in one
    collective, and rank r owns the r-th equal slice of *every* bucket. Every parameter and every slice starts at a
    multiple of `ALIGNMENT` elements. So an optimizer kernel sees the same vector lanes however a set is cut: fused
    CPU optimizers give the same result for cuts at multiples of 8 to 64 elements, but not for other cuts. Padding
    always holds zero gradients and zero masters.

    A set cut by element may be cut anywhere between two multiples of `ALIGNMENT`. In a set cut by tensor no slice ends
    within a parameter (`stretto.flat.whole`).
"""

import dataclasses
import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from stretto.errors import UnsupportedOptimizer
from stretto.flat.fitting import original_name
from stretto.flat.shards import Shard, dealt_numel, shard_of
from stretto.flat.whole import ALIGNMENT, place_whole, round_up
from stretto.link import MESSAGE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter."""

    name: str
    """First name in `model.named_parameters()`; tied parameters have one slot."""
    index: int
    """Position in `Layout.slots`, also the position of the parameter's byte in the round report."""
    set_index: int
    start: int
    """First element in the flat set."""
    numel: int
    shape: tuple[int, ...]
    group: int
    """Index of the optimizer's parameter group."""
    is_whole: bool = False
    """Whether one owner holds all of it, and the optimizer sees it in its shape."""
    shard: Shard | None = None
    """The part of the parameter, if the ranks of a node share it; None for all of it."""

    @property
    def stop(self) -> int:
        """One past the last element in the flat set, without padding."""
        return self.start + self.numel

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.shard is None else self.shard.whole_shape

    @property
    def offset(self) -> int:
        """First element in the whole parameter."""
        return 0 if self.shard is None else self.shard.offset


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A range of one flat set that is sent in one collective."""

    set_index: int
    start: int
    numel: int
    """Number of elements, a multiple of `world_size * ALIGNMENT`."""

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
    """All parameters of one dtype on one device that are cut alike."""

    dtype: torch.dtype
    """Dtype of the parameters."""
    accumulation_dtype: torch.dtype
    """Dtype of the gradient buffer; float32 unless the user asked for the parameters' own dtype."""
    device: torch.device
    numel: int
    """Elements with padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The map from parameters to flat elements and their owners; equal on all ranks."""

    world_size: int
    sets: tuple[FlatSet, ...]
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    """Buckets in the order of sending, which is the expected order in which a backward pass fills them."""

    @property
    def numel(self) -> int:
        """Elements of all sets with padding."""
        return sum(flat.numel for flat in self.sets)

    @property
    def bucket_bytes(self) -> int:
        """Size of the largest bucket, in bytes of the gradient buffer."""
        return max(one.numel * self.sets[one.set_index].accumulation_dtype.itemsize for one in self.buckets)

    def text(self) -> str:
        """Return a text of all that ranks must agree on, in lines; device indices may differ and are omitted."""
        slots = [
            f"parameter {slot.name}: {slot.shape} {self.sets[slot.set_index].dtype}, optimizer group {slot.group}, "
            f"elements {slot.start} to {slot.stop} of set {slot.set_index}{', whole' if slot.is_whole else ''}"
            for slot in self.slots
        ]
        sets = [f"set of {s.numel} {s.dtype}, {s.accumulation_dtype} on {s.device.type}" for s in self.sets]
        return "\n".join([*slots, *sets, *map(str, self.buckets), f"{self.world_size} ranks"])

    def text_of_wholes(self) -> str:
        """Return a text of all that ranks with different shards of the same parameters must agree on, in lines."""
        return "\n".join(
            f"parameter {slot.name}: {slot.whole_shape} {self.sets[slot.set_index].dtype}, optimizer group {slot.group}"
            for slot in self.slots
        )

    def digest(self) -> str:
        """Return a hexadecimal SHA-256 of `text`."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def filled_by(self, arrival: Sequence[int]) -> "Layout":
        """Return the layout with its buckets in the order in which gradients fill them.

        Args:
            arrival: A number for each slot: larger ones arrive later.
        """
        return dataclasses.replace(self, buckets=tuple(_by_arrival(self.slots, self.buckets, arrival)))

    def flat_order(self) -> list[int]:
        """Return the indices of the buckets in flat order, set by set."""
        starts = [(bucket.set_index, bucket.start) for bucket in self.buckets]
        return sorted(range(len(starts)), key=starts.__getitem__)

    def slots_of_set(self, set_index: int) -> list[Slot]:
        """Return the slots of one flat set in flat order."""
        return [slot for slot in self.slots if slot.set_index == set_index]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return a view for each parameter of `flats`, one tensor per flat set."""
        return [flats[slot.set_index][slot.start : slot.stop].view(slot.shape) for slot in self.slots]

    def slots_by_bucket(self) -> list[list[Slot]]:
        """Return the slots that have elements in each bucket."""
        return _slots_by_bucket(self.slots, self.buckets)


def usual_bucket_bytes(device: torch.device) -> int:
    """Return the default size of a collective over values on `device`, in bytes.

    A CPU sends values through sockets, where a small transfer can overlap the sum of another. On a GPU every kernel and
    every collective costs a launch at any size: a billion parameters would be 3,800 buckets of the small size, and are
    60 of the large size.
    """
    return 2**20 if device.type == "cpu" else 2**26


def bucket_bytes_among(ranks: int, usual: int, set_bytes: int, sent_bytes: int) -> int:
    """Return the usual size of a bucket, or a larger one if messages would be smaller than `MESSAGE_BYTES`.

    A rank sends each other rank one part of every bucket, so many ranks need few buckets.

    Args:
        ranks: Number of ranks that share the set.
        usual: `usual_bucket_bytes` of the set's device.
        set_bytes: Bytes of the set in the gradient buffer.
        sent_bytes: Bytes of the set on the wire.
    """
    most = max(1, sent_bytes // (ranks * MESSAGE_BYTES))
    # Buckets are cut at multiples of what all ranks are aligned to: rounded down, a small one would be left over.
    return max(usual, round_up(-(-set_bytes // most), ranks * ALIGNMENT * torch.float64.itemsize))


def plan_layout(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world_size: int,
    bucket_bytes: int | None,
    widen: bool,
    bytes_per_value: float = 4.0,
    parts: int = 1,
    whole_groups: Collection[int] = (),
) -> tuple[Layout, list[nn.Parameter]]:
    """Plan the flat layout of the parameters that `optimizer` trains, or of this rank's shards of them.

    Parameters are in the order in which their gradients become ready, approximately: the reverse of registration.
    Groups of the optimizer stay together where parameters may be cut, so that an owner has few segments. Buckets are
    sorted by their last gradient.

    Args:
        model: Holds the parameters, which `check_parameters` has seen; tied ones count once, frozen ones are skipped.
        optimizer: Holds the parameter groups.
        world_size: Number of ranks.
        bucket_bytes: Upper bound of a bucket in the gradient buffer, in bytes; with whole tensors it is a lower one.
            If it is None, `bucket_bytes_among` chooses.
        widen: Accumulate 16-bit parameters' gradients in float32.
        bytes_per_value: Bytes of a gradient on the wire.
        parts: Cut every set into a multiple of so many buckets, as far as its elements go; about so many at least
            with whole tensors.
        whole_groups: Indices of the optimizer's groups whose tensors are not to be cut.

    Returns:
        The layout, and the parameters in the order of its slots.

    Raises:
        UnsupportedOptimizer: Model and optimizer disagree on what trains.
    """
    named = [(original_name(name), one) for name, one in model.named_parameters() if one.requires_grad]
    groups = _group_of_parameter(named, optimizer)
    whole = {id(parameter) for _, parameter in named if groups[id(parameter)] in whole_groups}

    def key_of(parameter: nn.Parameter) -> tuple[str, str, bool]:
        return str(parameter.device), str(parameter.dtype), id(parameter) in whole

    keys = sorted({key_of(parameter) for _, parameter in named})
    sets: list[FlatSet] = []
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    ordered: list[nn.Parameter] = []
    for set_index, key in enumerate(keys):
        members = [(name, parameter) for name, parameter in reversed(named) if key_of(parameter) == key]
        first = members[0][1]
        accumulation_dtype = torch.float32 if widen and first.dtype.itemsize < 4 else first.dtype
        is_whole = id(first) in whole
        if not is_whole:
            members.sort(key=lambda item: groups[id(item[1])])
        numels = [dealt_numel(one) if is_whole else shard_of(one)[0].numel() for _, one in members]
        numel, itemsize = sum(numels), accumulation_dtype.itemsize
        usual, sent = usual_bucket_bytes(first.device), int(numel * min(bytes_per_value, itemsize))
        place = place_whole if is_whole else _place
        most = bucket_bytes or bucket_bytes_among(world_size, usual, numel * itemsize, sent)
        starts, cuts = place(numels, most // itemsize, world_size, parts)
        for start, (name, parameter) in sorted(zip(starts, members, strict=True), key=_in_flat_order):
            local, shard = shard_of(parameter)
            slots.append(
                Slot(
                    name=name,
                    index=len(slots),
                    set_index=set_index,
                    start=start,
                    numel=local.numel(),
                    shape=tuple(local.shape),
                    group=groups[id(parameter)],
                    is_whole=is_whole,
                    shard=shard,
                )
            )
            ordered.append(parameter)
        buckets.extend(Bucket(set_index, start, numel) for start, numel in cuts)
        sets.append(FlatSet(first.dtype, accumulation_dtype, first.device, buckets[-1].stop))
    registered = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    arrival = [-registered[id(parameter)] for parameter in ordered]
    layout = Layout(world_size, tuple(sets), tuple(slots), tuple(_by_arrival(slots, buckets, arrival)))
    return layout, ordered


def _in_flat_order(placed: tuple[int, tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """Sort by place; a parameter without elements comes before what starts at the same place."""
    start, (_, parameter) = placed
    return start, shard_of(parameter)[0].numel()


def _by_arrival(slots: Sequence[Slot], buckets: Sequence[Bucket], arrival: Sequence[int]) -> list[Bucket]:
    """Sort buckets by the last arrival of a gradient in them.

    A group of the optimizer may hold a few parameters of every layer: its bucket, first in flat order, is full last.

    Args:
        slots: All of them.
        buckets: The buckets.
        arrival: A number for each slot: larger ones arrive later.
    """
    last = {
        bucket: max((arrival[slot.index] for slot in inside), default=min(arrival) - 1)
        for bucket, inside in zip(buckets, _slots_by_bucket(slots, buckets), strict=True)
    }
    return sorted(buckets, key=lambda bucket: last[bucket])


def _slots_by_bucket(slots: Sequence[Slot], buckets: Sequence[Bucket]) -> list[list[Slot]]:
    starts = [(slot.set_index, slot.start) for slot in slots]  # slots are in flat order, set after set
    stops = [(slot.set_index, slot.stop) for slot in slots]
    return [
        [
            slot
            for slot in slots[
                bisect_right(stops, (bucket.set_index, bucket.start)) : bisect_left(
                    starts, (bucket.set_index, bucket.stop)
                )
            ]
            if slot.numel
        ]
        for bucket in buckets
    ]


def _group_of_parameter(
    named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[int, int]:
    """Map the id of every trainable parameter to its group's index."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [name for name, parameter in named if id(parameter) not in groups]
    if missing:
        raise UnsupportedOptimizer(
            f"{len(missing)} trainable parameters are in no group of the optimizer, among them {missing[:3]}: "
            "add them or freeze them with requires_grad_(False)"
        )
    known = {id(parameter) for _, parameter in named}
    foreign = sum(
        1
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    )
    if foreign:
        raise UnsupportedOptimizer(
            f"the optimizer trains {foreign} parameters that the model does not have: build it from "
            "model.parameters() after the model is complete"
        )
    return groups


def _place(
    sizes: Sequence[int], numel_max: int, world_size: int, parts: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the start of every tensor that may be cut, and start and length of every bucket.

    Buckets are equal but for the last, of at most about `numel_max` elements. Their number is a multiple of `parts`
    where there are enough elements.
    """
    starts, stop = [], 0
    for numel in sizes:
        starts.append(stop)
        stop += round_up(numel, ALIGNMENT)
    # At least one element, so that there is something to send even if all parameters are empty.
    numel, multiple = max(stop, 1), world_size * ALIGNMENT
    count = round_up(max(1, math.ceil(numel / max(numel_max, multiple))), parts)
    each = round_up(math.ceil(numel / count), multiple)
    cuts = [(start, min(each, round_up(numel - start, multiple))) for start in range(0, numel, each)]
    return starts, cuts
