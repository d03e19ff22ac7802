"""The audit: in some rounds, other ranks compute the gradients again and compare them bit by bit."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from stretto.checksums import digest, digest_of_all, hexadecimal
from stretto.engine.accumulation import Accumulation
from stretto.errors import ConfigError, TransferCorrupt
from stretto.exchange.broadcast import broadcast
from stretto.fields import check_fields
from stretto.groups.collectives import method_of
from stretto.guards.contract import Guard, GuardScript, RoundWatch
from stretto.guards.replay import GuardedRounds, KeptRound
from stretto.guards.sent_round import from_bytes, to_bytes
from stretto.randomness import coin, draw
from stretto.records import Incident

T = TypeVar("T")

Rerun = tuple[Accumulation, Mapping[str, Tensor]]
"""The accumulation of a round that was run again, and the model's buffers after it."""
# Bytes of a number in a record.
_WORD = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Audit(Guard):
    """In a drawn round, runs every rank's micro-batches again on another rank, with the same parameters.

    It finds what no other guard can: a gradient that was computed wrongly, or damaged while it accumulated. It
    compares a digest of the round's gradient and the model's buffers. If two ranks differ, both run the round once
    more, and a third rank runs it too. A rank outside the majority is named, and the round continues with the
    majority's gradient, to the bit. With two ranks only, a rank that does not repeat its own result is named; if both
    repeat theirs, no rank is named, and the gradient is not changed. A single rank runs its own round again.

    A wrong round is found with probability `rate`; a rank that is wrong in every round after `1 / rate` rounds on
    average.

    Needs: micro-batches that come through `DataParallel.micro_batch`, a loss function that does the same on every rank
    and does not change its batch, batches that can be pickled, and ranks that show the same parameters.
    Traffic: in audited rounds each rank's batches to one other, and 33 bytes to all.
    Compute: `rate` times a round, exposed.
    Memory: batches are kept to the end of their round; audited rounds also need those of another rank and one more
    gradient buffer.
    """

    rate: float = 0.01
    """Share of rounds that are audited; above 0, at most 1. One in a hundred costs one per cent."""
    seed: int = 0
    """Seed of the draws."""

    name = "audit"
    needs_equal_parameters = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rate <= 1:
            raise ConfigError(f"Audit(rate={self.rate}): expected a share of rounds above 0, at most 1")

    def watch_rounds(self, rounds: GuardedRounds) -> RoundWatch:
        """Audit the rounds that are drawn."""
        return _Audits(self, rounds)

    def distance(self, round_index: int, world_size: int) -> int | None:
        """Return the distance in ranks to every rank's auditor in a round; None if the round is not audited."""
        if not coin(self.seed, "audit", round_index, self.rate):
            return None
        # The distance changes each time, so that two faulty ranks do not always audit each other.
        return 1 + draw(self.seed, "auditor", round_index) % (world_size - 1) if world_size > 1 else 0

    def after_update(self) -> GuardScript:
        """Yield no effects: audits run before a round is sent."""
        yield from ()


class _Audits(RoundWatch):
    """Audits the drawn rounds of one rank."""

    needs_rounds = True

    def __init__(self, guard: Audit, rounds: GuardedRounds) -> None:
        self._guard = guard
        self._rounds = rounds

    def round_ends(self) -> Sequence[Incident]:
        """Audit the round if it is drawn; the draw is the same on all ranks."""
        compute = self._rounds.job.compute
        compute.wait_for_lane()
        round_index = compute.comm.progress.round_index
        distance = self._guard.distance(round_index, self._rounds.job.exchange.world_size)
        if distance is None:
            return ()
        return _RoundAudit(self._rounds, self._guard, round_index, distance).perform()


class _RoundAudit:
    """One audit, on one rank; all ranks take part at the same time.

    Rank r's round is run again by its auditor, rank r + distance. All rounds are audited at once, because a rank that
    is not audited would only wait.

    Note [Who is right]
        Deterministic kernels give the same bits for the same round on every healthy rank. The audited rank a has a
        gradient f_a. The auditor b runs the round again and gets f_b. If f_a = f_b, nothing is wrong. If not, a, b
        and a third rank, the witness c, run it once more and get s_a, s_b, s_c. The gradient that two of these share
        is right, and every rank that got another gradient, first or now, is named. If only two ranks exist and they
        still differ, the only one that got the same gradient twice is right. Otherwise there are two cases. If a and
        b each got two different gradients, the kernels are not deterministic, and values are compared within a
        tolerance. If both repeated their own, no majority shows which rank is wrong.

    Args:
        rounds: The job's rounds; all micro-batches of the current one are counted, and nothing has been installed
            since.
        guard: The options of the audit.
        round_index: Index of the round.
        distance: Distance in ranks from every rank to its auditor.
    """

    def __init__(self, rounds: GuardedRounds, guard: Audit, round_index: int, distance: int) -> None:
        self._rounds = rounds
        self._compute = rounds.job.compute
        self._exchange = rounds.job.exchange
        self._rank, self._world_size = self._exchange.rank, self._exchange.world_size
        self._device = self._exchange.layout.sets[0].device
        self._kept = rounds.kept
        self._guard = guard
        self._round_index = round_index
        self._distance = distance
        self._incidents: list[Incident] = []
        self._own = rounds.job.compute.accumulation
        # The model's buffers, to restore after the audit.
        self._buffers = self._kept.buffers()

    def perform(self) -> Sequence[Incident]:
        """Run another rank's round again, compare, and repair wrong gradients; return the incidents."""
        received = self._exchange_rounds()
        own = _digest(self._own, self._buffers)
        # Its parameters may still be damaged: it has no gradient to audit, and cannot audit another rank.
        theirs = None if received is None or self._own.is_left_out else self._rounds.run_again(received)
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

    def _auditor_of(self, audited: int) -> int:
        return (audited + self._distance) % self._world_size

    def _settle(self, audited: int, first: Mapping[str, int], theirs: Accumulation | None) -> None:
        """Let all roles run a round once more, find the wrong rank, and repair its round."""
        roles = {"audited": audited, "auditor": self._auditor_of(audited)}
        if others := set(range(self._world_size)) - set(roles.values()):
            roles["witness"] = min(others)
        kept = self._broadcast_round(audited)
        taken: dict[str, Rerun] = {}
        for role, rank in roles.items():
            if rank == self._rank:
                taken[role] = self._rounds.run_again(kept), self._kept.buffers()
        claims = {role: _digest(*content) for role, content in taken.items()}
        record = b"".join(claims.get(role, 0).to_bytes(_WORD) for role in roles)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        second = {
            role: int.from_bytes(records[rank][position * _WORD : (position + 1) * _WORD])
            for position, (role, rank) in enumerate(roles.items())
        }
        # Two second runs that are equal are right or, of two ranks, the only one that repeated its own.
        value, votes = Counter(second.values()).most_common(1)[0]
        steady = [of_role for role, of_role in second.items() if first.get(role) == of_role]
        right = value if votes >= 2 else steady[0] if len(second) == 2 and len(steady) == 1 else None
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

    def _put_right(self, audited: int, source: int, rerun: Rerun | None, right: int) -> None:
        """Send the audited rank the result of `source`'s rerun: gradient, loss, used parameters, and buffers."""
        taken, buffers = rerun if rerun is not None and self._rank == source else (self._own, self._buffers)
        content = [tensor.clone() for tensor in (*_outcome(taken), *buffers.values())]
        if source != audited:
            for tensor in content:
                self._broadcast(tensor, source, "audited gradient")
        if self._rank != audited:
            return
        for held, value in zip([*_outcome(self._own), *self._buffers.values()], content, strict=True):
            held.copy_(value)
        self._own.remember()
        if _digest(self._own, self._buffers) != right:
            raise TransferCorrupt(
                f"{self._compute.where}: the gradient that rank {source} computed in an audit arrived "
                f"damaged: expected the digest that rank {source} sent; resume from the last checkpoint",
                links=[(source, audited)],
            )

    def _compare(self, audited: int, theirs: Accumulation | None) -> None:
        """Compare values within the tolerance, if bits cannot be compared."""
        auditor = self._auditor_of(audited)
        if self._rank in (audited, auditor):
            warnings.warn(
                f"{self._compute.where}: the same micro-batches gave different bits each time they were run, on "
                f"rank {audited} and on rank {auditor}: kernels are not deterministic, and audits compare within "
                f"{_TOLERANCE:g} of the norm; with torch.use_deterministic_algorithms(True) they compare bits",
                stacklevel=2,
            )
        flats = self._own.buffer.flats
        values = theirs.buffer.flats if self._rank == auditor and theirs else [f.clone() for f in flats]
        for value in values:
            self._broadcast(value, auditor, "audited gradient")
        if self._rank == audited:
            apart = sum(float((a - b).double().square().sum()) for a, b in zip(flats, values, strict=True))
            whole = sum(float(value.double().square().sum()) for value in values)
            if not apart <= _TOLERANCE**2 * whole:
                relative = (apart / whole) ** 0.5 if whole else float("inf")
                suspects = tuple(sorted({audited, auditor}))
                self._report(audited, suspects, f"{relative:.2g} of the norm apart, {_UNKNOWN}")

    def _exchange_rounds(self) -> KeptRound | None:
        """Send this rank's round to its auditor; return the round to audit, None if it arrived damaged."""
        if self._world_size == 1:
            return self._kept
        content = torch.frombuffer(bytearray(to_bytes(self._kept)), dtype=torch.uint8)
        record = content.numel().to_bytes(_WORD) + digest(content).to_bytes(_WORD)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        audited = (self._rank - self._distance) % self._world_size
        arrived = torch.empty(
            _word(records[audited], 0, offset=0),
            dtype=torch.uint8,
            device=self._device,
        )
        sent, taken = [0] * self._world_size, [0] * self._world_size
        sent[self._auditor_of(self._rank)], taken[audited] = content.numel(), arrived.numel()
        outgoing = content.to(self._device)
        self._exchange.count_sent(content.numel())
        group = self._exchange.group
        self._on_lane(
            lambda: self._exchange.wait(
                method_of(group, "all_to_all_single")(arrived, outgoing, taken, sent), "audited micro-batches"
            )
        )
        arrived = arrived.cpu()
        if digest(arrived) != _word(records[audited], 1, offset=0):
            return None
        return from_bytes(arrived.numpy().tobytes(), self._kept)

    def _broadcast_round(self, audited: int) -> KeptRound:
        """Return a rank's round on all ranks."""
        if self._world_size == 1:
            return self._kept
        own = to_bytes(self._kept) if self._rank == audited else b""
        record = len(own).to_bytes(_WORD) + xxhash.xxh3_64_digest(own)
        records = self._on_lane(lambda: self._exchange.gather_bytes(record))
        content = torch.empty(_word(records[audited], 0, offset=0), dtype=torch.uint8)
        if own:
            content.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self._broadcast(content, audited, "audited micro-batches")
        if self._rank == audited:
            return self._kept
        arrived = content.numpy().tobytes()
        if xxhash.xxh3_64_intdigest(arrived) != _word(records[audited], 1, offset=0):
            raise TransferCorrupt(
                f"{self._compute.where}: micro-batches of rank {audited}, to be run again, arrived damaged: "
                "expected the digest of their sender; resume from the last checkpoint",
                links=[(audited, self._rank)],
            )
        return from_bytes(arrived, self._kept)

    def _broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Overwrite a tensor with one rank's tensor."""
        if self._world_size > 1:
            self._on_lane(lambda: broadcast(self._exchange, tensor, source, what))

    def _on_lane(self, work: Callable[[], T]) -> T:
        """Perform collectives on the communication lane, after those in flight there."""
        return self._compute.runtime.spawn(work).result()

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
        """Record an incident on the audited rank; the next update shows it on all ranks."""
        if self._rank == audited:
            incident = Incident(
                step=self._compute.rounds.steps + 1,
                guard=self._guard.name,
                site=site,
                part=f"round {self._round_index} of rank {audited}",
                ranks=ranks,
                action=action,
                expected=None if expected is None else hexadecimal(expected),
                found=None if found is None else hexadecimal(found),
            )
            self._incidents.append(incident)


# A rank's answer in an audit: none, because no round arrived; a digest; none, because it skipped its round.
_SILENT, _CLAIMS, _LEFT_OUT = range(3)
# Largest 2-norm of the difference, relative to the gradient's, where bits cannot be compared: if ranks differ and none
# repeats its own gradient. Well above float32's rounding, well below a harmful error.
_TOLERANCE = 1e-3
_UNKNOWN = "kept: no majority shows which rank is right"


def _outcome(taken: Accumulation) -> list[Tensor]:
    """Return the tensors of a round's result: gradient, loss, and which parameters were used."""
    contribution = taken.contribution
    used = torch.frombuffer(contribution.used, dtype=torch.uint8)
    return [*taken.buffer.flats, contribution.loss_sum, used]


def _digest(taken: Accumulation, buffers: Mapping[str, Tensor]) -> int:
    """Return one digest over a round's result and the buffers after it."""
    return digest_of_all([*_outcome(taken), *buffers.values()])


def _word(record: bytes, position: int, offset: int = 1) -> int:
    start = offset + position * _WORD
    return int.from_bytes(record[start : start + _WORD])
