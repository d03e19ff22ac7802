"""A guard of one's own: one file, and one line that registers it with the command line.

    python examples/extend/guard.py train digits-resnet --strategy ddp --guards alarm

In a program nothing has to be registered: `stretto.DataParallel(model, optimizer, stretto.DDP(), guards=(Alarm(),))`.
"""

import dataclasses

from stretto.guards import GUARDS, Guard
from stretto.guards.contract import Fingerprint, GuardScript, Report, Share
from stretto_lab.cli import main

DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Alarm(Guard):
    """Reports replicas that differ, and repairs nothing: for a first look at a machine under suspicion.

    Watches: masters, optimizer state and values to be shown, at the end of every update.
    Damage: reported, laid to the ranks that are not with the majority; to all where there is none.
    Traffic: eight bytes per tensor and rank.
    """

    name = "alarm"
    needs_replicas = True

    def after_update(self) -> GuardScript:
        """Compare every rank's digests."""
        digests = yield Fingerprint()
        records = yield Share(
            b"".join(digest.to_bytes(DIGEST_BYTES, "little") for digest in digests.values())
        )
        for index, part in enumerate(digests):
            seen = [record[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] for record in records]
            odd = tuple(rank for rank, digest in enumerate(seen) if 2 * seen.count(digest) <= len(seen))
            if odd:
                yield Report(guard=self.name, site=part.site, part=part.name, action="none", ranks=odd)


GUARDS[Alarm.name] = Alarm  # the line of registration

if __name__ == "__main__":
    raise SystemExit(main())
