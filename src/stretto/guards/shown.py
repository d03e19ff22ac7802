"""The model's values while gradients are computed: trained parameters, frozen parameters, and buffers."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from stretto.checksums import Checksum, checksums, compared, hexadecimal
from stretto.engine.accumulation import GradientBuffer
from stretto.engine.buffers import is_comparable
from stretto.errors import ParametersTouched, StateCorrupt
from stretto.guards.contract import RoundWatch
from stretto.guards.repair import repairs
from stretto.guards.replay import GuardedRounds
from stretto.records import Incident

# How often a tensor is damaged, in consecutive or alternate rounds, before the guard excludes chance.
_NO_ACCIDENT = 3
# How often a round is run again: damage during a run is repaired, but spoils that run too.
_REPLAYS = 2
Mark = tuple[int, int]
"""Address and version counter of a tensor: if either differs, the job or the user has written the tensor."""


def mark_of(tensor: Tensor, held: Tensor) -> Mark:
    """Return the mark of a tensor of the model; `held` is this rank's part of it."""
    return held.data_ptr(), tensor._version


@dataclasses.dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor that is not trained, and its checksum while no code writes it.

    A buffer that forward passes write costs no checksum: Stretto takes a checksum only after a round without a write.
    """

    mark: Mark
    checksum: Checksum | None

    @classmethod
    def sealed(cls, tensor: Tensor, held: Tensor) -> Self:
        """Return a record with a checksum of this rank's current part of a tensor."""
        return cls(mark_of(tensor, held), Checksum.of(held))

    @classmethod
    def following(cls, before: Self | None, tensor: Tensor, held: Tensor) -> Self:
        """Return the record of a tensor at the end of a round, from its record in the previous round."""
        if before is None or before.mark != mark_of(tensor, held):
            return cls(mark_of(tensor, held), None)
        return before if before.checksum is not None else cls.sealed(tensor, held)


class ShownValues(RoundWatch):
    """Compares the model's values with earlier checksums, once all micro-batches of a round are counted.

    It compares trained parameters with the installed values, and frozen parameters and buffers with their values at the
    end of the previous round. Damaged ones are mended, or trained ones installed again. The round's gradients come from
    the damaged values, so the micro-batches are run again if they were kept; otherwise this rank leaves the round out.
    Where the ranks of a node hold shards, damage of one is in the gradients of all: they do either together.

    Note [Buffers that are written]
        A write by a torch operation shows in the version counter. Some kernels write without it: those of batch
        normalization, and perhaps the user's own. So a floating-point buffer is watched only if it is no statistic of
        a normalization, and has not changed by the end of the first round in which it is compared.

    Args:
        guard: Name of the guard.
        rounds: The job's rounds.
    """

    def __init__(self, guard: str, rounds: GuardedRounds) -> None:
        self._guard = guard
        self._rounds = rounds
        self._model = rounds.job.model
        # Checksums of the installed values, by parameter.
        self._checksums: list[Checksum] = []
        # Frozen parameters and buffers, by name.
        self._constants: dict[str, _Constant] = {}
        # Names of buffers that are not watched; see Note [Buffers that are written].
        self._written: set[str] = set()
        # Names of tensors that had not changed.
        self._still: set[str] = set()
        self._num_rounds = 0
        # By name: how often a tensor was found damaged, with at most one healthy round between, and the last such
        # round.
        self._struck: dict[str, tuple[int, int]] = {}
        rounds.interpreter.ask_seals(self._is_as_sealed)
        self.begin_again()

    def begin_again(self) -> None:
        """Compute checksums of all values in the model now."""
        self.installed([parameter.detach() for parameter in self._model.parameters])
        self._constants = {name: _Constant.sealed(*pair) for name, pair in self._frozen_state().items()}
        self._written = {  # the statistics that normalizations keep
            f"{path}.{name}".removeprefix(".")
            for path, module in self._model.model.named_modules()
            if isinstance(module, _NormBase)
            for name, _ in module.named_buffers(recurse=False)
        }
        self._still = set()

    def _frozen_state(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return untrained tensors that have values to compare, with this rank's part of each."""
        frozen = {name for name, _ in self._model.model.named_parameters()}
        found = self._rounds.frozen_state()
        return {name: pair for name, pair in found.items() if name in frozen or is_comparable(pair[0])}

    def installed(self, values: Sequence[Tensor]) -> None:
        """Keep checksums of `values`, not of the parameters, so that damage during installation is noticed too."""
        pairs = zip(values, self._model.parameters, strict=True)
        self._checksums = checksums([value.detach().to(parameter.dtype) for value, parameter in pairs])

    def round_ends(self) -> Sequence[Incident]:
        """Repair damaged parameters, and compute the round's gradients again or skip them."""
        accumulation = self._rounds.job.compute.accumulation
        if not accumulation.contribution.count:
            return ()
        self._num_rounds += 1
        shown = self._repair()
        found = [*shown, *self._repair_constants()]
        is_damaged, can_replay = self._rounds.agree(damaged=bool(found), able=self._can_replay(found))
        if not is_damaged:
            return found
        for _ in range(_REPLAYS):
            if not (is_damaged and can_replay):
                break
            accumulation.restart()
            self._model.drop_copies()  # of the damaged values
            self._rounds.kept.run(accumulation, self._rounds.job.compute.runtime.virtual_time)
            again = [*self._repair(), *self._repair_constants()]
            is_damaged, can_replay = self._rounds.agree(damaged=bool(again), able=self._can_replay(again))
            found += again
        outcome = "this rank's micro-batches of the round replayed"
        if is_damaged:
            accumulation.leave_out()
            # Not of those that were just compared or mended: what was there before may be the damaged value.
            self._model.buffer_sync.go_back(
                {name for name, one in self._constants.items() if one.checksum and name not in self._written}
            )
            outcome = "this rank's gradients of the round skipped"
            for one in shown:  # where rounds are run again, nothing is lost, and training goes on
                self._strike(one.site, one.part, "in the step of your optimizer")
        return [dataclasses.replace(one, action=f"{one.action}, {outcome}") for one in found]

    def _repair(self) -> list[Incident]:
        """Repair damaged parameters where possible, and return the incidents; the others must be installed again."""
        incidents = []
        pairs = compared(self._checksums, self._model.parameters)
        for index, (expected, found) in enumerate(pairs):
            if expected != found:
                is_mended = repairs(self._checksums[index], self._model.parameters[index])
                action = "mended" if is_mended else "installed again"
                name = self._model.names[index]
                incidents.append(self._incident("shown parameters", name, action, expected, found))
        if incidents:
            self._model.remember()
        return incidents

    def _repair_constants(self) -> list[Incident]:
        """Repair damaged frozen parameters and buffers, and return the incidents.

        Raises:
            StateCorrupt: One cannot be repaired.
        """
        incidents: list[Incident] = []
        frozen = {name for name, _ in self._model.model.named_parameters()}
        watched = {name: pair for name, pair in self._frozen_state().items() if name not in self._written}
        known = {name for name, one in self._constants.items() if one.checksum is not None}
        for name, pair in watched.items():
            self._constants[name] = _Constant.following(self._constants.get(name), *pair)
        sealed = {name: one for name in watched if (one := self._constants[name].checksum) is not None}
        pairs = compared(list(sealed.values()), [watched[name][1] for name in sealed])
        for (name, checksum), (expected, found) in zip(sealed.items(), pairs, strict=True):
            if expected == found:
                self._still.update({name} & known)
                continue
            tensor, held = watched[name]
            if name not in self._still and name not in frozen and tensor.is_floating_point():
                self._written.add(name)
                continue
            site = "frozen parameters" if name in frozen else "buffers"
            self._strike(site, name, "as in `with torch.no_grad(): target.mul_(0.9).add_(online, alpha=0.1)`")
            if not repairs(checksum, held):
                raise StateCorrupt(
                    f"{self._rounds.job.compute.where}: {site}, {name!r}, damaged beyond repair: expected digest "
                    f"{hexadecimal(expected)}, found {hexadecimal(found)}, and PyTorch counted no write to it (a write "
                    "through .data is not counted: write without .data); resume from the last checkpoint",
                    ranks=[self._rounds.job.replica.rank],
                )
            self._constants[name] = _Constant(mark_of(tensor, held), checksum)
            self._rounds.kept.correct(name, tensor)
            incidents.append(self._incident(site, name, "mended", expected, found))
        return incidents

    def _strike(self, site: str, name: str, instead: str) -> None:
        """Count damage; a skipped round may commit no update, and then no values follow it.

        Raises:
            ParametersTouched: It was damaged too often in a row.
        """
        count, last = self._struck.get(name, (0, 0))
        count = count + (self._num_rounds > last) if self._num_rounds - last <= 2 else 1
        self._struck[name] = count, self._num_rounds
        if count == _NO_ACCIDENT:
            raise ParametersTouched(
                f"{self._rounds.job.compute.where}: {site}, {name!r}, had other values {_NO_ACCIDENT} times "
                "within a few rounds, and PyTorch counted no write to it: memory does not fail so often. "
                "Some code writes it through .data or .numpy() (a target network, an average, a clip): write "
                f"it without .data, {instead}; if no code does, test the memory of this machine"
            )

    def _incident(self, site: str, part: str, action: str, expected: int, found: int) -> Incident:
        return Incident(
            step=self._rounds.job.compute.rounds.steps + 1,
            guard=self._guard,
            site=site,
            part=part,
            ranks=(self._rounds.job.replica.rank,),
            action=action,
            expected=hexadecimal(expected),
            found=hexadecimal(found),
        )

    def _can_replay(self, found: Sequence[Incident]) -> bool:
        """Return whether the micro-batches were kept, and the model holds the installed values, after damage.

        If needed, install a replicated optimizer's masters.
        """
        if not self._rounds.kept.is_whole:
            return False
        if not found or self._is_as_installed():
            return True
        job = self._rounds.job
        if not job.replica.replicated or not job.compute.is_lane_idle:  # somebody may write them
            return False
        values = GradientBuffer(job.layout)
        job.sharded.publish(values.flats)
        self._model.install(values.views)
        return self._is_as_installed()

    def _is_as_sealed(self, name: str) -> bool:
        """Return whether a frozen parameter or buffer is known to be unchanged since the end of the last round."""
        known, (tensor, held) = self._constants.get(name), self._frozen_state()[name]
        if known is None or known.checksum is None or known.mark != mark_of(tensor, held):
            return False
        ((expected, found),) = compared([known.checksum], [held])
        return expected == found

    def _is_as_installed(self) -> bool:
        return all(now == then for now, then in compared(self._checksums, self._model.parameters))
