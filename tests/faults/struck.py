"""One job after the other on the same ranks, each with its own fault, and what became of it."""

import dataclasses
from typing import Any

from torch import Tensor
from torch import distributed as dist

import stretto as st
from stretto.errors import CorruptionError, PeerFailed
from stretto.faults import Application, Fault, FaultPlan, FaultyGroup, register_faulty, strike_memory
from stretto.guards import GUARDS
from stretto.records import Incident
from stretto.strategies.ledger import ledger_of
from tests.guards.watched import STRATEGIES, Job, same

WIDTH = 9000
"""90,003 parameters in three buckets, a third of which fills more than one row of sums: it can be damaged beyond
mending."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job with one fault."""

    strategy: str
    fault: Fault | None
    guarded: bool = True
    audited: bool = False
    """Whether every round is audited, instead of none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw."""

    applications: list[Application]
    incidents: list[Incident]
    final: list[Tensor] | None
    error: str | None
    """Class and message."""


def run(rank: int, case: Case) -> Outcome:
    """Run one case on this rank."""
    register_faulty(FaultPlan(() if case.fault is None else (case.fault,)))
    group = dist.new_group(backend="faulty")
    assert isinstance(group, FaultyGroup)
    strategy = STRATEGIES[case.strategy]
    kinds = [kind for kind in GUARDS.values() if ledger_of(strategy).replicated or not kind.needs_replicas]
    guards = [kind() for kind in kinds if kind is not st.Audit]
    if case.audited:
        guards.append(st.Audit(rate=1.0))
    choices: dict[str, Any] = {"guards": guards} if case.guarded else {}
    options = st.Options(bucket_bytes=2**17, verified=case.guarded)
    incidents: list[Incident] = []
    error, job = None, None
    try:
        job = Job(strategy, rank, width=WIDTH, group=group, options=options, **choices)
        strike_memory(job.parallel, group.injector)
        incidents = [incident for update in job.run() for incident in update.incidents]
    except (CorruptionError, PeerFailed) as raised:
        error = f"{type(raised).__name__}: {raised}"
    final = job.final() if job is not None and error is None else None
    dist.barrier()
    return Outcome(applications=group.injector.applications, incidents=incidents, final=final, error=error)


def run_all(rank: int, cases: list[Case]) -> list[Outcome]:
    """Run one case after the other."""
    return [run(rank, case) for case in cases]


def equal(left: Outcome, right: Outcome) -> bool:
    """Whether two jobs ended with the same bits."""
    return left.final is not None and right.final is not None and same(left.final, right.final)
