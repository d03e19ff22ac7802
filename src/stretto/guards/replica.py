"""The replica guard: ranks that must hold the same bits do, or the one that does not is named and repaired."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import xxhash

from stretto.checksums import hexadecimal
from stretto.errors import ReplicasDiverged
from stretto.fields import check_fields
from stretto.guards.contract import (
    Copy,
    Fingerprint,
    Guard,
    GuardEffect,
    GuardScript,
    Part,
    Recompute,
    Report,
    Share,
    Where,
)

_ATTEMPTS = 2
"""How often copies are made before the ranks are given up: a copy is compared like everything else."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaGuard(Guard):
    """Digests of masters, optimizer state, outgoing values and fixed tensors, compared over ranks at every update.

    Named: the ranks outside a strict majority, for every tensor by itself. Their tensors are overwritten by a member of
    the majority, and compared again, before anything is shown. Without a majority, as between two ranks, what can be
    computed again decides: values to be shown follow from masters that agree, and with `recompute` masters and
    optimizer state from a rehearsal of the step. Where that does not tell, the job ends; `AtRest` beside it names the
    rank whose values changed while nobody used them, and mends them before they spread.
    Traffic: eight bytes per rank and update while all is well.
    """

    name = "replica"
    needs_replicas = True

    recompute: bool = False
    """Compute every step twice, ahead on copies and then in place, so that a rank whose step went wrong is known even
    between two. Costs one more optimizer step and a digest of its outcome per update, and the memory of one segment's
    master and state."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def rehearses_step(self) -> bool:
        """See `Guard.rehearses_step`."""
        return self.recompute

    def after_update(self) -> GuardScript:
        """Compare, name, copy, and compare again."""
        for attempt in itertools.count():
            digests = yield Fingerprint()
            content = _packed(list(digests.values()))
            records = yield Share(xxhash.xxh3_64_digest(content))
            if len(set(records)) == 1:
                return
            # All ranks know that something differs, and all tell what they hold: what follows rests on this second
            # gather alone, so that damage to the first one costs nothing but it.
            tables = yield Share(content)
            unequal = _unequal(list(digests), [np.frombuffer(table, "<u8").tolist() for table in tables])
            if not unequal:
                return
            if attempt == _ATTEMPTS:
                where = yield Where()
                raise ReplicasDiverged(
                    f"{where}: replicas still differ after {attempt} copies, in {'; '.join(map(str, unequal))}; go on "
                    "from the last checkpoint"
                )
            for part, held in unequal.items():
                yield from self._repair(part, held)

    def _repair(self, part: Part, held: Sequence[int]) -> GuardScript:
        """Let a part that differs be overwritten where it is not what most ranks hold, or what it should be."""
        healthy, count = Counter(held).most_common(1)[0]
        if 2 * count <= len(held):
            healthy = yield from self._tell_apart(part, held)
        source = list(held).index(healthy)
        onto = tuple(rank for rank, value in enumerate(held) if value != healthy)
        yield Copy(part, source, onto)
        for rank in onto:
            yield Report(
                guard=self.name,
                site=part.site,
                part=part.name,
                ranks=(rank,),
                action=f"copied from rank {source}",
                expected=hexadecimal(healthy),
                found=hexadecimal(held[rank]),
            )

    def _tell_apart(self, part: Part, held: Sequence[int]) -> Generator[GuardEffect, Any, int]:
        """Return the digest that ranks hold whose part comes out the same when it is computed again."""
        again = yield Recompute()
        records = yield Share(bytes([again.get(part, False)]))
        right = {value for value, record in zip(held, records, strict=True) if record == b"\x01"}
        if len(right) != 1:
            where = yield Where()
            found = ", ".join(f"rank {rank}: {hexadecimal(value)}" for rank, value in enumerate(held))
            raise ReplicasDiverged(
                f"{where}: replicas differ in {part}, and no majority says who is right: expected one digest, found "
                f"{found}; go on from the last checkpoint, and add ReplicaGuard(recompute=True), AtRest() or a third "
                "rank, which can tell"
            )
        return right.pop()


def _packed(digests: Sequence[int]) -> bytes:
    return np.array(digests, "<u8").tobytes()


def _unequal(parts: Sequence[Part], tables: Sequence[Sequence[int]]) -> dict[Part, tuple[int, ...]]:
    """Return what each rank holds of the parts that are not equal, without those that are not to be compared."""
    columns = zip(parts, zip(*tables, strict=True), strict=True)
    return {part: held for part, held in columns if len(set(held)) > 1 and 0 not in held}
