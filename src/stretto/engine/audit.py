"""An audit: every rank's round is taken again on another rank, and where two differ it is found out who is right."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from stretto.checksums import digest, hexadecimal
from stretto.engine.accumulation import Accumulation
from stretto.engine.kept_round import KeptRound
from stretto.errors import TransferCorrupt
from stretto.flat import GradientBuffer
from stretto.guards.contract import Appointment
from stretto.records import Incident

if TYPE_CHECKING:
    from stretto.engine.compute_lane import ComputeLane

T = TypeVar("T")

Rerun = tuple[Accumulation, Mapping[str, Tensor]]
"""A round run again, and the buffers behind it."""
_WORD = 8
"""Bytes of a number in a record."""


class Audit:
    """One audit, on one rank; all ranks make one alike.

    Rank r's round is taken again by its auditor, rank r + distance, all at the same time: whoever is not audited would
    only wait.

    Note [Who is right]
        Kernels that are deterministic give the same bits for the same round on every sound rank. The audited rank a
        has a gradient f_a, the auditor b takes the round again, f_b. If f_a = f_b all is well. If not, a, b and a
        third rank, the witness, take it once more: s_a, s_b, s_c. The gradient that two of these agree on is the right
        one, and whoever gave another one, first or now, is named. Of two ranks that disagree still, the only one that
        gave the same gradient twice is right. Otherwise there are two cases: a and b each gave two different ones, so
        that nothing here is deterministic and values are compared within a tolerance; or nobody can say who is wrong.

    Args:
        compute: Whose round has been counted to the end; nothing has been installed since.
        kept: That round, to be run again.
        guard: Name of the guard that wants it.
        appointment: Who audits whom.
    """

    def __init__(
        self,
        compute: "ComputeLane",
        kept: KeptRound,
        guard: str,
        appointment: Appointment,
    ) -> None:
        self._compute = compute
        self._exchange = compute.lane.exchange
        self._rank, self._world_size = self._exchange.rank, self._exchange.world_size
        self._kept = kept
        self._guard = guard
        self._round_index = compute.lane.round_index  # the lane is at rest
        self._incidents: list[Incident] = []
        self._distance = appointment.distance
        self._tolerance = appointment.tolerance
        self._own = compute.accumulation
        self._buffers = kept.buffers()
        """To go on with."""

    def perform(self) -> Sequence[Incident]:
        """Take a round again, compare, and repair what was wrong; return what there is to report."""
        received = self._exchange_rounds()
        own = _digest(self._own, self._buffers)
        # Its parameters may be damaged still: it neither has a gradient to audit nor could it audit another.
        theirs = None if received is None or self._own.is_left_out else self._run(received)
        claim = 0 if theirs is None else _digest(theirs, self._kept.buffers())
        state = _LEFT_OUT if self._own.is_left_out else _SILENT if theirs is None else _CLAIMS
        record = bytes([state]) + own.to_bytes(_WORD) + claim.to_bytes(_WORD)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        for audited in range(self._world_size):
            auditor = self._auditor_of(audited)
            first = {"audited": _word(records[audited], 0), "auditor": _word(records[auditor], 1)}
            if _LEFT_OUT in (records[audited][0], records[auditor][0]):
                continue
            if records[auditor][0] == _SILENT:
                self._report(audited, (), "not audited", site="micro-batches on their way to an auditor")
            elif first["audited"] != first["auditor"]:
                self._settle(audited, first, theirs)
        self._kept.restore_buffers(self._buffers)
        return self._incidents

    def _run(self, kept: KeptRound) -> Accumulation:
        """Run a round again, apart from this rank's own."""
        parameters = self._compute.guarded.parameters
        accumulation = Accumulation(parameters, GradientBuffer(self._exchange.layout))
        accumulation.attach()
        self._compute.accumulation = accumulation
        try:
            kept.run(accumulation, lambda: self._compute.runtime.charge("micro-batch"))
        finally:
            self._compute.accumulation = self._own
            self._own.buffer.attach_again(parameters)
        return accumulation

    def _auditor_of(self, audited: int) -> int:
        return (audited + self._distance) % self._world_size

    def _settle(self, audited: int, first: Mapping[str, int], theirs: Accumulation | None) -> None:
        """Let everybody take a round once more, name who was wrong, and put it right."""
        roles = self._roles(audited)
        kept = self._broadcast_round(audited)
        taken: dict[str, Rerun] = {}
        for role, rank in roles.items():
            if rank == self._rank:
                taken[role] = self._run(kept), self._kept.buffers()
        claims = {role: _digest(*content) for role, content in taken.items()}
        record = b"".join(claims.get(role, 0).to_bytes(_WORD) for role in roles)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        second = {
            role: int.from_bytes(records[rank][position * _WORD : (position + 1) * _WORD])
            for position, (role, rank) in enumerate(roles.items())
        }
        right = _agreed(first, second)
        if right is not None:
            wrong = {r for role, r in roles.items() if {second[role], first.get(role, right)} != {right}}
            action = "kept: its audit was wrong" if first["audited"] == right else "taken again"
            self._report(audited, tuple(sorted(wrong)), action, right, first["audited"])
            if first["audited"] != right:
                holder = next(role for role in roles if second[role] == right)
                self._put_right(audited, roles[holder], taken.get(holder), right)
        elif all(first[role] != second[role] for role in first):
            self._compare(audited, theirs)
        else:
            self._report(audited, tuple(sorted(set(roles.values()))), _UNKNOWN)

    def _roles(self, audited: int) -> dict[str, int]:
        """Return who takes the round once more: a single rank twice, of two ranks both, otherwise three."""
        roles = {"audited": audited, "auditor": self._auditor_of(audited)}
        others = set(range(self._world_size)) - set(roles.values())
        return {**roles, "witness": min(others)} if others else roles

    def _put_right(self, audited: int, source: int, rerun: Rerun | None, right: int) -> None:
        """Give the audited rank what `source` has from its rerun: gradient, loss, use of parameters, and buffers."""
        taken, buffers = rerun if rerun is not None and self._rank == source else (self._own, self._buffers)
        content = [tensor.clone() for tensor in (*_outcome(taken), *buffers.values())]
        if source != audited:
            for tensor in content:
                self._broadcast(tensor, source, "audited gradient")
        if self._rank != audited:
            return
        for held, value in zip([*_outcome(self._own), *self._buffers.values()], content, strict=True):
            held.copy_(value)
        self._own.buffer.remember()
        if _digest(self._own, self._buffers) != right:
            raise TransferCorrupt(
                f"{self._compute.where}: the gradient that rank {source} computed in an audit arrived damaged: "
                "expected the digest that it had there; go on from the last checkpoint",
                links=[(source, audited)],
            )

    def _compare(self, audited: int, theirs: Accumulation | None) -> None:
        """Compare values where bits say nothing."""
        auditor = self._auditor_of(audited)
        if self._rank in (audited, auditor):
            warnings.warn(
                f"{self._compute.where}: the same micro-batches gave other bits each time, on rank {audited} and on "
                f"rank {auditor}: kernels are not deterministic, and audits compare within {self._tolerance:g} of the "
                "norm; with torch.use_deterministic_algorithms(True) they compare bits",
                stacklevel=2,
            )
        flats = self._own.buffer.flats
        values = theirs.buffer.flats if self._rank == auditor and theirs else [f.clone() for f in flats]
        for value in values:
            self._broadcast(value, auditor, "audited gradient")
        if self._rank == audited:
            apart = sum(float((a - b).double().square().sum()) for a, b in zip(flats, values, strict=True))
            whole = sum(float(value.double().square().sum()) for value in values)
            if not apart <= self._tolerance**2 * whole:
                relative = (apart / whole) ** 0.5 if whole else float("inf")
                suspects = tuple(sorted({audited, auditor}))
                self._report(audited, suspects, f"{relative:.2g} of the norm apart, {_UNKNOWN}")

    def _exchange_rounds(self) -> KeptRound | None:
        """Send this rank's round to its auditor; return the one to audit, None if it arrived damaged."""
        if self._world_size == 1:
            return self._kept
        content = torch.frombuffer(bytearray(self._kept.to_bytes()), dtype=torch.uint8)
        record = content.numel().to_bytes(_WORD) + digest(content).to_bytes(_WORD)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        audited = (self._rank - self._distance) % self._world_size
        arrived = torch.empty(_word(records[audited], 0, offset=0), dtype=torch.uint8, device=self._device)
        sent, taken = [0] * self._world_size, [0] * self._world_size
        sent[self._auditor_of(self._rank)], taken[audited] = content.numel(), arrived.numel()
        outgoing = content.to(self._device)
        self._exchange.sent_bytes += content.numel()
        group = self._exchange.group
        self._on_lane(
            lambda: self._exchange.wait(
                group.alltoall_base(arrived, outgoing, taken, sent), "audited micro-batches"
            )
        )
        arrived = arrived.cpu()
        if digest(arrived) != _word(records[audited], 1, offset=0):
            return None
        return self._kept.of(arrived.numpy().tobytes())

    def _broadcast_round(self, audited: int) -> KeptRound:
        """Return a rank's round on all ranks."""
        if self._world_size == 1:
            return self._kept
        own = self._kept.to_bytes() if self._rank == audited else b""
        record = len(own).to_bytes(_WORD) + xxhash.xxh3_64_digest(own)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        length = _word(records[audited], 0, offset=0)
        content = torch.empty(length, dtype=torch.uint8, device=self._device)
        if own:
            content.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self._broadcast(content, audited, "audited micro-batches")
        if self._rank == audited:
            return self._kept
        arrived = content.cpu().numpy().tobytes()
        if xxhash.xxh3_64_intdigest(arrived) != _word(records[audited], 1, offset=0):
            raise TransferCorrupt(
                f"{self._compute.where}: micro-batches of rank {audited}, to be run again, arrived damaged: expected "
                "the digest that they had there; go on from the last checkpoint",
                links=[(audited, self._rank)],
            )
        return self._kept.of(arrived)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Overwrite a tensor of any dtype with that of one rank."""
        if tensor.numel() == 0 or self._world_size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        content = tensor.contiguous().view(-1).view(torch.uint8).to(self._device)
        if self._rank == source:
            self._exchange.sent_bytes += content.numel() * (self._world_size - 1)
        group = self._exchange.group
        self._on_lane(lambda: self._exchange.wait(group.broadcast([content], options), what))
        if content.data_ptr() != tensor.data_ptr():
            tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def _on_lane(self, work: Callable[[], T]) -> T:
        """Perform collectives where all others are performed, once what is under way there has ended."""
        return self._compute.runtime.spawn(work).result()

    @property
    def _device(self) -> torch.device:
        return self._exchange.layout.sets[0].device

    def _report(
        self,
        audited: int,
        ranks: tuple[int, ...],
        action: str,
        expected: int | None = None,
        found: int | None = None,
        *,
        site: str = "gradient",
    ) -> None:
        """Put an incident into the next update; from one rank, which passes it on to all."""
        if self._rank == audited:
            incident = Incident(
                step=self._compute.steps + 1,
                guard=self._guard,
                site=site,
                part=f"round {self._round_index} of rank {audited}",
                ranks=ranks,
                action=action,
                expected=None if expected is None else hexadecimal(expected),
                found=None if found is None else hexadecimal(found),
            )
            self._incidents.append(incident)


_SILENT, _CLAIMS, _LEFT_OUT = range(3)
"""What a rank has to say in an audit: nothing, for want of what arrived; a digest; nothing, by its own fault."""
_UNKNOWN = "kept: nobody can say who is right"


def _agreed(first: Mapping[str, int], second: Mapping[str, int]) -> int | None:
    """Return the digest that two of the second runs share; of two ranks, that of the only one to repeat itself."""
    value, votes = Counter(second.values()).most_common(1)[0]
    if votes >= 2:
        return value
    steady = [value for role, value in second.items() if first.get(role) == value]
    return steady[0] if len(second) == 2 and len(steady) == 1 else None


def _outcome(taken: Accumulation) -> list[Tensor]:
    """Return the tensors that a round comes to: gradient, loss, and which parameters were used."""
    contribution = taken.contribution
    used = torch.frombuffer(contribution.used, dtype=torch.uint8)
    return [*taken.buffer.flats, contribution.loss_sum, used]


def _digest(taken: Accumulation, buffers: Mapping[str, Tensor]) -> int:
    """Return one digest over what a round comes to, and the buffers behind it."""
    return functools.reduce(lambda seed, value: digest(value, seed), [*_outcome(taken), *buffers.values()], 0)


def _word(record: bytes, position: int, offset: int = 1) -> int:
    start = offset + position * _WORD
    return int.from_bytes(record[start : start + _WORD])
