"""The at-rest guard: it finds values that have changed between two uses, and repairs them."""

import dataclasses

from stretto.checksums import hexadecimal
from stretto.guards.contract import (
    Clear,
    Difference,
    Guard,
    GuardScript,
    Inspect,
    Mend,
    Publish,
    Replace,
    Report,
    RoundWatch,
    Seal,
)
from stretto.guards.replay import GuardedRounds
from stretto.guards.shown import ShownValues


@dataclasses.dataclass(frozen=True, slots=True)
class AtRest(Guard):
    """Takes checksums at the end of each use and compares them at the start of the next, on every rank separately.

    Watches: masters and optimizer state from the end of an update to the next step; the anchor, to which changes are
    added, from one gather to the next step or preview; the reduced gradient from its sum to its step; the residual of
    the wire (its rounding errors), from one sum to the next; gathered values until they are shown; the parameters
    that the model shows, from their installation to the end of the round's micro-batches; frozen parameters, and
    buffers that forward passes do not write.
    Damage: words in one column of the sums, or in a run shorter than a row (`stretto.checksums`), are mended in place,
    to the bit. Larger damage is replaced from another rank if replicas exist; otherwise it ends the job with an error.
    The model's parameters are mended or installed again; if the round cannot be run again, its rank contributes weight
    zero to it. Rounding errors that cannot be mended are set to zero.
    Traffic: eight bytes per rank and step for replicated strategies, and for sharded ones that send changes.
    Memory: 16 bytes per 32 KiB and 32 KiB per tensor.
    """

    name = "rest"
    agrees_inside = True
    repairs_sent = True

    def watch_rounds(self, rounds: GuardedRounds) -> RoundWatch:
        """Watch the model's values while gradients are computed."""
        return ShownValues(self.name, rounds)

    def at_start(self) -> GuardScript:
        """Seal the initial state of training."""
        yield Seal("state")
        yield Seal("anchor")
        yield Seal("error memory")

    def before_reduce(self) -> GuardScript:
        """Repair the wire's residual, or set it to zero, because no other rank has it."""
        for difference in (yield Inspect(("error memory",))):
            if (yield Mend(difference.part)):
                yield self._incident(difference, "mended")
            else:
                yield Clear(difference.part)
                yield self._incident(difference, "set to zero")

    def after_reduce(self) -> GuardScript:
        """Seal the summed gradient, and the rounding errors of its contributions."""
        yield Seal("reduced gradient")
        yield Seal("error memory")

    def after_gather(self) -> GuardScript:
        """Seal the gathered values, which may wait until they are shown, and their sources."""
        yield Seal("anchor")
        yield Seal("values to be shown")

    def after_update(self) -> GuardScript:
        """Seal the state at the end of the update, and values that were not gathered."""
        yield Seal("state")
        yield Seal("anchor")
        yield Seal("values to be shown")

    def before_install(self) -> GuardScript:
        """Repair the values that the model is about to show, or publish them again."""
        for difference in (yield Inspect(("values to be shown",))):
            if (yield Mend(difference.part)):
                yield self._incident(difference, "mended")
            else:
                yield Publish(difference.part)
                yield self._incident(difference, "published again")

    def before_step(self) -> GuardScript:
        """Compare sealed parts with their checksums, mend them, and replace those that cannot be mended."""
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
