"""Between two replicas that differ, what can be computed again says which one is right."""

import dataclasses

from torch import Tensor

import stretto as st
from stretto.errors import PeerFailed, ReplicasDiverged
from stretto.records import Incident
from stretto_lab.faults import Fault, FaultPlan, strike_memory
from stretto_lab.faults.injector import Injector
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.guards.watched import Job, same

STRUCK = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of one rank."""

    final: list[Tensor]
    incidents: list[Incident]
    error: Exception | None


def trained(guard: st.Guard, *faults: Fault) -> list[Seen]:
    """Train two ranks with a replicated optimizer."""

    def train(rank: int, group: VirtualGroup) -> Seen:
        injector = Injector(FaultPlan(faults), rank)
        job = Job(st.DDP(), rank, group=group, guards=(guard,))
        strike_memory(job.parallel, injector)
        incidents: list[Incident] = []
        error = None
        try:
            incidents = [incident for update in job.run() for incident in update.incidents]
        except (ReplicasDiverged, PeerFailed) as raised:
            error = raised
        return Seen(final=job.final(), incidents=incidents, error=error)

    return list(VirtualCluster(2).run(train).values)


CLEAN = trained(st.ReplicaGuard())[0].final
STEP = Fault(site="step", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word")
PUBLISHED = Fault(
    site="published values", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word"
)


def test_values_that_follow_from_masters_that_agree_are_told_apart_without_more() -> None:
    for seen in trained(st.ReplicaGuard(), PUBLISHED):
        (incident,) = seen.incidents
        assert (incident.site, incident.ranks, incident.action) == (
            "values to be shown",
            (STRUCK,),
            "copied from rank 0",
        )
        assert same(seen.final, CLEAN)


def test_masters_that_differ_between_two_ranks_end_the_job_with_an_error_that_says_what_would_help() -> None:
    error = trained(st.ReplicaGuard(), STEP)[0].error
    assert isinstance(error, ReplicasDiverged)
    assert "A third rank could tell, and AtRest() if nobody" in str(error)
