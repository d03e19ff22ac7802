"""The agreement on who goes on: one list for all, whoever has died, sleeps, is late or wants to come in."""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import DataParallel
from stretto.engine.watcher import _BEAT
from stretto.errors import ConfigError, LeftOut, PeerSilent
from stretto.groups import announce_death
from stretto.survive.generations import buddies, may_leave
from stretto.survive.keeping import updates_between
from stretto.survive.membership import Ended, Membership, _Missing, signs_of
from stretto.survive.survivor import survives
from stretto.survive.terms import Term, Wish
from stretto_lab.train.workers import host_store
from tests.draws import draws
from tests.errors.tiny import tiny_model
from tests.processes import Command, run_ranks

SILENT_SECONDS = 1.0
LATE_SECONDS = 3 * SILENT_SECONDS
BEATS_SECONDS = 0.2
TERMS = 3
PATIENCE_SECONDS = 2.5
"""Without a sign, in a course of several terms: on a busy machine signs are late."""
COMES_AFTER = {"comes": 0.0, "is late": 1.5 * PATIENCE_SECONDS, "sleeps": 3 * PATIENCE_SECONDS}
"""Seconds; who sleeps does so for longer than anybody is waited for."""


@dataclass(frozen=True)
class Case:
    """How the members of a term leave it, by seat, and who waits."""

    members: dict[int, str]
    """comes, is done, is late (gives signs meanwhile), has died (as somebody has written), sleeps."""
    waiting: tuple[int, ...]


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    seats = rng.sample(range(20), rng.randint(1, 6))
    ends = [rng.choice(["comes", "comes", "is done", "is late", "has died", "sleeps"]) for _ in seats]
    ends[rng.randrange(len(ends))] = "comes"
    waiting = tuple(range(30, 30 + rng.randint(0, 2)))
    return Case(dict(zip(seats, ends, strict=True)), waiting)


ABSENT = ("has died", "sleeps")


class Members:
    """The members of one case, on a store of their own."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.store = dist.PrefixStore("job", dist.HashStore())
        self.signs = dist.PrefixStore("signs", self.store)
        self.told: dict[int, tuple[int, ...]] = {}
        """What every member that comes is told."""
        self.expected = [*(seat for seat, end in case.members.items() if end not in ABSENT), *case.waiting]
        """Who should be in the next term."""
        for seat in case.waiting:
            dist.PrefixStore("membership", self.store).append("waiting", f"{seat} {seat}\n")
        for seat, end in case.members.items():
            if end == "has died":
                announce_death(self.store, seat, "killed")

    def agree(self) -> None:
        """Let them all come to an agreement."""
        on_threads(self._come, [one for one in self.case.members.items() if one[1] not in ABSENT])

    def _come(self, member: tuple[int, str]) -> None:
        seat, end = member
        seats = list(self.case.members)
        began = time.monotonic()
        while end == "is late" and time.monotonic() - began < LATE_SECONDS:
            self.signs.set(f"beat/{seats.index(seat)}", str(time.monotonic()))
            time.sleep(BEATS_SECONDS)
        membership = Membership(self.store, 0, 30, SILENT_SECONDS, seat)
        number, following = membership.following(Ended(4, seats, self.signs, (), end == "is done"))
        assert number == 5
        self.told[seat] = tuple(following)


def on_threads(call: Callable[[Any], None], values: Sequence[Any]) -> None:
    """Call it with every value, side by side."""
    with ThreadPoolExecutor(len(values)) as pool:
        list(pool.map(call, values))


def test_members_agree_on_one_list_of_all_that_live() -> None:
    cases = [Members(drawn(seed)) for seed in draws(24)]
    on_threads(Members.agree, cases)
    for members in cases:
        assert set(members.told.values()) == {tuple(members.expected)}, (members.case, members.told)
        assert {*members.told, *members.case.waiting} == set(members.expected), members.case


class Course:
    """Processes of one job through several terms, on a store of their own: each meets what its seed says."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.ranks = rng.randint(1, 4)
        self.late = rng.randint(0, 2)
        self.store = dist.PrefixStore("job", dist.HashStore())
        self.signs = [dist.PrefixStore(f"signs/{number}", self.store) for number in range(TERMS + 1)]
        self.seen: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        """Terms that each process was in, by seat, with their members."""
        self.fates: dict[tuple[int, int], str] = {}
        """By seat and term, how a process left it."""
        self.left_out: set[int] = set()

    def run(self) -> None:
        """Let all live, those that come after the start too."""
        on_threads(self._live, range(self.ranks + self.late))

    def fate(self, seat: int, number: int, seats: Sequence[int]) -> str:
        """What becomes of a member in a term; the first one always comes, so that somebody does."""
        ends = ["comes", "comes", "comes", "is late", "dies", "sleeps"]
        drawn = random.Random(f"{self.seed} {seat} {number}").choice(ends)
        return "comes" if seat == seats[0] else drawn

    def _live(self, seat: int) -> None:
        member = Membership(self.store, 0, self.ranks, PATIENCE_SECONDS, seat)
        try:
            number, seats = member.enter()
            while seats:
                self.seen.setdefault(seat, []).append((number, tuple(seats)))
                fate = self.fates[seat, number] = self.fate(seat, number, seats)
                if fate == "dies":
                    return member.died("killed")
                number, seats = self._next(member, number, seats, fate)
        except LeftOut:
            self.left_out.add(seat)

    def _next(
        self, member: Membership, number: int, seats: Sequence[int], fate: str
    ) -> tuple[int, Sequence[int]]:
        comes_at = time.monotonic() + COMES_AFTER[fate]
        while time.monotonic() < comes_at:
            if fate == "is late":
                self.signs[number].set(f"beat/{seats.index(member.seat)}", str(time.monotonic()))
            time.sleep(BEATS_SECONDS)
        return member.following(Ended(number, seats, self.signs[number], (), number == TERMS))


def test_members_agree_on_one_list_in_every_term_whoever_dies_sleeps_wakes_and_comes() -> None:
    courses = [Course(seed) for seed in draws(12)]
    on_threads(Course.run, courses)
    for course in courses:
        lists: dict[int, set[tuple[int, ...]]] = {}
        for terms in course.seen.values():
            for number, seats in terms:
                lists.setdefault(number, set()).add(seats)
        assert [found for found in lists.values() if len(found) != 1] == [], (course.seed, lists)
        assert sorted(lists) == list(range(TERMS + 1)), (course.seed, lists)
        by_number = {number: next(iter(found)) for number, found in lists.items()}
        for number in range(TERMS):
            stay = [seat for seat in by_number[number] if course.fates[seat, number] in ("comes", "is late")]
            following = by_number[number + 1]
            assert list(following[: len(stay)]) == stay, (course.seed, str(by_number), str(course.fates))
            come = set(following) - set(stay)  # once, and none that anybody has given up
            assert not come & {seat for before in range(number + 1) for seat in by_number[before]}, (
                course.seed
            )
        asleep = {seat for (seat, _), fate in course.fates.items() if fate == "sleeps"}
        never = set(range(course.ranks + course.late)) - course.seen.keys()
        assert course.left_out >= asleep - {seat for seat in by_number[TERMS]}, course.seed
        assert course.left_out <= asleep | never, course.seed


def test_a_job_has_ended_once_all_that_live_are_done() -> None:
    members = Members(Case({0: "is done", 3: "has died", 2: "is done", 1: "sleeps"}, (30,)))
    members.agree()
    assert members.told == {0: (), 2: ()}


def test_who_comes_too_late_is_left_out() -> None:
    store = dist.PrefixStore("job", dist.HashStore())
    early, late = (Membership(store, rank, 2, 0.2) for rank in range(2))
    assert early.following(Ended(0, [0, 1])) == (1, [0])
    with pytest.raises(
        LeftOut, match=r"seat 1: the other members continue without this process, as seats \[0\]"
    ):
        late.following(Ended(0, [0, 1]))


def test_one_that_came_in_and_was_lost_is_not_waited_for_again() -> None:
    store = dist.PrefixStore("job", dist.HashStore())
    first = Membership(store, 0, 1, 0.2)
    dist.PrefixStore("membership", store).append("waiting", "1 0\n2 0\n")
    announce_death(store, 2, "killed")
    assert first.following(Ended(0, [0])) == (1, [0, 1])
    assert first.following(Ended(1, [0, 1])) == (2, [0])
    assert first.following(Ended(2, [0])) == (3, [0])
    for _ in range(2):  # what it finds is told at the next question
        assert first.newcomers([0]) == []
        first._looking.join()


def test_a_process_started_again_has_a_seat_of_its_own() -> None:
    store = dist.PrefixStore("job", dist.HashStore())
    assert [Membership(store, rank, 2, 1.0).seat for rank in (1, 0, 1, 1, 0)] == [1, 0, 2, 3, 4]


def test_where_all_members_are_dead_nobody_waits_to_come_in() -> None:
    """Nobody supervises them: that they are dead is said by those that come in their places."""
    for has_begun in (False, True):
        store = dist.PrefixStore("job", dist.HashStore())
        members = [Membership(store, rank, 2, 0.2) for rank in range(2)]
        if has_begun:
            on_threads(lambda member: member.enter(), members)
        come = [Membership(store, rank, 2, 0.2) for rank in (1, 0)]
        for member in come:
            with pytest.raises(
                LeftOut, match=r"seat [23]: the job ended before this process could join: no member"
            ):
                member.enter()


class Comes(Membership):
    """A process that waits to come in, for which a second is a minute; whom it waits for gives signs for a while."""

    def __init__(self, store: dist.Store, signs_end_after: float) -> None:
        super().__init__(store, 1, 2, SILENT_SECONDS)
        self._signs, self._began, self._lasts = signs_of(store, 0, [0, 1]), self._now(), signs_end_after

    @property
    def waited(self) -> float:
        return self._now() - self._began

    def _now(self) -> float:
        return 60 * time.monotonic()

    def _pause(self) -> None:
        if self.waited < self._lasts:
            self._signs.set("beat/0", str(self.waited))
        super()._pause()


def test_where_no_member_gives_signs_any_longer_nobody_waits_to_come_in() -> None:
    """One is dead, as the process that comes in its place says; of the other one nobody has said it."""
    for signs_end_after in (1.0, 90.0):
        store = dist.PrefixStore("job", dist.HashStore())
        on_threads(lambda member: member.enter(), [Membership(store, rank, 2, 0.2) for rank in range(2)])
        come = Comes(store, signs_end_after)
        with pytest.raises(LeftOut, match="the job ended before this process could join: no member"):
            come.enter()
        assert come.waited > signs_end_after + 2 * SILENT_SECONDS


def survives_until_signs_are_read(rank: int) -> bool:
    store = dist.distributed_c10d._get_default_store()

    def train(term: Term) -> bool:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = DataParallel(model, optimizer, group=term.group)
        term.go_on(parallel)
        with parallel:
            parallel.backward(model(torch.ones(2, 4)).square().mean())
            signs = signs_of(dist.PrefixStore("survive", store.clone()), term.number, term.seats)
            signs.wait([f"beat/{other}" for other in range(2)], timedelta(seconds=30))
            parallel.finish()
        return True

    return survives(train, store=store, rank=rank, ranks=2)


def test_signs_of_a_term_are_where_its_job_gives_them() -> None:
    assert run_ranks(2, survives_until_signs_are_read) == [True, True]


def test_one_in_whose_place_another_has_come_is_left_out() -> None:
    store = dist.PrefixStore("job", dist.HashStore())
    first, second = (Membership(store, rank, 2, 30.0) for rank in range(2))
    Membership(store, 1, 2, 30.0)
    assert first.following(Ended(0, [0, 1])) == (1, [0])
    with pytest.raises(LeftOut, match="seat 1: "):
        second.following(Ended(0, [0, 1]))
    with pytest.raises(LeftOut, match="another process has replaced it"):
        second.following(Ended(1, [1]))


def is_enough(updates: int, keep: float, update: float, given: float, sent: float) -> bool:
    """Whether keeping a generation takes a hundredth of time and bytes, or would be rarer than every five minutes."""
    time_between, sent_between = updates * update * (1 + 1e-9), updates * sent * (1 + 1e-9)
    return (100 * keep <= time_between and (not sent or 100 * given <= sent_between)) or time_between >= 300


def test_generations_take_a_hundredth_of_time_and_bytes_unless_they_would_be_too_rare() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        keep, update, given, sent = (
            10 ** rng.uniform(*limits) for limits in [(-3, 1), (-3, 1), (3, 9), (3, 9)]
        )
        measured = keep, update, given, rng.choice([0.0, sent])
        found = updates_between(*measured)
        assert is_enough(found, *measured)
        assert found == 1 or not is_enough(found - 1, *measured)


def test_who_leaves_takes_no_share_along_and_all_that_wish_to_get_away() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        each = rng.choice([1, 1, 2, 3])
        machines = [str(node) for node in range(rng.randint(1, 4)) for _ in range(each)]
        here = list(range(len(machines)))
        wish = {rank for rank in here if rng.random() < 0.5}
        wished = {rank for rank in here if any(machines[other] == machines[rank] for other in wish)}
        rounds = 0
        while wish:
            of_here = [machines[rank] for rank in here]
            leaving = may_leave(of_here, [here.index(rank) for rank in sorted(wish)], together=True)
            stay = [rank for place, rank in enumerate(here) if place not in leaving]
            holders = [{here[place], here[to]} for place, to in enumerate(buddies(of_here))]
            assert not stay or all(pair & set(stay) for pair in holders)
            assert {here[place] for place in leaving} <= wished
            assert len(stay) < len(here)
            here, wish, rounds = stay, wish & set(stay), rounds + 1
        assert rounds <= 3


def test_a_copy_lies_on_another_machine_where_there_is_one_and_none_has_many() -> None:
    """Machines of any size in any order; of equal size node by node, as launchers number them; and those shuffled."""
    for seed in draws(300):
        rng = random.Random(seed)
        machines = [rng.choice("abcd") for _ in range(rng.randint(2, 24))]
        to = buddies(machines)
        assert [(rank, other) for rank, other in enumerate(to) if other == rank] == []
        if len(set(machines)) > 1:
            assert [(rank, other) for rank, other in enumerate(to) if machines[other] == machines[rank]] == []
        each = rng.randint(1, 6)
        alike = [name for name in "abcdef"[: rng.randint(2, 6)] for _ in range(each)]
        assert sorted(buddies(alike)) == list(range(len(alike)))
        rng.shuffle(alike)
        assert max(map(buddies(alike).count, range(len(alike)))) <= 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node=0: expected a divisor of the 4 ranks"),
        ({"ranks_per_node": 3}, "ranks_per_node=3: expected a divisor of the 4 ranks"),
        ({"leaves_at": signal.SIGTERM}, "leaves_at=.*SIGTERM.*: expected a list of signals"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anybody_is_met(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        survives(lambda _: None, store=dist.HashStore(), rank=0, ranks=4, **settings)


def test_a_job_that_is_not_over_the_terms_group_is_refused() -> None:
    def train(term: Term) -> None:
        model = tiny_model()
        term.go_on(DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    with pytest.raises(ConfigError, match=r"expected DataParallel\(\.\.\., group=term\.group\)"):
        survives(train, store=dist.HashStore(), rank=0, ranks=1)


def test_the_first_signal_asks_and_the_second_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        wish = Wish()
        with wish.at([signal.SIGUSR1]):
            signal.raise_signal(signal.SIGUSR1)
            assert (wish.is_asked, heard) == (True, [])
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def stopped_store() -> None:
    store = host_store("127.0.0.1", 0)
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    time.sleep(600)


def test_a_store_whose_host_is_stopped_hangs_nobody() -> None:
    with Command(function=stopped_store) as host:
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
        membership = Membership(store, 0, 2, 0.2)
        os.kill(host.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PeerSilent, match=r"the store of the members has not answered for 6 s"):
            membership.following(Ended(0, [0, 1]))
        assert time.monotonic() - began < 20


def test_time_in_which_this_process_could_not_look_is_no_silence_of_others() -> None:
    """A member whose connection is closed gives a sign every half second; looks are held up at random."""
    rng, store, clock = random.Random(0), dist.HashStore(), [0.0]
    for _ in range(200):
        missing = _Missing(Ended(0, [0, 1], store), 60.0, lambda: clock[0], 0.01)
        for _ in range(100):
            given = math.floor(2 * clock[0])
            held_up = rng.choice([0.0, 0.0, 0.0, rng.uniform(0, 0.2), rng.uniform(0.5, 20)])
            # A sign that was due while the store answered nobody may come right after this look.
            given -= rng.random() < 0.5 and held_up > 0.5
            clock[0] += 0.01 + held_up
            store.set(f"{_BEAT}/1", str(given))
            assert not missing.are_gone({0: [False, 1]}, {})
    silent = _Missing(Ended(0, [0, 1], store), 60.0, lambda: clock[0], 0.01)
    looks = 0
    while not silent.are_gone({0: [False, 1]}, {}):
        clock[0], looks = clock[0] + 0.01, looks + 1
    assert looks == pytest.approx(100, abs=1)


@pytest.mark.parametrize("look_seconds", [0.3, 2.0, 30.0])
def test_on_a_slow_store_a_silent_member_is_gone_as_soon_as_looks_can_tell(look_seconds: float) -> None:
    """Of the first time between two looks only a part counts: it may be a pause."""
    store, clock = dist.HashStore(), [0.0]
    silent = _Missing(Ended(0, [0, 1], store), 60.0, lambda: clock[0], 0.01)
    while not silent.are_gone({0: [False, 1]}, {}):
        clock[0] += look_seconds
    assert clock[0] <= 1.0 + 2 * look_seconds
