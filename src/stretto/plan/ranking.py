"""Which strategy and wire to use: the fastest of those whose price in loss is known to be small."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from stretto.engine.options import Options
from stretto.errors import ConfigError
from stretto.exchange import check_nodes
from stretto.fields import check_at_least
from stretto.plan.measure import WIRES, Machine, measure
from stretto.plan.price import Price, price
from stretto.strategies.ledger import ledger_of
from stretto.train.arms import Arm, parse_arm
from stretto.train.configuration import Job, TaskT
from stretto.train.launch import Ranks
from stretto.virtual import parse_network


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """What a strategy costs in held-out loss, on the same samples as synchronous training."""

    nats: float | None
    """More of them; None where nothing is known."""
    source: str
    """Where that was measured; empty where it is exact, or rounds to 16 bits as everybody does."""


_FRONTIER = "benchmarks/results/2026-11-23-frontier"
_LEARNING = "benchmarks/results/2026-11-21-learning"
EVIDENCE: Mapping[str, Evidence] = MappingProxyType(
    {
        "zero1": Evidence(0.0, ""),
        "ddp": Evidence(0.0, ""),
        "acco": Evidence(0.013, _FRONTIER),
        "wp": Evidence(0.22, _LEARNING),
        "dpu": Evidence(0.60, _LEARNING),
        "local": Evidence(None, "replicas drift"),
        "diloco": Evidence(None, "replicas drift"),
    }
)
"""By strategy, in the order of preference where times are alike."""
OF_WIRES: Mapping[str, Evidence] = MappingProxyType(
    {
        "fp32": Evidence(0.0, ""),
        "bf16": Evidence(0.0, ""),
        "int8": Evidence(0.0, _FRONTIER),
        "int4": Evidence(0.010, _FRONTIER),
    }
)
"""By wire."""
SMALL = 0.02
"""Nats that hardly anybody would notice: about the spread between seeds in the measurements."""
ALIKE = 0.02
"""Share of the time below which two prices count as the same."""
RARE = ("local:rate=0.1", "local:rate=0.02", "diloco:interval=10:delay=1", "diloco:interval=50:delay=2")
"""Strategies that send now and then; a long delay learns worse than waiting for a slow link (docs/diloco.md)."""
COUNTS = (1, 2, 4, 8, 16)
"""Micro-batches per rank and update at which the choice is priced too."""
_BASE = "zero1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Job[TaskT]):
    """Which strategy and wire to use for a job: measured here, and priced for any ranks and network.

    A job with another wire than fp32, the default, keeps it, and only the strategy is chosen.
    """

    ranks: tuple[int, ...] = ()
    """Ranks to plan for, as 8,64,512, instead of those that measure."""
    network: str | None = None
    """free, datacenter, ethernet, office, internet, or a link such as 100mbit,2ms: of every rank, or where nodes have
    several ranks of every node; None is the link that was measured."""
    batches: int = 8
    """Micro-batches to time."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, batches=1)
        if any(ranks < 1 for ranks in self.ranks):
            raise ConfigError(f"ranks={self.ranks}: expected at least 1")
        if self.wire not in WIRES:
            raise ConfigError(f"wire={self.wire!r}: a plan knows the prices of {', '.join(WIRES)} alone")
        for name in ("changes", "estimates"):
            if (found := getattr(self, name)) is not None:
                raise ConfigError(
                    f"{name}={found!r}: a plan prices one format for all that is sent: leave it out, and set it beside "
                    "the strategy that you choose"
                )
        if self.network is not None:
            parse_network(self.network)

    def machines(self, measured: Machine) -> list[Machine]:
        """Return the machines to plan for: as measured, but with the ranks, nodes and network that were asked for.

        Raises:
            ConfigError: Ranks do not fill their nodes, or nobody knows the link between these.
        """
        return [self._machine(measured, ranks) for ranks in self.ranks or (measured.ranks,)]

    def _machine(self, measured: Machine, ranks: int) -> Machine:
        link = measured.link if self.network is None else parse_network(self.network).link
        each = self.ranks_per_node or measured.ranks_per_node
        if each == 1:
            return dataclasses.replace(measured, ranks=ranks, link=link)
        has_nodes = measured.ranks_per_node > 1
        inside = measured.inside if has_nodes else measured.link
        if ranks <= each:
            return dataclasses.replace(measured, ranks=ranks, ranks_per_node=1, link=inside)
        check_nodes(ranks, each)
        if not has_nodes and self.network is None:
            raise ConfigError(
                f"plan for {ranks} ranks with ranks_per_node={each}: the link between nodes was not measured: expected "
                "ranks on several nodes, or a network"
            )
        return dataclasses.replace(measured, ranks=ranks, ranks_per_node=each, link=link, inside=inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """The prices of all arms on one machine, the fastest first."""

    machine: Machine
    prices: tuple[Price, ...]
    bucket_bytes: int
    """Of the job."""

    @property
    def choice(self) -> Price:
        """The fastest arm that costs little in loss; of those that are alike, the most exact."""
        exact = [one for one in self.prices if _nats(one.arm) <= SMALL]
        limit = exact[0].seconds_per_micro_batch * (1 + ALIKE)
        return min(
            (one for one in exact if one.seconds_per_micro_batch <= limit),
            key=lambda one: _preference(one.arm),
        )

    @property
    def base(self) -> Price:
        """What is exact and what nobody has to choose: the default."""
        return min(self.prices, key=lambda one: _preference(one.arm))

    def by_count(self) -> list[Price]:
        """Price the choice at `COUNTS` micro-batches; what a larger batch does to the loss is not in it."""
        choice = parse_arm(self.choice.arm)
        return [self._choice_on(self.machine, count) for count in COUNTS if _fits(choice, count)]

    def echoed(self) -> Price | None:
        """Price the choice where batches are used again while the next one is read; None where the loader keeps up."""
        if self.machine.load_seconds <= (1 + ALIKE) * self.machine.micro_batch_seconds:
            return None
        return self._choice_on(dataclasses.replace(self.machine, load_seconds=0.0), self.choice.micro_batches)

    def _choice_on(self, machine: Machine, count: int) -> Price:
        choice = parse_arm(self.choice.arm)
        return price(choice, machine, micro_batches=count, bucket_bytes=self.bucket_bytes)

    def why_not(self, other: Price) -> str:
        """Return why an arm is not the choice, in a word or two."""
        choice, evidence = self.choice, evidence_of(other.arm)
        if other == choice:
            return "the choice"
        if _nats(other.arm) > SMALL:
            return evidence.source if evidence.nats is None else f"costs {evidence.nats:.2f} nats"
        slower = other.seconds_per_micro_batch / choice.seconds_per_micro_batch - 1
        if slower <= ALIKE:
            return "no faster"
        return "waits" if other.exposed_seconds > ALIKE * other.seconds else "computes more"


def rank_by_time(
    machine: Machine,
    *,
    micro_batches: int,
    bucket_bytes: int,
    most_nats: float = math.inf,
    ranks_per_node: int | None = None,
    wire: str | None = None,
) -> Ranking:
    """Return the ranking of strategies and wires on a machine, by the time to a number of samples.

    Args:
        machine: What was measured, perhaps with other ranks or another link.
        micro_batches: Per rank and update.
        bucket_bytes: Of the job.
        most_nats: Leave out strategies that cost more in held-out loss, and those whose cost is not known, unless this
            is infinite.
        ranks_per_node: That of the job's options; None looks at one level too where the machine has nodes.
        wire: The only one to look at; None looks at all.
    """
    frequent = [arm for arm in EVIDENCE if arm not in ("local", "diloco")]
    texts = [
        _on_wire(arm, one)
        for arms, wires in ((frequent, WIRES), (RARE, ("fp32", "int4")))
        for arm in arms
        for one in (wires if wire is None else (wire,))
    ]
    by_node = "" if machine.ranks_per_node == 1 else f":ranks_per_node={machine.ranks_per_node}"
    arms = [
        arm
        for text in texts
        if _fits(arm := parse_arm(text + by_node), micro_batches) and _nats(text) <= most_nats
    ]
    prices = [price(arm, machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes) for arm in arms]
    if by_node and ranks_per_node is None:
        # What the second level is worth: there are few links on which another arm would win without it.
        chosen = _ranked(machine, prices, bucket_bytes).choice.arm.removesuffix(by_node)
        for text in dict.fromkeys((_on_wire(_BASE, wire or "fp32"), chosen)):
            prices.append(
                price(parse_arm(text), machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes)
            )
    return _ranked(machine, prices, bucket_bytes)


def _on_wire(arm: str, wire: str) -> str:
    return arm if wire == "fp32" else f"{arm}:wire={wire}"


def _ranked(machine: Machine, prices: list[Price], bucket_bytes: int) -> Ranking:
    by_time = sorted(prices, key=lambda one: one.seconds_per_micro_batch)
    return Ranking(machine, tuple(by_time), bucket_bytes)


def plan(
    job: PlanConfig[TaskT], ranks: Ranks, log: Callable[[str], None], *, most_nats: float = math.inf
) -> list[Ranking]:
    """Measure a job on all ranks, and return a ranking for each number of ranks that is asked for.

    Args:
        job: What to measure and to plan for.
        ranks: The ranks that measure.
        log: Called with one line of text at a time.
        most_nats: Of `rank_by_time`.

    Raises:
        WorkerFailed: A rank failed.
    """
    log("measuring")
    measured = ranks.call(measure, job, job.batches)[0]
    log("pricing strategies and wires in virtual time")
    return [
        rank_by_time(
            machine,
            micro_batches=job.micro_batches,
            bucket_bytes=job.bucket_bytes,
            most_nats=most_nats,
            ranks_per_node=job.ranks_per_node,
            wire=None if job.wire == Options().wire else job.wire,
        )
        for machine in job.machines(measured)
    ]


def _fits(arm: Arm, micro_batches: int) -> bool:
    """Return whether there is a micro-batch for every round of an update."""
    return ledger_of(arm.strategy()).rounds <= micro_batches


def evidence_of(arm: str) -> Evidence:
    """Return what an arm costs: the larger of what its strategy and its wire cost.

    Together they cost no more, as far as was measured (`acco` on int4).
    """
    parsed = parse_arm(arm)
    return max(OF_WIRES[parsed.wire], EVIDENCE[parsed.name], key=_in_nats)


def _nats(arm: str) -> float:
    return _in_nats(evidence_of(arm))


def _in_nats(evidence: Evidence) -> float:
    return math.inf if evidence.nats is None else evidence.nats


def _preference(arm: str) -> tuple[int, int, int]:
    """Return how exact an arm is: the smaller, the more; of two that are as exact, the one with fewer settings."""
    parsed = parse_arm(arm)
    return list(EVIDENCE).index(parsed.name), WIRES.index(parsed.wire), len(parsed.settings)
