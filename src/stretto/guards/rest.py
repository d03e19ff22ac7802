"""The at-rest guard: what nobody may change between two uses is found unchanged, or is mended."""

import dataclasses

from stretto.checksums import hexadecimal
from stretto.guards.contract import Difference, Guard, GuardScript, Inspect, Mend, Replace, Report, Seal


@dataclasses.dataclass(frozen=True, slots=True)
class AtRest(Guard):
    """Checksums at the end of each use against the tensors at the start of the next, on every rank by itself.

    Watches: masters and optimizer state from the end of an update to the next step; the reduced gradient from its sum
    to its step; the parameters that the model shows, from their installation to the end of the round's micro-batches.
    Damage: words of one column of the sums, or of a run of less than a row (`stretto.checksums`), are mended in
    place, to the bit. More is taken from another rank where replicas exist, and is otherwise an error that ends the
    job. The model's parameters are mended or installed anew with the round; its rank contributes weight zero to that
    round.
    Traffic: eight bytes per rank and step for replicated strategies, nothing for sharded ones.
    Memory: 16 bytes per 32 KiB and 32 KiB per tensor.
    """

    name = "rest"
    watches_shown = True

    def at_start(self) -> GuardScript:
        """Seal the state that training starts from."""
        yield Seal("state")

    def after_update(self) -> GuardScript:
        """Seal the state as the update leaves it."""
        yield Seal("state")

    def after_reduce(self) -> GuardScript:
        """Seal the gradient as it was summed."""
        yield Seal("reduced gradient")

    def before_step(self) -> GuardScript:
        """Compare, mend, and replace what cannot be mended."""
        differences = yield Inspect()
        broken: dict[object, Difference] = {}
        for difference in differences:
            if (yield Mend(difference.part)):
                yield self._incident(difference, "mended")
            else:
                broken[difference.part] = difference
        sources = yield Replace(tuple(difference.part for difference in broken.values()))
        for part, source in sources.items():
            if part in broken:
                yield self._incident(broken[part], f"copied from rank {source}")

    def _incident(self, difference: Difference, action: str) -> Report:
        return Report(
            guard=self.name,
            site=difference.part.site,
            part=difference.part.name,
            action=action,
            expected=hexadecimal(difference.expected),
            found=hexadecimal(difference.found),
        )
