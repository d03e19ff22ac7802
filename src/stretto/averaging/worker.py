"""Workers: the ranks that step one replica together, and the report of their round.

A worker is a rank alone, or all ranks of a node.

Note [Inside a node]
    The ranks of a node add up the gradients of every round, in rank order and as wide as gradients accumulate, and
    gather a report of it. All that decides about the step follows from these: sum, weight, norm, which parameters are
    used, whether everything is finite. So they hold the same masters in every round, to the bit.

    The node has a separate group. No node waits for another, and a fragment may be sent on the job's group meanwhile.
"""

from collections.abc import Sequence

from torch import Tensor

from stretto.averaging.reports import alone, among
from stretto.engine.agreement import agree
from stretto.engine.failures import BACKEND_MARGIN_SECONDS, FailureDetector
from stretto.engine.options import Options
from stretto.engine.report import RankReport, RoundReport, Vote
from stretto.engine.round import Round
from stretto.errors import ConfigError, WorkerDisagrees
from stretto.exchange import FP32, Exchange
from stretto.groups import part_of
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger

WITHOUT_DATA = (Vote.DATA_ENDED, Vote.PASS_LEFT, Vote.FINISHING)
"""If all ranks of a worker have one of these votes, it averages whenever other workers do: ranks can agree on an end
only at an average."""


class Worker:
    """The ranks that step one replica together.

    Args:
        exchange: The job's exchange.
        inside: The exchange among the ranks of the node; None for a rank that steps alone.
    """

    def __init__(self, exchange: Exchange, inside: Exchange | None) -> None:
        self._exchange, self._inside = exchange, inside
        self.ranks = [exchange.rank]
        """Ranks of the job, in rising order."""
        if inside is not None and exchange.inside is not None:
            self.ranks = list(exchange.inside.ranks)

    @property
    def name(self) -> str:
        """Name of this rank's replica in a checkpoint: only the same rank of the same worker can use it."""
        rank = str(self._exchange.rank)
        return rank if self._inside is None else f"{rank} of {self.ranks[0]} to {self.ranks[-1]}"

    def add_up(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Sum `flats` over the worker's ranks into `sums`, which hold this rank's own values."""
        if self._inside is not None:
            self._inside.all_reduce(flats, sums)

    def look_at(self, round: Round, own: RankReport, where: str) -> tuple[RoundReport, float, bool]:
        """Return the worker's report of a round after its sum; equal on all its ranks.

        Args:
            round: The round of this rank.
            own: Its report.
            where: Rank and step, for messages.

        Returns:
            The records of its ranks, with empty ones for all others; the squared norm of the sum of its gradients; and
            whether the data of all its ranks have ended.

        Raises:
            WorkerDisagrees: The ranks would step with different settings.
        """
        inside = self._inside
        if inside is None:
            report = alone(own, self._exchange.rank, self._exchange.world_size)
            return report, own.norm_squared, own.vote in WITHOUT_DATA
        records = inside.gather_bytes(*own.pack())
        self._exchange.take_account(inside)
        report = RoundReport.unpack(records, len(own.used), len(own.changed))
        if not report.settings_agree:
            texts = {"optimizer settings": round.settings(inside.layout)}
            agree(inside, texts, where, first=self.ranks[0], kind=WorkerDisagrees)
        # A rank whose data end before those of its node continues with weight zero.
        are_without_data = all(vote in WITHOUT_DATA for vote in report.votes)
        of_job = among(report, self.ranks[0], self._exchange.world_size)
        return of_job, report.norm_squared(replicated=True), are_without_data


def check_worker(strategy: Strategy, ledger: Ledger, options: Options) -> None:
    """If a worker is a node, check that the nodes are known, and that their sums need no verification.

    Raises:
        ConfigError: A check fails.
    """
    if ledger.by_node and options.verified:
        raise ConfigError(
            f"{strategy}, Options(verified=True): sums inside a worker that is a node are not checked; expected "
            "worker='rank', or verified=False"
        )
    if ledger.by_node and options.ranks_per_node is None:
        raise ConfigError(
            f"{strategy}: a worker that is a node needs to know its ranks: expected Options(ranks_per_node=L), for "
            "nodes of L consecutive ranks"
        )


def exchange_inside(exchange: Exchange, failures: FailureDetector) -> Exchange | None:
    """Return an exchange among the ranks of this node, on a separate group; None if the node has one rank.

    Args:
        exchange: The job's exchange; all ranks of the node must call it.
        failures: The job's detector, which is informed of events on the node.
    """
    if exchange.inside is None:
        return None
    on_node = exchange.inside.ranks
    seconds = failures.timeout_seconds + BACKEND_MARGIN_SECONDS
    group = part_of(exchange.group, on_node, seconds)
    follow = failures.follow_among(on_node) if failures.orders_streams else None
    return Exchange(group, exchange.layout, FP32, failures.among(group, on_node), follow)
