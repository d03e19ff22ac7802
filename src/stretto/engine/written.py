"""Buffers that are written where a job is at rest: what is shown, saved and agreed on of them.

Note [Buffers that are written at rest]
    What the user writes to a buffer is exchanged with the next round, like what forward passes write. Until that round
    lands, and where none comes, nobody else knows of it. So what is shown, saved and left at the end is what ranks
    agreed on, but for buffers that hold something else now than the last landing, the ready round or a checkpoint has
    left there. Of these `settled` shows what this rank has. Where all ranks meet anyway, at a checkpoint and at the
    end, they agree on the mean. Where ranks step alone, and have not met since, the mean is of what they hold anyway.

    Under strategies that overlap, what is written after a round was closed is in the snapshot of the next one, and
    what ranks agree on in between lacks it. So the lane keeps what buffers were when the last round took off.
"""

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stretto.engine.buffers import Buffer, changes_of
from stretto.engine.statistics import Statistics, average_statistics
from stretto.exchange import Exchange


class WrittenStatistics(Statistics):
    """A model's buffers, with what an update does not pass; arguments are those of `Statistics`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: tuple[list[Buffer], list[Buffer]] | None = None
        """Of the last round that took off: its snapshot, and the buffers right then."""
        self._met: tuple[int, list[Buffer]] | None = None
        """The round before which ranks last agreed at rest, and the buffers that this rank had then."""

    def took_off(self, snapshot: list[Buffer]) -> None:
        """A round with this snapshot takes off; what was written since is in the next one."""
        self._late = snapshot, self.copies

    def go_back(self, right: Collection[str]) -> None:
        """Take back what passes of the accumulating round have written, which ran with damaged values; not of `right`.

        Args:
            right: Names of buffers that hold what they should.
        """
        before = self.sound if self._late is None else self._late[1]
        columns = enumerate(zip(self.names, changes_of(before, self.live), strict=True))
        self._put({i: before[i] for i, (name, is_written) in columns if is_written and name not in right})

    def agree(self) -> None:
        """Declare the live values, equal on all ranks, to be what all ranks agree on."""
        super().agree()
        self._late = None

    def agree_on(self, values: Sequence[Buffer], round_index: int, own: list[Buffer]) -> None:
        """Take values on which all ranks have agreed before a round, while this rank has its own; these stay."""
        self.agreed[:] = values
        self._late, self._met = None, (round_index, own)

    def left_by(self, snapshot: Sequence[Buffer] | None, round_index: int) -> Sequence[Buffer]:
        """Return what the last landing, the ready round with this snapshot, or a checkpoint has left in the model.

        Args:
            snapshot: None where no round is ready.
            round_index: Of the round that comes next.
        """
        if self._met is not None and self._met[0] == round_index:
            return self._met[1]
        return self.agreed if snapshot is None else snapshot

    def with_late_writes(self, agreed: Sequence[Buffer]) -> list[Buffer]:
        """Return what ranks agree on, with what was written too late for the round that took off last."""
        return list(agreed) if self._late is None else as_written(*self._late, agreed)

    def written_since(self, snapshot: Sequence[Buffer], own: Sequence[Buffer]) -> dict[str, Buffer]:
        """Return, by name, the buffers of a snapshot that this rank has no longer."""
        triples = zip(self.names, snapshot, changes_of(snapshot, own), strict=True)
        return {name: before for name, before, is_written in triples if is_written}


def as_written(before: Sequence[Buffer], now: Sequence[Buffer], agreed: Sequence[Buffer]) -> list[Buffer]:
    """Return what is agreed, and of buffers that are no longer what they were before, what they are now."""
    triples = zip(changes_of(before, now), now, agreed, strict=True)
    return [value if is_written else old for is_written, value, old in triples]


def agreed_at_rest(exchange: Exchange, statistics: Statistics, shown: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers on which ranks agree at rest; all ranks must call.

    Args:
        exchange: Connects the ranks.
        statistics: What they agreed on so far.
        shown: What this rank would show: that, or what was written since.
    """
    records = exchange.gather_bytes(changes_of(statistics.agreed, shown))
    on_any = [functools.reduce(operator.or_, flags) for flags in zip(*records, strict=True)]
    means = average_statistics(exchange, shown, on_any, [1] * len(records), statistics.first)
    return [means.get(index, value) for index, value in enumerate(shown)]


def newest_at_rest(
    exchange: Exchange,
    statistics: Statistics,
    means: Sequence[Buffer],
    snapshot: Sequence[Buffer],
    averages: Mapping[int, Buffer],
) -> list[Buffer]:
    """Return the buffers on which ranks agree where they step alone; all ranks must call.

    Args:
        exchange: Connects the ranks.
        statistics: This rank's.
        means: Of what ranks hold, where anybody has contributed since a departure; otherwise what was agreed on before.
        snapshot: This rank's at that departure.
        averages: Of the ranks' snapshots, by index; newer than what landed last, where nobody has contributed since.
    """
    is_older = [mean is agreed for mean, agreed in zip(means, statistics.agreed, strict=True)]
    newest = [averages.get(i, mean) if is_older[i] else mean for i, mean in enumerate(means)]
    if not (newest and all(is_older)):
        return newest
    return agreed_at_rest(exchange, statistics, as_written(snapshot, statistics.copies, newest))
