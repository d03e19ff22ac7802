"""The ranking of strategies and wires: the fastest whose cost in loss is known to be small."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from stretto.engine.options import Clock, Options
from stretto.errors import ConfigError
from stretto.exchange import check_nodes
from stretto.fields import check_at_least
from stretto.strategies import Average
from stretto.strategies.ledger import ledger_of
from stretto_lab.evidence import ALIKE, AVERAGES, EVIDENCE, SMALL, Evidence, of_wire_too
from stretto_lab.observe import Stages
from stretto_lab.plan.measure import WIRES, Machine, measure
from stretto_lab.plan.price import Price, price
from stretto_lab.train.arms import Arm, parse_arm
from stretto_lab.train.configuration import Job, TaskT
from stretto_lab.train.launch import Ranks
from stretto_lab.virtual import parse_network

RARE = {"local:rate=0.1": ("fp32", "int4"), **dict.fromkeys(AVERAGES, ("int4",))}
"""Strategies that send rarely, and the wires to price them on."""
UNEQUAL = 1.5
"""How many times as slow as the fastest rank the slowest must be before the ranking also tries a clock: times on a
shared machine vary by about as much."""
MOST_GROWTH = 4
"""Most micro-batches of a rank in a round by such a clock, as a multiple of the job's."""
_BASE = "zero1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(Job[TaskT]):
    """Which strategy and wire to use for a job: measured here, and priced for any ranks and network.

    A job with another wire than fp32, the default, keeps it, and only the strategy is chosen.
    """

    ranks: tuple[int, ...] = ()
    """Numbers of ranks to plan for, as 8,64,512, instead of the measuring ranks."""
    network: str | None = None
    """free, datacenter, ethernet, office, internet, or a link such as 100mbit,2ms: of every rank, or of every node if
    nodes have several ranks or shards; None is the measured link."""
    batches: int = 8
    """Micro-batches to time."""
    allow_loss: float = SMALL
    """Nats of held-out loss that the choice may cost, where measured: averages of replicas need 0.04 and more."""

    def __post_init__(self) -> None:
        Job.__post_init__(self)
        check_at_least(self, batches=1, allow_loss=0)
        if any(ranks < 1 for ranks in self.ranks):
            raise ConfigError(f"ranks={self.ranks}: expected at least 1")
        if self.wire not in WIRES:
            raise ConfigError(f"wire={self.wire!r}: stretto plan has prices only for {', '.join(WIRES)}")
        if self.changes is not None:
            raise ConfigError(
                f"changes={self.changes!r}: a plan prices one format for everything that a rank sends: remove "
                "the option, and set it together with the strategy that you choose"
            )
        if self.network is not None:
            parse_network(self.network)

    def machines(self, measured: Machine) -> list[Machine]:
        """Return the machines to plan for: as measured, but with the requested ranks, nodes and network.

        Raises:
            ConfigError: Ranks do not fill their nodes, or the link between nodes is unknown.
        """
        return [
            self._machine(measured, ranks).with_ranks(ranks // self.shard, self._slow(ranks))
            for ranks in self.ranks or (measured.ranks * self.shard,)
        ]

    def _slow(self, ranks: int) -> Mapping[int, float]:
        """Return slowness factors by rank; a node of shards is as slow as its slowest rank."""
        if outside := sorted(rank for rank in self.slow if not 0 <= rank < ranks):
            raise ConfigError(f"slow names rank {outside[0]}; the plan is for ranks 0 to {ranks - 1}")
        by_node: dict[int, float] = {}
        for rank, factor in self.slow.items():
            by_node[rank // self.shard] = max(factor, by_node.get(rank // self.shard, 1.0))
        return by_node

    def _machine(self, measured: Machine, ranks: int) -> Machine:
        link = measured.link if self.network is None else parse_network(self.network).link
        if self.shard > 1:
            if ranks % self.shard:
                raise ConfigError(
                    f"plan for {ranks} ranks with shard={self.shard}: expected a multiple of it"
                )
            rate = link.bits_per_second
            if self.network is not None and rate is not None:  # a node's, which its ranks share
                link = dataclasses.replace(link, bits_per_second=rate / self.shard)
            return dataclasses.replace(measured, link=link)
        each = self.ranks_per_node or measured.ranks_per_node
        if each == 1:
            return dataclasses.replace(measured, link=link)
        has_nodes = measured.ranks_per_node > 1
        inside = measured.inside if has_nodes else measured.link
        if ranks <= each:
            return dataclasses.replace(measured, ranks_per_node=1, link=inside)
        check_nodes(ranks, each)
        if not has_nodes and self.network is None:
            raise ConfigError(
                f"plan for {ranks} ranks with ranks_per_node={each}: the link between nodes was not measured: expected "
                "ranks on several nodes, or a network"
            )
        return dataclasses.replace(measured, ranks_per_node=each, link=link, inside=inside)


@dataclasses.dataclass(frozen=True, slots=True)
class Ranking:
    """The prices of all arms on one machine, the fastest arm first."""

    machine: Machine
    prices: tuple[Price, ...]
    bucket_bytes: int | None
    """Bucket size of the job."""
    micro_batches: int
    """Micro-batches of the job per rank and update; a clock chooses other numbers."""
    allow_loss: float = SMALL
    """Nats that the choice may cost."""

    @property
    def choice(self) -> Price:
        """The fastest arm that costs no more loss than allowed; among equally fast arms, the most exact."""
        exact = [one for one in self.prices if self.evidence_of(one.arm).price <= self.allow_loss]
        limit = exact[0].seconds_per_micro_batch * ALIKE
        return min(
            (one for one in exact if one.seconds_per_micro_batch <= limit),
            key=self._preference,
        )

    @property
    def base(self) -> Price:
        """The default strategy, which is exact."""
        return min(self.prices, key=self._preference)

    def growth(self, one: Price) -> float:
        """Return the size of an arm's batch as a multiple of the job's."""
        return one.micro_batches / self.micro_batches

    def evidence_of(self, arm: str) -> Evidence:
        """Return the measured cost of an arm on this machine."""
        return evidence_of(arm, self.machine)

    def _preference(self, one: Price) -> tuple[int, float, int, int]:
        """Return a sort key, smaller for more exact arms and, among equally exact arms, for fewer settings."""
        parsed = parse_arm(one.arm)
        of_average = self.evidence_of(one.arm).price if isinstance(parsed.strategy(), Average) else 0.0
        return (
            list(EVIDENCE).index(parsed.name),
            of_average,
            WIRES.index(parsed.wire),
            len(parsed.settings),
        )

    def why_not(self, other: Price) -> str:
        """Return in a word or two why an arm is not the choice."""
        choice, evidence = self.choice, self.evidence_of(other.arm)
        if other == choice:
            return "the choice"
        if evidence.price > self.allow_loss:
            return evidence.source if evidence.nats is None else f"{evidence.nats:+.2f} nats"
        if other.seconds_per_micro_batch <= ALIKE * choice.seconds_per_micro_batch:
            return "too close"
        return "waits" if other.exposed_seconds > (ALIKE - 1) * other.seconds else "computes more"


def rank_by_time(
    machine: Machine,
    *,
    micro_batches: int,
    bucket_bytes: int | None = None,
    allow_loss: float = SMALL,
    prices_all: bool = True,
    ranks_per_node: int | None = None,
    wire: str | None = None,
    clock: Clock | Literal["auto"] | None = "auto",
    stages: Stages | None = None,
) -> Ranking:
    """Return the ranking of strategies and wires on a machine, by the time to a number of samples.

    Args:
        machine: The measurements, perhaps with other ranks or another link.
        micro_batches: Per rank and update.
        bucket_bytes: Bucket size of the job; None is the default of its device and number of ranks.
        allow_loss: Nats of held-out loss that the choice may cost.
        prices_all: Whether to price also arms whose cost in loss is too high or unknown.
        ranks_per_node: As in the job's options; None tries one level too if the machine has nodes.
        wire: The only wire to consider; None considers all.
        clock: The clock for strategies that overlap; None uses fixed counts. "auto" uses fixed counts and, if ranks
            differ in speed, also tries a clock.
        stages: Shows how many arms are priced; None shows nothing.
    """
    stages = stages or Stages(is_shown=False)
    frequent = [arm for arm, evidence in EVIDENCE.items() if evidence.nats is not None]
    texts = [
        _on_wire(arm, one)
        for arm, wires in {**dict.fromkeys(frequent, WIRES), **RARE}.items()
        for one in (wires if wire is None else (wire,))
    ]
    by_node = "" if machine.ranks_per_node == 1 else f":ranks_per_node={machine.ranks_per_node}"
    if clock == "auto":
        is_unequal = machine.slowest >= UNEQUAL * min(machine.slowness, default=1.0)
        has_gain = is_unequal and machine.ranks_per_node == 1  # on nodes all ranks are priced alike
        clocks = [None, Clock(maximum=MOST_GROWTH * micro_batches)] if has_gain else [None]
    else:
        clocks = [clock]
    texts = [one for text in texts for one in _by_clocks(text, clocks)]
    if by_node:  # the ranks of a node as one replica: what averages cost grows with the number of replicas
        averages = [text.partition(":wire=") for text in texts if text.partition(":wire=")[0] in AVERAGES]
        texts += [f"{text}:worker=node{wire}{name}" for text, wire, name in averages]
    arms = [
        arm
        for text in texts
        if _fits(arm := parse_arm(text + by_node), micro_batches)
        and (prices_all or evidence_of(arm.text, machine).price <= allow_loss)
    ]
    priced = stages.through(f"pricing for {machine.ranks} ranks in virtual time", arms)
    prices = [price(arm, machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes) for arm in priced]
    if by_node and ranks_per_node is None:
        # What the second level is worth: there are few links on which another arm would win without it.
        chosen = Ranking(machine, _by_time(prices), bucket_bytes, micro_batches, allow_loss).choice
        one_level = [] if parse_arm(chosen.arm).is_by_node else [chosen.arm.removesuffix(by_node)]
        for text in dict.fromkeys((_on_wire(_BASE, wire or "fp32"), *one_level)):
            prices.append(
                price(parse_arm(text), machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes)
            )
    return Ranking(machine, _by_time(prices), bucket_bytes, micro_batches, allow_loss)


def _by_clocks(text: str, clocks: Sequence[Clock | None]) -> list[str]:
    """Return an arm with each of the clocks, if it overlaps; a clock of None means fixed counts."""
    if not parse_arm(text).overlaps:
        return [text]
    name, colon, settings = text.partition(":")
    return [
        text if one is None else f"{name}:clock={one.minimum},{one.maximum}{colon}{settings}"
        for one in clocks
    ]


def _on_wire(arm: str, wire: str) -> str:
    return arm if wire == "fp32" else f"{arm}:wire={wire}"


def _by_time(prices: Sequence[Price]) -> tuple[Price, ...]:
    return tuple(sorted(prices, key=lambda one: one.seconds_per_micro_batch))


def plan(job: PlanConfig[TaskT], ranks: Ranks, *, prices_all: bool = True) -> list[Ranking]:
    """Measure a job on all ranks, and return a ranking for each requested number of ranks.

    Args:
        job: The job to measure.
        ranks: The ranks that measure.
        prices_all: As in `rank_by_time`.

    Raises:
        WorkerFailed: A rank failed.
    """
    measured = ranks.call(measure, job, job.batches, job.ranks)[0]
    with Stages(is_shown=ranks.is_first) as stages:
        return [
            rank_by_time(
                machine,
                micro_batches=job.micro_batches,
                bucket_bytes=job.bucket_bytes,
                allow_loss=job.allow_loss,
                prices_all=prices_all,
                ranks_per_node=job.ranks_per_node,
                wire=None if job.wire == Options().wire else job.wire,
                # An echo plans over fixed counts.
                clock=job.clock or ("auto" if job.echo == "none" else None),
                stages=stages,
            )
            for machine in job.machines(measured)
        ]


def _fits(arm: Arm, micro_batches: int) -> bool:
    """Return whether every round of an update has a micro-batch."""
    return ledger_of(arm.strategy()).rounds <= micro_batches


def evidence_of(arm: str, machine: Machine) -> Evidence:
    """Return the measured cost of an arm on a machine."""
    parsed = parse_arm(arm)
    replicas = machine.ranks // (machine.ranks_per_node if parsed.is_by_node else 1)
    return of_wire_too(parsed.strategy(), parsed.wire, replicas)
