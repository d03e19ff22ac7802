"""The at-rest guard: it finds values that have changed between two uses, and repairs them."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from stretto.checksums import Checksum, digest, hexadecimal
from stretto.engine.accumulation import GradientBuffer
from stretto.guards.contract import (
    Difference,
    Guard,
    GuardScript,
    Inspect,
    Mend,
    Replace,
    Report,
    RoundWatch,
    Seal,
)
from stretto.guards.replay import GuardedRounds
from stretto.records import Incident


@dataclasses.dataclass(frozen=True, slots=True)
class AtRest(Guard):
    """Takes checksums at the end of each use and compares them at the start of the next, on every rank separately.

    Watches: masters and optimizer state from the end of an update to the next step; the reduced gradient from its sum
    to its step; the parameters that the model shows, from their installation to the end of the round's micro-batches.
    Damage: words in one column of the sums, or in a run shorter than a row (`stretto.checksums`), are mended in place,
    to the bit. Larger damage is replaced from another rank if replicas exist; otherwise it ends the job with an error.
    The model's parameters are mended or installed again; if the round cannot be run again, its rank contributes weight
    zero to it.
    Traffic: eight bytes per rank and step for replicated strategies, nothing for sharded ones.
    Memory: 16 bytes per 32 KiB and 32 KiB per tensor.
    """

    name = "rest"

    def watch_rounds(self, rounds: GuardedRounds) -> RoundWatch:
        """Watch the parameters that the model shows."""
        return ShownParameters(self.name, rounds)

    def at_start(self) -> GuardScript:
        """Seal the state that training starts from."""
        yield Seal("state")

    def after_update(self) -> GuardScript:
        """Seal the state at the end of the update."""
        yield Seal("state")

    def after_reduce(self) -> GuardScript:
        """Seal the summed gradient."""
        yield Seal("reduced gradient")

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


class ShownParameters(RoundWatch):
    """Compares the model's parameters with the installed values, once all micro-batches of a round are counted.

    Damaged parameters are mended or installed again. The round's gradients come from the damaged parameters, so the
    micro-batches are run again if they were kept; otherwise this rank leaves the round out.

    Args:
        guard: Name of the guard.
        rounds: The job's rounds.
    """

    def __init__(self, guard: str, rounds: GuardedRounds) -> None:
        self._guard = guard
        self._rounds = rounds
        self._model = rounds.job.model
        self._checksums: list[Checksum] = []
        self.installed([parameter.detach() for parameter in self._model.parameters])

    def installed(self, values: Sequence[Tensor]) -> None:
        """Keep checksums of `values`, not of the parameters, so that damage during installation is noticed too."""
        pairs = zip(values, self._model.parameters, strict=True)
        self._checksums = [Checksum.of(value.detach().to(parameter.dtype)) for value, parameter in pairs]

    def round_ends(self) -> Sequence[Incident]:
        """Repair damaged parameters, and compute the round's gradients again or leave them out."""
        accumulation = self._rounds.job.compute.accumulation
        count = accumulation.contribution.count
        found = self._repair() if count else []
        if not found:
            return found
        outcome = "this rank's micro-batches of the round replayed"
        if not self._replay():
            accumulation.begin(accumulation.buffer).attach()
            accumulation.contribution.count = count
            accumulation.is_left_out = True
            outcome = "this rank's gradients of the round left out"
        return [dataclasses.replace(one, action=f"{one.action}, {outcome}") for one in found]

    def _repair(self) -> list[Incident]:
        """Mend damaged parameters where possible, and return the incidents; the rest must be installed again."""
        incidents = []
        for name, parameter, checksum in zip(
            self._model.names, self._model.parameters, self._checksums, strict=True
        ):
            found = digest(parameter)
            if found != checksum.digest:
                incidents.append(
                    Incident(
                        step=self._rounds.job.compute.steps + 1,
                        guard=self._guard,
                        site="shown parameters",
                        part=name,
                        ranks=(self._rounds.job.exchange.rank,),
                        action="mended" if checksum.repairs(parameter) else "installed anew",
                        expected=hexadecimal(checksum.digest),
                        found=hexadecimal(found),
                    )
                )
        if incidents:
            self._model.remember()
        return incidents

    def _replay(self) -> bool:
        """Run the round's micro-batches again; return whether they ran with the installed values."""
        rounds, accumulation = self._rounds, self._rounds.job.compute.accumulation
        if not rounds.kept.is_whole or not self._is_installed():
            return False
        accumulation.begin(accumulation.buffer).attach()
        rounds.kept.run(accumulation, rounds.charge)
        return self._is_as_installed()

    def _is_installed(self) -> bool:
        """Return whether the parameters are as installed; if needed, install a replicated optimizer's masters."""
        if self._is_as_installed():
            return True
        job = self._rounds.job
        if not job.replica.replicated or not job.compute.is_lane_idle:  # somebody may write them
            return False
        values = GradientBuffer(job.layout)
        job.sharded.publish(values.flats)
        self._model.install(values.views)
        return self._is_as_installed()

    def _is_as_installed(self) -> bool:
        pairs = zip(self._model.parameters, self._checksums, strict=True)
        return all(digest(parameter) == checksum.digest for parameter, checksum in pairs)
