"""Guards over shards: damage of one shard is a finding of its node, and all ranks of it do the same about it."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

from stretto import DDP, DataParallel, Options, ZeRO1
from stretto.errors import StrettoError
from stretto.groups.followed import FollowedWork
from stretto.records import Incident
from stretto_lab.faults import Fault, FaultPlan, Injector, strike_memory
from tests.draws import draws, part
from tests.processes import run_ranks
from tests.sharded.jobs import STRATEGIES, WORLD_SIZE, Case, Values, batch, loss_of, sharded, whole

JOBS = {one.name: Case(strategy=one, updates=5, guards="standard") for one in STRATEGIES}
JOBS["acco on int4"] = dataclasses.replace(JOBS["acco"], options=Options(bucket_bytes=512, wire="int4"))
IN_MEMORY = (
    "masters",
    "optimizer state",
    "reduced gradient",
    "values to be shown",
    "shown parameters",
    "frozen parameters",
    "buffers",
)
ON_THE_WIRE = ("contribution", "gathered values", "round report")
CASES_PER_JOB = len(draws(8, 2))


def drawn(name: str) -> list[Fault]:
    """Faults of one job: at random places and moments, on random ranks, each small enough to be mended."""
    rng = random.Random(name)
    sites = [*IN_MEMORY, *ON_THE_WIRE, *(["error memory"] if "int4" in name else [])]
    rng.shuffle(sites)
    return [
        Fault(
            site=site,
            rank=rng.randrange(WORLD_SIZE),
            instant=rng.randint(2, 4),
            extent=rng.choice(["element", "run"]),
            seed=rng.randrange(1000),
        )
        for site in sites[:CASES_PER_JOB]
    ]


def strike_wire(parallel: DataParallel, injector: Injector) -> None:
    """Damage what arrives from other nodes, and records from the same one."""

    def struck(collective: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(output: Any, own: Any, *others: Any) -> Any:
            site = "round report" if own.element_size() == 1 and own.dtype.is_signed else kind
            work = collective(output, own, *others)
            return FollowedWork(work, lambda: injector.offer(site, [output]))

        return call

    exchange, node_group = parallel.job.exchange, parallel.job.node_group
    exchange._all_to_all = struck(exchange._all_to_all, "contribution")
    exchange._all_gather = struck(exchange._all_gather, "gathered values")
    node_group.exchange._all_gather = struck(node_group.exchange._all_gather, "round report")


@dataclasses.dataclass
class Run:
    values: Values
    incidents: list[Incident]
    told: list[tuple[float, float]]
    strikes: int = 0

    def is_as(self, other: "Run") -> bool:
        same = all((value == other.values[name]).all() for name, value in self.values.items())
        return same and self.told == other.told


def trained(
    case: Case, rank: int, *faults: Fault, kept: bool = True, silent: tuple[int, int] = (-1, -1)
) -> Run:
    """Train under guards.

    Args:
        case: The job.
        rank: This one.
        faults: What strikes it.
        kept: Whether micro-batches come in a way in which they can be run again.
        silent: A node and a round in which it contributes nothing.
    """
    model, parallel = sharded(case, 2, 2)
    injector = Injector(FaultPlan(faults), rank)
    strike_memory(parallel, injector)
    strike_wire(parallel, injector)
    updates = []
    with parallel:
        for index in range(case.micro_batches * case.updates):
            weight = 0.0 if silent == (rank // 2, index // case.micro_batches) else 1.0
            if kept:
                updates.append(
                    parallel.micro_batch(
                        functools.partial(loss_of, model), batch(rank, index), weight, samples=1
                    )
                )
            else:
                updates.append(parallel.backward(loss_of(model, batch(rank, index)), weight, samples=1))
        updates += parallel.finish()
    committed = [one for one in updates if one is not None]
    found = [incident for one in committed for incident in one.incidents]
    strikes = sum(one.changed for one in injector.applications)
    return Run(
        whole(model),
        [*found, *parallel.late_incidents],
        [(one.loss, one.weight) for one in committed],
        strikes,
    )


def struck(rank: int, name: str) -> list[tuple[bool, int, list[Incident]]]:
    """Of every fault: whether the run ends as the undisturbed one, how often it struck here, and what was reported."""
    undisturbed = trained(JOBS[name], rank)
    assert not undisturbed.incidents
    found = []
    for fault in drawn(name):
        run = trained(JOBS[name], rank, fault)
        found.append((run.is_as(undisturbed), run.strikes, run.incidents))
    return found


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", JOBS)
def test_a_run_with_damage_of_one_shard_ends_as_the_undisturbed_one(name: str) -> None:
    by_rank = run_ranks(WORLD_SIZE, struck, name)
    total = 0
    for fault, outcomes in zip(drawn(name), zip(*by_rank, strict=True), strict=True):
        are_alike, strikes, incidents = zip(*outcomes, strict=True)
        assert all(are_alike), (fault, incidents[0])
        assert [one for one in incidents if one != incidents[0]] == [], fault
        assert bool(incidents[0]) == any(strikes), (fault, incidents[0])
        for incident in incidents[0]:
            assert fault.rank in (*incident.ranks, *(incident.link or ())), (fault, incident)
        total += sum(strikes)
    assert total >= CASES_PER_JOB // 2


DAMAGED = (3, 2)
"""Rank and round in which what it shows is damaged."""


def left_out(rank: int) -> dict[str, tuple[bool, list[Incident]]]:
    """Micro-batches cannot be run again."""
    damaged_rank, round_index = DAMAGED
    found = {}
    for strategy in part((DDP(), ZeRO1())):
        case = JOBS[strategy.name]
        instant = round_index * case.micro_batches
        fault = Fault(site="shown parameters", rank=damaged_rank, instant=instant, seed=5)
        expected = trained(case, rank, kept=False, silent=(damaged_rank // 2, round_index))
        run = trained(case, rank, fault, kept=False)
        found[strategy.name] = run.is_as(expected), run.incidents
    return found


def test_a_round_that_cannot_be_run_again_is_left_out_by_the_whole_node() -> None:
    for found in run_ranks(WORLD_SIZE, left_out):
        for name, (is_as_expected, incidents) in found.items():
            assert is_as_expected, name
            (incident,) = incidents
            assert incident.ranks == (DAMAGED[0],)
            assert "skipped" in incident.action


LARGE = {"width": 256, "options": Options(bucket_bytes=2**20)}
"""Tensors of more rows than a checksum has sums for: damage of all of them is beyond mending."""
BEYOND_MENDING: dict[str, tuple[Case, Fault, str]] = {
    "masters": (
        dataclasses.replace(JOBS["zero1"], **LARGE),
        Fault(site="masters", rank=1, instant=2, extent="all", seed=1),
        "StateCorrupt",
    ),
    "sums beside passes": (
        dataclasses.replace(JOBS["acco"], **LARGE),
        Fault(site="reduced gradient", rank=2, instant=3, extent="all", seed=2),
        "StateCorrupt",
    ),
    "a frozen layer": (
        dataclasses.replace(JOBS["acco"], **LARGE),
        Fault(site="frozen parameters", rank=3, instant=3, extent="all", seed=3),
        "StateCorrupt",
    ),
    "a link": (
        JOBS["zero1"],
        Fault(site="contribution", rank=2, instant=4, lasts="sticky", seed=4),
        "TransferCorrupt",
    ),
    "strikes": (
        dataclasses.replace(JOBS["zero1"], options=Options(bucket_bytes=512, strikes=2)),
        Fault(site="masters", rank=1, instant=1, lasts="sticky", seed=5),
        "Quarantined",
    ),
}


def ended(rank: int, name: str) -> str:
    case, fault, _ = BEYOND_MENDING[name]
    try:
        trained(case, rank, fault)
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return "nobody has noticed"


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", BEYOND_MENDING)
def test_damage_that_nobody_can_mend_ends_all_ranks_with_the_same_error(name: str) -> None:
    _, fault, kind = BEYOND_MENDING[name]
    for message in run_ranks(WORLD_SIZE, ended, name):
        assert kind in message, message
        assert f"rank {fault.rank}" in message, message
