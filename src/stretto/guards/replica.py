"""The replica guard: it compares ranks that must hold the same bits, and names and repairs those that differ."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import xxhash

from stretto.checksums import hexadecimal
from stretto.errors import ReplicasDiverged
from stretto.guards.contract import (
    Copy,
    Fingerprint,
    Guard,
    GuardEffect,
    GuardScript,
    Part,
    Ranks,
    Recompute,
    Report,
    Share,
    Where,
)

# How often damaged parts are copied before the job ends with an error; copies are compared like all parts.
_ATTEMPTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaGuard(Guard):
    """Compares digests of values that must be equal on all ranks, at every update.

    Compared: the values that the model will show; with a replicated optimizer, masters and optimizer state; the
    anchor to which changes are added, under outer steps before a fragment arrives; with a strategy that does not
    overlap, frozen parameters and whole-number buffers.
    Named: for every tensor, the ranks outside a strict majority. A member of the majority overwrites their tensors,
    and the guard compares again, before the model shows anything. If most ranks are damaged alike, the majority is
    wrong, and the healthy rank is named. Without a majority, as between two ranks, values to be shown are computed
    again, from their seal (`AtRest`) or from masters that agree; if this does not decide, the job ends. Use `AtRest`
    as well: it names the rank whose values changed while they were at rest, and mends them before others read them.
    Traffic: eight bytes per rank and update if nothing is damaged.
    """

    name = "replica"
    needs_replicas = True

    def before_land(self) -> GuardScript:
        """Compare anchors, before replicas mix them in."""
        yield from self.after_update()

    def after_update(self) -> GuardScript:
        """Compare digests over ranks, name and repair parts that differ, and compare again."""
        for attempt in itertools.count():
            digests = yield Fingerprint()
            content = np.array(list(digests.values()), "<u8").tobytes()
            records = yield Share(xxhash.xxh3_64_digest(content))
            if len(set(records)) == 1:
                return
            # All ranks know that something differs, and gather all digests. Everything below uses this second gather
            # only, so that damage to the first one has no other effect than this gather.
            tables = yield Share(content)
            columns = zip(*(np.frombuffer(table, "<u8").tolist() for table in tables), strict=True)
            unequal = {  # every rank's digests; parts with a 0 are not compared
                part: held
                for part, held in zip(digests, columns, strict=True)
                if len(set(held)) > 1 and 0 not in held
            }
            if not unequal:
                return
            if attempt == _ATTEMPTS:
                where, ranks = (yield Where()), (yield Ranks())
                outvoted: set[int] = set()
                for held in unequal.values():
                    value, count = Counter(held).most_common(1)[0]
                    if 2 * count > len(held):
                        outvoted |= {rank for rank, own in zip(ranks, held, strict=True) if own != value}
                raise ReplicasDiverged(
                    f"{where}: replicas differ even after {attempt} copies, in "
                    f"{'; '.join(map(str, unequal))}; resume from the last checkpoint",
                    ranks=sorted(outvoted),
                )
            for part, held in unequal.items():
                yield from self._repair(part, held)

    def _repair(self, part: Part, held: Sequence[int]) -> GuardScript:
        """Overwrite a part on the ranks that differ from the majority or, without one, from the recomputed value."""
        healthy, count = Counter(held).most_common(1)[0]
        if 2 * count <= len(held):
            healthy = yield from self._arbitrate(part, held)
        source = list(held).index(healthy)
        onto = tuple(place for place, value in enumerate(held) if value != healthy)
        yield Copy(part, source, onto)
        ranks = yield Ranks()
        for place in onto:
            yield Report(
                guard=self.name,
                site=part.site,
                part=part.name,
                ranks=(ranks[place],),
                action=f"copied from rank {ranks[source]}",
                expected=hexadecimal(healthy),
                found=hexadecimal(held[place]),
            )

    def _arbitrate(self, part: Part, held: Sequence[int]) -> Generator[GuardEffect, Any, int]:
        """Return the digest of the ranks whose part is equal when it is computed again."""
        again = yield Recompute()
        records = yield Share(bytes([again.get(part, False)]))
        right = {value for value, record in zip(held, records, strict=True) if record == b"\x01"}
        if len(right) != 1:
            where, ranks = (yield Where()), (yield Ranks())
            pairs = zip(ranks, held, strict=True)
            found = ", ".join(f"rank {rank}: {hexadecimal(value)}" for rank, value in pairs)
            raise ReplicasDiverged(
                f"{where}: replicas differ in {part}, and no majority shows which rank is right: expected one "
                f"digest, found {found}; resume from the last checkpoint. A third rank would decide, and so "
                "would AtRest() if no write has followed the seal"
            )
        return right.pop()
