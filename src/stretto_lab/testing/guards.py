"""The kit for guards: they report nothing in a clean run, and keep their promises when something is damaged."""

import dataclasses
import functools
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

from stretto.engine import Options
from stretto.errors import ConformanceFailed
from stretto.guards import Guard
from stretto.strategies import ACCO, DDP, DPU, Strategy, WeightPrediction, ZeRO1
from stretto_lab.testing.conformance import (
    Conformance,
    Program,
    expect,
    expect_nothing,
    expect_nothing_on_ranks,
)
from stretto_lab.testing.jobs import Course, Damage, Job, different_courses, saved_and_resumed, train
from stretto_lab.virtual import VirtualCluster


class GuardConformance(Conformance):
    """Checks a guard, or several that belong together, in small jobs of every strategy they claim.

        class TestMyGuard(GuardConformance):
            promises = (Damage(site="masters"), Damage(site="masters", words=50, outcome="ends the job"))
            def make_guards(self):
                return (MyGuard(),)

    The jobs run on a virtual cluster, where ranks that ask for different collectives are an error at once.
    """

    promises: ClassVar[Sequence[Damage]]
    """What the guards claim to notice, and what they claim to do about it."""
    strategies: ClassVar[Sequence[Strategy]] = (DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO())
    """With which strategies they claim to work."""
    world_sizes: ClassVar[Sequence[int]] = (3,)
    """On how many ranks the jobs run."""
    options: ClassVar[Options] = Options(bucket_bytes=512)
    """Of the jobs."""
    updates_to_notice: ClassVar[int] = 1
    """How many updates after the damage the incident has to come."""

    def make_guards(self) -> tuple[Guard, ...]:
        """Return the guards, with the same options every time."""
        raise NotImplementedError("a kit for guards needs make_guards()")

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        """Run `program(rank, group)` on `world_size` ranks, by default virtual ones; return the results in order."""
        return VirtualCluster(world_size).run(program).values

    def test_options_decide_alone(self) -> None:
        """Guards of equal options are equal, also after they have been pickled: nothing is remembered in them."""
        guards = self.make_guards()
        expect("guards made again", repr(guards), repr(self.make_guards()))
        expect("guards pickled and read again", guards, pickle.loads(pickle.dumps(guards)))

    def test_a_clean_run_raises_no_alarm(self) -> None:
        """No incident, with any strategy and on any number of ranks."""
        for job, world_size in self._jobs():
            for rank, course in enumerate(self._train(job, world_size)):
                what = f"incidents of a clean run of {job.strategy.name}, rank {rank} of {world_size}"
                expect(what, [], _texts(course.incidents))

    def test_a_clean_run_is_the_same_to_the_bit(self) -> None:
        """Parameters shown and committed, buffers, records: as without guards."""
        for job, world_size in self._jobs():
            unguarded = self._train(dataclasses.replace(job, guards=()), world_size)
            for rank, course in enumerate(self._train(job, world_size)):
                what = f"{job.strategy.name} with guards, rank {rank} of {world_size}"
                expect_nothing(different_courses(what, unguarded[rank], course))

    def test_damage_that_is_planted_does_harm_without_guards(self) -> None:
        """Planted damage changes an unguarded run; otherwise the other checks would prove nothing."""
        for job, world_size, damage in self._struck():
            unguarded = dataclasses.replace(job, guards=(), damage=None)
            clean = self._train(unguarded, world_size)
            harmed = self._train(dataclasses.replace(unguarded, damage=damage), world_size)
            rank = damage.rank % world_size
            if not different_courses("", clean[rank], harmed[rank]):
                raise ConformanceFailed(
                    f"{damage} in {job.strategy.name} on {world_size} ranks: expected another run, found the clean one"
                )

    def test_damage_is_noticed_and_named(self) -> None:
        """An incident comes in time and names the site and the rank; no other rank is suspected."""
        for job, world_size, damage in self._struck():
            if damage.outcome == "ends the job":
                continue
            rank, latest = damage.rank % world_size, damage.behind + self.updates_to_notice
            incidents = self._train(job, world_size)[0].incidents
            where = f"{job.strategy.name}, rank {rank} of {world_size}"
            what = f"{damage.site} damaged after update {damage.behind}, {where}"
            sites = {incident.site for incident in incidents if damage.behind < incident.step <= latest}
            if damage.site not in sites:
                raise ConformanceFailed(
                    f"{what}: expected an incident on it by update {latest}, found {_texts(incidents) or 'none'}"
                )
            expect(
                f"{what}: ranks named",
                {rank},
                {suspect for incident in incidents for suspect in incident.ranks},
            )

    def test_repaired_runs_end_as_clean_ones(self) -> None:
        """To the bit, on every rank, where repair is promised."""
        for job, world_size, damage in self._struck():
            if damage.outcome != "repaired":
                continue
            clean = self._train(dataclasses.replace(job, guards=(), damage=None), world_size)
            for rank, course in enumerate(self._train(job, world_size)):
                what = f"{damage.site} repaired in {job.strategy.name}, rank {rank} of {world_size}"
                expected = clean[rank]
                if damage.site == "shown parameters":  # until it is noticed, the damage itself is shown
                    expected, course = (dataclasses.replace(c, shown=[]) for c in (expected, course))
                expect_nothing(different_courses(what, expected, course))

    def test_what_cannot_be_repaired_ends_the_job(self) -> None:
        """With an error, where that is promised, and not with wrong numbers."""
        for job, world_size, damage in self._struck():
            if damage.outcome != "ends the job":
                continue
            for rank, course in enumerate(self._train(job, world_size)):
                if course.ended_by is None:
                    raise ConformanceFailed(
                        f"{damage} in {job.strategy.name}, rank {rank} of {world_size}: expected an error that "
                        "ends the job, found that it went on"
                    )

    def test_every_rank_holds_the_same_incidents(self) -> None:
        """Every rank reports every incident, whichever rank found it."""
        for job, world_size, damage in self._struck():
            first, *others = self._train(job, world_size)
            for rank, course in enumerate(others, start=1):
                what = f"incidents on {damage.site} in {job.strategy.name}, rank {rank} of {world_size}"
                expect(what, _texts(first.incidents), _texts(course.incidents))

    def test_guarded_runs_are_resumed_to_the_bit(self) -> None:
        """Saved after every update and resumed there, without an alarm about what came from the checkpoint."""
        for job, world_size in self._jobs():
            with tempfile.TemporaryDirectory() as directory:
                program = functools.partial(saved_and_resumed, job, directory)
                expect_nothing_on_ranks(self.run_ranks(world_size, program))

    def _jobs(self) -> list[tuple[Job, int]]:
        guards = self.make_guards()
        return [
            (Job(strategy=strategy, micro_batches=2, guards=guards, options=self.options), world_size)
            for strategy in self.strategies
            for world_size in self.world_sizes
        ]

    def _struck(self) -> list[tuple[Job, int, Damage]]:
        return [
            (dataclasses.replace(job, damage=damage), world_size, damage)
            for job, world_size in self._jobs()
            for damage in self.promises
        ]

    def _train(self, job: Job, world_size: int) -> Sequence[Course]:
        return self.run_ranks(world_size, functools.partial(train, job))


def _texts(incidents: Sequence[object]) -> list[str]:
    return [str(incident) for incident in incidents]
