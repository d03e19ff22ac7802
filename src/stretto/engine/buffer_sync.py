"""The model's floating-point buffers (BatchNorm's running statistics and the like), kept equal over ranks.

Note [Statistics]
    The forward passes of a rank change its own copy. A round carries a snapshot. The communication lane averages the
    buffers that changed on any rank, and the compute lane installs

        live ← average + (live - snapshot)

    so that what the compute lane added meanwhile is kept. For a synchronous strategy, `live` is the snapshot, and all
    ranks are equal at every update. For an overlapping strategy, the ranks agree on `average`, which evaluation and
    checkpoints see; `live` also holds what came after the snapshot.

Note [Buffers of another kind]
    Modules may replace a buffer by a tensor of another shape or dtype, or by None. A rank whose buffer is not of the
    kind that ranks agreed on says so in its report, and then all compare kinds. If they are equal, ranks agree on the
    new kind from here on. If not, ranks cannot average, and nothing is agreed: every rank keeps its own. Ranks
    compare again in every later round.

Note [Buffers that are written at rest]
    The next round exchanges the user's writes to a buffer, like writes of forward passes. Until that round is
    complete, and if none follows, no other rank knows of them. So Stretto shows, saves and returns the agreed values,
    except for buffers that differ from the values of the last installed round, the ready round or a checkpoint. Of
    these `settled` shows this rank's values. When all ranks meet anyway, at a checkpoint and at the end, they agree
    on the mean. If ranks step alone, and have not met since, it is the mean of their present values.

    Under strategies that overlap, a write after a round was closed is in the snapshot of the next round, and the
    values agreed in between lack it. So the lane keeps the buffers' values from the submission of the last round.
"""

import functools
import operator
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stretto.engine.buffers import (
    KIND,
    Buffer,
    apart,
    are_alike,
    changed_since,
    changes_of,
    copies_of,
    count_of,
    is_comparable,
    side_by_side,
)
from stretto.engine.options import BufferChoices
from stretto.engine.round import Round
from stretto.exchange import Exchange
from stretto.flat import original_name

Carried: TypeAlias = tuple[list[Buffer], Tensor | None, list[Buffer], list[Buffer], list[int]]
"""A round's buffers: the snapshot, its changes, the agreed values, the finite values, and rank 0's values."""


class BufferSync:
    """The floating-point buffers of one model: their live values and the values that ranks last agreed on.

    Args:
        model: The user's model.
        choices: The treatment of each buffer.

    Raises:
        ConfigError: A choice fits no buffer.
    """

    def __init__(self, model: nn.Module, choices: BufferChoices) -> None:
        floating = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        choices.check([original_name(name) for name in floating])
        named = {
            name: buffer for name, buffer in floating.items() if choices.of(original_name(name)) != "alone"
        }
        self._owners = [owner_of(model, name) for name in named]
        self.names = [original_name(name) for name in named]
        self.first = [index for index, name in enumerate(self.names) if choices.of(name) == "rank0"]
        """Indices of the buffers that follow rank 0."""
        self.agreed: list[Buffer] = [buffer.detach().clone() for buffer in named.values()]
        """Values that are equal on all ranks; they change only at installs. None if ranks do not agree."""
        self.sound = self.agreed
        """The values to restore after a skipped round: the agreed values, or, if ranks step alone, this rank's values
        after its last round that counted. No code may write them."""
        self._told: set[int] = set()
        """Indices of buffers that a warning has named."""
        self._late: tuple[list[Buffer], list[Buffer]] | None = None
        """The snapshot of the last submitted round, and the buffers at that moment."""
        self._met: tuple[int, list[Buffer]] | None = None
        """The round before which ranks last agreed between updates, and this rank's buffers at that moment."""

    @property
    def live(self) -> list[Buffer]:
        """The buffers in the model now; modules may have removed or replaced them."""
        found = [getattr(module, attribute, None) for module, attribute in self._owners]
        return [value.detach() if is_comparable(value) else None for value in found]

    @property
    def copies(self) -> list[Buffer]:
        """Copies of the live buffers."""
        return copies_of(self.live)

    @property
    def changes(self) -> bytes:
        """How each live buffer differs from the agreed value; the host waits for the device."""
        return changes_of(self.agreed, self.live)

    def carried(self) -> Carried:
        """Return a round's buffers."""
        copies = self.copies
        return copies, changed_since(self.agreed, copies), self.agreed, self.sound, self.first

    def install(self, round: Round) -> None:
        """Install the averages that a round brought back for its snapshot.

        A skipped round may have written NaN here: the values from before are restored first.
        """
        averages = round.buffer_means
        if round.skipped:
            self._put(dict(enumerate(self.sound)))
        self._put(moved(self.live, round.snapshot, averages, self.first))
        for index, average in averages.items():
            if average is None and round.snapshot[index] is not None and index not in self._told:
                self._told.add(index)
                warnings.warn(_told(self.names[index], round.snapshot[index]), RuntimeWarning, stacklevel=2)
            self.agreed[index] = average
        if round.alone:
            self.go_on_from_live()

    def go_on_from_live(self) -> None:
        """Use the live values, which may be this rank's own, as the values to restore after a skipped round."""
        self.sound = copies_of(self.live)

    def go_on_from(self, agreed: Sequence[Buffer]) -> None:
        """Use the agreed values of a checkpoint, and this rank's live values."""
        self.agreed = list(agreed)
        self.go_on_from_live()

    def agreed_after(self, round: Round | None) -> list[Buffer]:
        """Return the values that ranks agree on after `round`, if there is one, is installed."""
        brought = {} if round is None else round.buffer_means
        return [brought.get(index, value) for index, value in enumerate(self.agreed)]

    def agree(self) -> None:
        """Declare the live values, equal on all ranks, as agreed."""
        self.agreed = self.sound = copies_of(self.live)
        self._late = None

    def exchange_live(self, values: Sequence[Buffer]) -> list[Buffer]:
        """Put `values` into the model and return copies of the old values; None leaves a buffer unchanged."""
        held = [
            None if value is None else buffer
            for buffer, value in zip(copies_of(self.live), values, strict=True)
        ]
        self._put(dict(enumerate(values)))
        return held

    def _put(self, values: Mapping[int, Buffer]) -> None:
        """Write values into the model's buffers; a buffer of another kind is replaced."""
        live = self.live
        written: list[tuple[Tensor, Tensor]] = []
        for index, value in values.items():
            held = live[index]
            if value is None or held is None:  # what a module has removed stays away
                continue
            if are_alike(held, value) and 0 not in held.stride():  # an expanded one cannot be written
                written.append((held, value))
            else:
                module, attribute = self._owners[index]
                setattr(module, attribute, value.clone())
        if written:
            torch._foreach_copy_([held for held, _ in written], [value for _, value in written])

    # At rest

    def submitted(self, snapshot: list[Buffer]) -> None:
        """Note that a round with this snapshot is submitted; later writes belong to the next round."""
        self._late = snapshot, self.copies

    def go_back(self, right: Collection[str]) -> None:
        """Undo writes of the accumulating round's passes, which used damaged values; except in `right`.

        Args:
            right: Names of buffers with correct values.
        """
        before = self.sound if self._late is None else self._late[1]
        columns = enumerate(zip(self.names, changes_of(before, self.live), strict=True))
        self._put({i: before[i] for i, (name, is_written) in columns if is_written and name not in right})

    def agree_on(self, values: Sequence[Buffer], round_index: int, own: list[Buffer]) -> None:
        """Use values on which all ranks have agreed before a round, and keep this rank's own values live."""
        self.agreed[:] = values
        self._late, self._met = None, (round_index, own)

    def left_by(self, snapshot: Sequence[Buffer] | None, round_index: int) -> Sequence[Buffer]:
        """Return the values that the last installed round, the ready round with this snapshot, or a checkpoint wrote
        to the model.

        Args:
            snapshot: None if no round is ready.
            round_index: Index of the next round.
        """
        if self._met is not None and self._met[0] == round_index:
            return self._met[1]
        return self.agreed if snapshot is None else snapshot

    def with_late_writes(self, agreed: Sequence[Buffer]) -> list[Buffer]:
        """Return the agreed values, replaced by writes that were too late for the last submitted round."""
        return list(agreed) if self._late is None else as_written(*self._late, agreed)

    def written_since(self, snapshot: Sequence[Buffer], own: Sequence[Buffer]) -> dict[str, Buffer]:
        """Return, by name, the snapshot's values of buffers that this rank has changed since."""
        triples = zip(self.names, snapshot, changes_of(snapshot, own), strict=True)
        return {name: before for name, before, is_written in triples if is_written}


def _told(name: str, own: Buffer) -> str:
    return (
        f"buffer {name!r} is {kind_of(own)} on this rank and of another shape or dtype on other ranks: Stretto cannot "
        f"average it, and every rank keeps its own; if you mean this, set Options(buffers='{name}=alone')"
    )


def kind_of(buffer: Buffer) -> str:
    """Return shape and dtype as text."""
    return "missing" if buffer is None else f"{buffer.dtype} of shape {tuple(buffer.shape)}"


def at(buffer: Buffer, device: torch.device) -> Buffer:
    """Return the buffer on `device`, if there is one."""
    return None if buffer is None else buffer.to(device)


def is_same(left: Buffer, right: Buffer) -> bool:
    """Return whether both are equal and of one kind, or both missing."""
    return are_alike(left, right) and (left is None or right is None or torch.equal(left, right))


def moved(
    live: Sequence[Buffer],
    snapshot: Sequence[Buffer],
    averages: Mapping[int, Buffer],
    first: Collection[int],
) -> dict[int, Tensor]:
    """Return, by index, the live values after averages of their snapshot are installed.

    A buffer whose kind has changed since the snapshot stays. `first` are buffers that follow rank 0: they are not
    moved.
    """
    become: dict[int, Tensor] = {}
    columns: list[list[Buffer]] = [[None] * len(live) for _ in range(3)]
    for index, average in averages.items():
        now, before = live[index], snapshot[index]
        if average is None or now is None or before is None or not are_alike(now, before):
            continue
        become[index] = average
        if are_alike(average, now):
            for column, value in zip(columns, (now, before, average), strict=True):
                column[index] = value
    has_moved = count_of(*columns[:2], of=torch.ne)
    differs = count_of(columns[2], columns[1], of=torch.ne) if first else {}
    for indices, (now, before, average) in side_by_side(*columns):
        moves = _of_elements(has_moved, indices, columns[0])
        target = now + (average - before)
        target = torch.where(target.isfinite(), target, now)  # from an infinity nothing can be moved
        if first:  # rank 0 itself keeps what it has got since
            keeps = torch.where(_of_elements(differs, indices, columns[0]), average, now)
            is_first = {
                index: now.new_full((), float(index in first), dtype=torch.float32) for index in indices
            }
            target = torch.where(_of_elements(is_first, indices, columns[0]), keeps, target)
        parts = apart(torch.where(moves, target, average), indices, columns[0])
        become |= zip(indices, parts, strict=True)
    return become


def _of_elements(flags: Mapping[int, Tensor], indices: Sequence[int], like: Sequence[Buffer]) -> Tensor:
    """Return the flag of its buffer for each element of buffers side by side."""
    shapes = [value.shape for index in indices if (value := like[index]) is not None]
    return torch.cat([flags[i].expand(n.numel()) for i, n in zip(indices, shapes, strict=True)]).bool()


def average_buffers(
    exchange: Exchange,
    own: Sequence[Buffer],
    changed: Sequence[int],
    counts: Sequence[int],
    first: Collection[int],
) -> dict[int, Buffer]:
    """Return, by index, the averages of the buffers that changed on any rank; all ranks must call.

    None stands for a buffer that ranks hold in different kinds, or that none of them has.

    Args:
        exchange: The exchange of the ranks.
        own: This rank's buffers.
        changed: The bits of change of each buffer on any rank; equal on all ranks.
        counts: The ranks' weights in the mean.
        first: Indices of buffers that take rank 0's value instead of the mean.
    """
    indices = [index for index, bits in enumerate(changed) if bits]
    if not indices or sum(counts) == 0:
        return {}
    unknown = [index for index in indices if changed[index] & KIND]
    apart = _kept_apart(exchange, own, unknown) if unknown else set()
    parts = {index: buffer for index in indices if index not in apart and (buffer := own[index]) is not None}
    outcome: dict[int, Buffer] = dict.fromkeys(apart)
    if parts:
        outcome |= _averages(exchange, parts, first, counts)
    return outcome


def _kept_apart(exchange: Exchange, own: Sequence[Buffer], indices: Sequence[int]) -> set[int]:
    """Return the indices of buffers that ranks cannot average; equal on all ranks."""
    kinds = "\n".join(kind_of(own[index]) for index in indices)
    by_rank = [record.decode().split("\n") for record in exchange.gather_records(kinds.encode())]
    alike = (set(found) for found in zip(*by_rank, strict=True))
    return {
        index
        for index, found in zip(indices, alike, strict=True)
        if len(found) > 1 or (buffer := own[index]) is None or not buffer.is_floating_point()
    }


def _averages(
    exchange: Exchange, own: Mapping[int, Tensor], first: Collection[int], counts: Sequence[int]
) -> dict[int, Buffer]:
    """Return the mean of every buffer, which has the same kind on all ranks; for those in `first`, rank 0's value."""
    dtype = functools.reduce(torch.promote_types, (buffer.dtype for buffer in own.values()), torch.float32)
    flat = torch.cat([buffer.flatten().to(dtype) for buffer in own.values()])
    whole = torch.empty(len(counts) * flat.numel(), dtype=flat.dtype, device=flat.device)
    exchange.gather_values(flat, whole, "average of the model's buffers")
    every = whole.view(len(counts), -1)
    rows = [(count, row) for count, row in zip(counts, every, strict=True) if count]
    mean, low, high = torch.zeros_like(flat), rows[0][1].clone(), rows[0][1].clone()
    for count, row in rows:
        mean.add_(row, alpha=count / sum(counts))
        torch.minimum(low, row, out=low)
        torch.maximum(high, row, out=high)
    # Rounding must not bring the mean of equal values away from them.
    mean.clamp_(low, high)
    lengths = [buffer.numel() for buffer in own.values()]
    means, firsts = torch.split(mean, lengths), torch.split(every[0], lengths)
    return {
        index: (taken if index in first else part).view_as(buffer).to(buffer.dtype)
        for (index, buffer), part, taken in zip(own.items(), means, firsts, strict=True)
    }


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a buffer, and the buffer's name there."""
    path, _, attribute = name.rpartition(".")
    owners = path.split(".") if path else []
    return functools.reduce(getattr, owners, model), attribute  # scripted modules have no get_submodule


def as_written(before: Sequence[Buffer], now: Sequence[Buffer], agreed: Sequence[Buffer]) -> list[Buffer]:
    """Return the agreed values; for buffers written since, their current values."""
    triples = zip(changes_of(before, now), now, agreed, strict=True)
    return [value if is_written else old for is_written, value, old in triples]


def average_at_rest(exchange: Exchange, buffer_sync: BufferSync, shown: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers on which ranks agree between updates; all ranks must call it.

    Args:
        exchange: The exchange of the ranks.
        buffer_sync: Its agreed values are the last ones.
        shown: The values that this rank would show: the agreed values, or later writes.
    """
    records = exchange.gather_bytes(changes_of(buffer_sync.agreed, shown))
    on_any = [functools.reduce(operator.or_, flags) for flags in zip(*records, strict=True)]
    means = average_buffers(exchange, shown, on_any, [1] * len(records), buffer_sync.first)
    return [means.get(index, value) for index, value in enumerate(shown)]


def newest_at_rest(
    exchange: Exchange,
    buffer_sync: BufferSync,
    means: Sequence[Buffer],
    snapshot: Sequence[Buffer],
    averages: Mapping[int, Buffer],
) -> list[Buffer]:
    """Return the buffers on which ranks agree if they step alone; all ranks must call it.

    Args:
        exchange: The exchange of the ranks.
        buffer_sync: This rank's buffers.
        means: Means of the ranks' current values, if any rank has contributed since a launch; otherwise the values
            agreed before.
        snapshot: This rank's snapshot at that launch.
        averages: Means of the ranks' snapshots, by index; newer than the last installed values, if no rank has
            contributed since.
    """
    is_older = [mean is agreed for mean, agreed in zip(means, buffer_sync.agreed, strict=True)]
    newest = [averages.get(i, mean) if is_older[i] else mean for i, mean in enumerate(means)]
    if not (newest and all(is_older)):
        return newest
    return average_at_rest(exchange, buffer_sync, as_written(snapshot, buffer_sync.copies, newest))
