"""Messages between the ranks of a node, if each holds a shard of the node's one replica.

Note [One rank of shards]
    FSDP2 adds up the gradients of a node's ranks, and each rank has the sums of its shard. The strategy runs between
    ranks that hold the same shard of different nodes. It sees a smaller model, whose rank is the node. So all
    deciding values are merged inside the node before they are sent, and all shards of a replica take the same step:

        weight, samples, losses, squared norm   the sum over the node's ranks, in rank order
        finite                                  on all of them
        used, changed, `stale`                  on any
        vote                                    the strongest
        settings                                the same, or an error

    The group is the node's own. No node waits for another here.

Note [Two lanes ask]
    Each lane asks on its own group, because nothing orders the calls of the two lanes. The compute lane uses FSDP2's
    group, which no other code uses: passes through the model, and questions between them, come in the same order on
    all ranks of a node.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from stretto.engine.accumulation import Totals
from stretto.engine.agreement import agree
from stretto.engine.report import RankReport, RoundReport
from stretto.engine.runtime import Pending, Runtime, RuntimeOver
from stretto.errors import UnsupportedModel, WorkerDisagrees
from stretto.exchange import Exchange
from stretto.flat import Layout

T = TypeVar("T")


class NodeGroup:
    """The ranks of one node; see Note [One rank of shards].

    Args:
        exchange: The exchange among them, for the communication lane, on a separate group.
        aside: The exchange among them, for the compute lane, on FSDP2's group; see Note [Two lanes ask].
        everyone: The exchange among all ranks of the job, on its group.
        ranks: Their numbers in the job, in the order of their shards.
    """

    def __init__(self, exchange: Exchange, aside: Exchange, everyone: Exchange, ranks: Sequence[int]) -> None:
        self.exchange = exchange
        self.aside = aside
        self.everyone = everyone
        self.ranks = ranks

    @property
    def rank(self) -> int:
        """This process's position in the job, for messages."""
        return self.everyone.rank

    def digest_of(self, layout: Layout) -> str:
        """Return a digest of the layouts of all ranks of the job; all of them must call it."""
        digests = self.everyone.gather_bytes(layout.digest().encode())
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def merge(self, own: RankReport, settings: Callable[[], str], where: str) -> RankReport:
        """Return the node's report of a round, the same on all its ranks; all must call.

        Args:
            own: This rank's.
            settings: Of this rank, as text; called where ranks differ.
            where: Rank and step, for messages.

        Raises:
            WorkerDisagrees: The ranks would step with other settings.
            UnsupportedModel: A floating-point buffer of the model has changed.
        """
        records = self.exchange.gather_bytes(*own.pack())
        report = RoundReport.unpack(records, len(own.used), len(own.changed))
        if not report.settings_agree:
            texts = {"optimizer settings": settings()}
            agree(
                self.exchange,
                texts,
                f"{where}, inside a node of ranks {list(self.ranks)}",
                kind=WorkerDisagrees,
            )
        if any(report.changed):
            raise UnsupportedModel(
                f"{where}: floating-point buffers of the model have changed in a forward pass (running "
                "statistics and the like): expected constant buffers where fully_shard has sharded the "
                "model, because Stretto does not average them inside a node; let each rank keep its own with "
                "Options(buffers='*=alone'), or use layers without such buffers"
            )
        every = report.records
        return dataclasses.replace(
            own,
            totals=Totals(
                weight=report.weight,
                samples=report.samples,
                fresh_samples=report.fresh_samples,
                micro_batches=sum(report.micro_batches),
                loss_sum=report.loss_sum,
                loss_weight=report.loss_weight,
            ),
            gradient_is_finite=bool(every["gradient_is_finite"].all()),
            norm_squared=report.norm_squared(replicated=False),
            vote=max(report.votes),
            asks=report.asks,
            used=report.used,
            changed=bytes(report.changed),
            stale=bool(report.stale),
            buffers_are_finite=bool(every["buffers_are_finite"].all()),
            measured=None,
        )

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the node's ranks, `()` float64 on the same device; all of them must call
        it.
        """
        records = self.exchange.gather_bytes(bytes(value.nbytes), [(0, value.view(1).view(torch.int8))])
        total = np.add.accumulate(np.frombuffer(b"".join(records)))[-1]
        return torch.full_like(value, float(total))

    def have_all(self, found: bool) -> bool:
        """Return whether `found` is true on all ranks of the node; all of them must call it, on the compute lane."""
        return all(map(any, self.aside.gather_bytes(bytes([found]))))

    def agree_on_damage(self, *, damaged: bool, able: bool) -> tuple[bool, bool]:
        """Return whether any rank has found damage, and whether all are able to handle it.

        All must call, on the compute lane.
        """
        records = self.aside.gather_bytes(bytes([damaged, able]))
        return any(record[0] for record in records), all(record[1] for record in records)


class NodeRuntime(RuntimeOver):
    """A runtime under a `Clock` with which the ranks of a node end a round at the same micro-batch.

    Args:
        runtime: The runtime of this rank.
        node_group: The node.
    """

    def __init__(self, runtime: Runtime, node_group: NodeGroup) -> None:
        super().__init__(runtime)
        self._node_group = node_group

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work`; it counts as complete once all ranks of the node agree, which they check at the same
        micro-batches.
        """
        return _OnNode(super().spawn(work), self._node_group)


class _OnNode(Generic[T]):
    """Work that every rank of a node does for its shard."""

    def __init__(self, pending: Pending[T], node_group: NodeGroup) -> None:
        self._pending = pending
        self._node_group = node_group

    def done(self) -> bool:
        return self._node_group.have_all(self._pending.done())

    def result(self) -> T:
        return self._pending.result()
