"""Rounds are run again on other ranks: what was computed wrongly is found, named, and put right to the bit."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.errors import ConfigError, UsageError
from stretto.guards.sent_round import from_bytes, to_bytes
from stretto.guards.text import parse_guards
from stretto.randomness import coin
from stretto_lab.faults import Fault, FaultPlan, strike_memory
from stretto_lab.faults.injector import Injector
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.guards.watched import STRATEGIES, Seen, Trainer, apart
from tests.processes import run_ranks

UPDATES, STRUCK = 4, 1
ALWAYS = st.Audit(rate=1.0)
DAMAGE = Fault(
    site="gradient", rank=STRUCK, instant=3, extent="fraction", fraction=0.1, pattern="sign", seed=4
)


def trained(
    strategy: st.Strategy,
    guards: tuple[st.Guard, ...] = (),
    *,
    ranks: int = 2,
    fault: Fault | None = None,
    spoil: Callable[[int, Trainer], None] = lambda rank, trainer: None,
    lengths: dict[int, int] | None = None,
    **choices: Any,
) -> tuple[Seen, ...]:
    """Train on virtual ranks; return what each of them saw."""

    def program(rank: int, group: dist.ProcessGroup) -> Seen:
        trainer = Trainer(rank, group, strategy, guards=guards, **choices)
        spoil(rank, trainer)
        if fault is not None:
            strike_memory(trainer.parallel, Injector(FaultPlan((fault,)), rank))
        return trainer.run((lengths or {}).get(rank, 2 * UPDATES))

    return VirtualCluster(ranks).run(program).values


@functools.cache
def clean(name: str, ranks: int = 2) -> tuple[Seen, ...]:
    return trained(STRATEGIES[name], ranks=ranks)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in STRATEGIES), ("ddp", 1), ("acco", 1), ("zero1", 3), ("acco", 3)],
)
def test_audits_of_sound_ranks_change_nothing_and_say_nothing(name: str, ranks: int) -> None:
    found = trained(STRATEGIES[name], (ALWAYS,), ranks=ranks)
    assert apart(found, clean(name, ranks)) == []
    assert [seen.incidents for seen in found] == [[]] * ranks


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in STRATEGIES), ("ddp", 2), ("acco", 2)])
def test_a_damaged_gradient_is_missed_without_an_audit_and_put_right_with_one(name: str, ranks: int) -> None:
    missed = trained(STRATEGIES[name], (st.AtRest(),), ranks=ranks, fault=DAMAGE)
    assert apart(missed, clean(name, ranks)) != []
    assert missed[0].incidents == []
    found = trained(STRATEGIES[name], (ALWAYS,), ranks=ranks, fault=DAMAGE)
    assert apart(found, clean(name, ranks)) == []
    for (incident,) in [seen.incidents for seen in found]:
        assert (incident.guard, incident.site, incident.ranks) == ("audit", "gradient", (STRUCK,))
        assert incident.action == "taken again"
        assert incident.expected != incident.found


def wrong_from_the_start(rank: int, trainer: Trainer) -> None:
    """Let one rank compute every gradient a little wrong, whoever's micro-batch it is."""
    if rank == STRUCK:
        trainer.model[0].weight.register_hook(lambda gradient: gradient * 1.001)


def wrong_in_another_way_each_time(rank: int, trainer: Trainer) -> None:
    """Let one rank compute every gradient wrongly, and never the same."""
    if rank == STRUCK:
        unrepeatable(1.0)(rank, trainer)


def unrepeatable(size: float) -> Callable[[int, Trainer], None]:
    """Let kernels give other bits each time: a little more of the gradient, from a source that no state holds."""
    source = torch.Generator().manual_seed(9)

    def spoil(rank: int, trainer: Trainer) -> None:
        trainer.model[0].weight.register_hook(
            lambda gradient: gradient * (1 + size * float(torch.rand((), generator=source)))
        )

    return spoil


OUTVOTED = {"taken again", "kept: its audit was wrong"}


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("name", "ranks", "spoil", "actions"),
    [
        ("ddp", 3, wrong_from_the_start, OUTVOTED),
        ("acco", 3, wrong_from_the_start, OUTVOTED),
        # Who does not repeat itself is named also by a single other.
        ("zero1", 2, wrong_in_another_way_each_time, None),
        ("zero1", 3, wrong_in_another_way_each_time, None),
    ],
)
def test_a_rank_that_is_always_wrong_is_outvoted_and_named(
    name: str, ranks: int, spoil: Any, actions: set[str] | None
) -> None:
    found = trained(STRATEGIES[name], (ALWAYS,), ranks=ranks, spoil=spoil)
    assert apart(found, clean(name, ranks)) == []
    incidents = found[0].incidents
    assert {incident.ranks for incident in incidents} == {(STRUCK,)}
    assert actions in (None, {incident.action for incident in incidents})


def test_a_single_rank_takes_its_own_round_again() -> None:
    damage = Fault(site="gradient", rank=0, instant=3, pattern="sign", seed=4)
    found = trained(st.DDP(), (ALWAYS,), ranks=1, fault=damage)
    assert apart(found, clean("ddp", 1)) == []
    assert [incident.ranks for incident in found[0].incidents] == [(0,)]


def test_between_two_ranks_that_both_stand_by_their_gradient_nobody_is_named_alone() -> None:
    found = trained(st.DDP(), (ALWAYS,), ranks=2, spoil=wrong_from_the_start)
    incidents = found[0].incidents
    assert {incident.ranks for incident in incidents} == {(0, 1)}
    assert {incident.action for incident in incidents} == {"kept: no majority shows which rank is right"}


def test_as_many_rounds_are_audited_as_the_rate_says() -> None:
    audit = st.Audit(rate=0.1, seed=3)
    drawn = [audit.distance(index, 4) is not None for index in range(20_000)]
    assert drawn == [coin(3, "audit", index, 0.1) for index in range(20_000)]
    # Four standard deviations of a binomial count: 4 sqrt(20,000 x 0.1 x 0.9) = 170.
    assert abs(sum(drawn) - 2_000) < 170


def test_auditors_change_and_are_never_the_audited_rank() -> None:
    drawn = [ALWAYS.distance(index, 4) for index in range(50)]
    assert {distance for distance in drawn if distance is not None} == {1, 2, 3}


def test_a_faulty_rank_is_found_after_about_as_many_rounds_as_the_rate_says() -> None:
    audit = st.Audit(rate=0.25, seed=1)
    first = next(index for index in range(100) if audit.distance(index, 3) is not None)
    found = trained(st.DDP(), (audit,), ranks=3, spoil=wrong_from_the_start)
    assert found[0].incidents[0].step == first + 1
    assert 0 < first < UPDATES


@pytest.mark.parametrize("name", part(["ddp", "acco"]))
def test_ranks_whose_data_end_apart_are_audited_to_the_end(name: str) -> None:
    lengths = {0: 7, 1: 12, 2: 10}
    plain = trained(STRATEGIES[name], ranks=3, lengths=lengths)
    assert apart(trained(STRATEGIES[name], (ALWAYS,), ranks=3, lengths=lengths), plain) == []


def test_rounds_by_the_clock_are_audited() -> None:
    clock = st.Clock(minimum=1, maximum=4)
    found = trained(st.ACCO(), (ALWAYS,), ranks=3, micro_batches=clock, spoil=wrong_from_the_start)
    assert {incident.ranks for incident in found[0].incidents} == {(STRUCK,)}


def one_wrong_forward_pass(rank: int, trainer: Trainer) -> None:
    """Spoil what the third micro-batch of one rank gives, once."""
    again: list[int] = []

    def wrong(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if rank != STRUCK or trainer.index != 2 or again:
            return output
        again.append(trainer.index)
        return output + 0.5

    trainer.model[-1].register_forward_hook(wrong)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_forward_pass_that_went_wrong_leaves_no_trace_in_loss_or_statistics(name: str) -> None:
    assert trained(STRATEGIES[name], spoil=one_wrong_forward_pass)[0].losses != clean(name)[0].losses
    assert apart(trained(STRATEGIES[name], (ALWAYS,), spoil=one_wrong_forward_pass), clean(name)) == []


def test_a_round_that_another_guard_left_out_stays_left_out() -> None:
    """Its weight is zero: a gradient put back by an audit would be counted without it."""
    chunk = Fault(site="shown parameters", rank=STRUCK, instant=2, extent="all", pattern="sign", seed=4)
    wide = nn.Linear(5, 40_000)  # more than one row of sums: damaged beyond mending

    def with_rest(guards: tuple[st.Guard, ...]) -> tuple[Seen, ...]:
        def program(rank: int, group: dist.ProcessGroup) -> Seen:
            torch.manual_seed(5)
            trainer = Trainer.__new__(Trainer)
            trainer.model = nn.Sequential(nn.Linear(*wide.weight.T.shape), nn.Tanh(), nn.Linear(40_000, 1))
            optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
            trainer.parallel = st.DataParallel(
                trainer.model, optimizer, st.ZeRO1(), micro_batches=2, group=group, guards=guards
            )
            trainer._data, trainer.updates = torch.Generator().manual_seed(rank), []
            strike_memory(trainer.parallel, Injector(FaultPlan((chunk,)), rank))
            return trainer.run(8)

        return VirtualCluster(3).run(program).values

    plain, audited = with_rest((st.AtRest(),)), with_rest((st.AtRest(), ALWAYS))
    assert apart(audited, plain) == []
    assert audited[0].incidents == plain[0].incidents
    assert {"skipped" in incident.action for incident in plain[0].incidents} == {True}


def test_an_audit_after_a_replay_finds_nothing_left_to_say() -> None:
    word = Fault(site="shown parameters", rank=STRUCK, instant=2, pattern="flip", bits=3, seed=4)
    for name in STRATEGIES:
        found = trained(STRATEGIES[name], (st.AtRest(), ALWAYS), fault=word)
        assert apart(found, clean(name)) == []
        assert {incident.guard for incident in found[0].incidents} == {"rest"}


@pytest.mark.parametrize("name", ["dpu", "acco"])
def test_a_round_that_is_replayed_while_ranks_drain_is_audited_once(name: str) -> None:
    word = Fault(site="shown parameters", rank=STRUCK, instant=6, pattern="flip", bits=3, seed=4)
    lengths = {0: 9, STRUCK: 7}  # struck in the middle of a round of three
    plain = trained(STRATEGIES[name], lengths=lengths, micro_batches=6)
    found = trained(STRATEGIES[name], (st.AtRest(), ALWAYS), fault=word, lengths=lengths, micro_batches=6)
    assert apart(found, plain) == []


def test_a_batch_travels_without_what_it_is_a_view_of() -> None:
    everything = torch.zeros(100_000, 5)
    trainer = Trainer(0, None, st.DDP(), guards=(ALWAYS,))
    trainer.parallel.micro_batch(trainer.loss, everything[3:6])
    kept = trainer.parallel.job.model.listeners[0].kept
    assert len(to_bytes(kept)) < 50_000
    again = from_bytes(to_bytes(kept), kept).micro_batches[0].batch
    assert torch.equal(again, everything[3:6])


def test_a_batch_that_cannot_travel_is_an_error_that_says_so() -> None:
    def program(rank: int, group: dist.ProcessGroup) -> None:
        trainer = Trainer(rank, group, st.DDP(), guards=(ALWAYS,))
        batch = (torch.ones(3, 5), lambda: None)
        for _ in range(2):
            trainer.parallel.micro_batch(lambda batch: trainer.loss(batch[0]), batch)

    with pytest.raises(UsageError, match=r"the batch cannot be written .*: expected numbers, text, lists"):
        VirtualCluster(2).run(program)


def test_where_nothing_repeats_values_are_compared_within_the_tolerance_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match="kernels are not deterministic"):
        found = trained(st.DDP(), (ALWAYS,), spoil=unrepeatable(1e-6))
    assert found[0].incidents == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apart = trained(st.DDP(), (ALWAYS,), spoil=unrepeatable(0.5))
    assert {incident.ranks for incident in apart[0].incidents} == {(0, 1)}


def test_micro_batches_that_cannot_be_run_again_are_an_error_at_once() -> None:
    trainer = Trainer(0, None, st.DDP(), guards=(ALWAYS,))
    with pytest.raises(UsageError, match=r"guard audit .* expected parallel.micro_batch"):
        trainer.parallel.backward(trainer.model(torch.ones(3, 5)).mean())


def test_guards_are_read_from_the_command_line() -> None:
    assert parse_guards(["audit:rate=0.02:seed=1", "rest"]) == (st.Audit(rate=0.02, seed=1), st.AtRest())
    for text in ("audits", "audit:share=1", "rest:rate=1"):
        with pytest.raises(ConfigError, match="there are"):
            parse_guards([text])
    with pytest.raises(ConfigError, match="cannot read rate='much'"):
        parse_guards(["audit:rate=much"])


def on_sockets(rank: int) -> dict[str, Seen]:
    """Train on a real group: clean, and with a damaged gradient."""
    found = {}
    for kind, fault in {"clean": None, "struck": DAMAGE}.items():
        trainer = Trainer(
            rank, None, st.ACCO(), guards=(ALWAYS,), options=st.Options(bucket_bytes=512, verified=True)
        )
        if fault is not None:
            strike_memory(trainer.parallel, Injector(FaultPlan((fault,)), rank))
        found[kind] = trainer.run()
    return found


def test_audits_work_over_sockets() -> None:
    for found in run_ranks(2, on_sockets):
        assert apart([found["struck"]], [found["clean"]]) == []
        assert found["clean"].incidents == []
        assert [incident.ranks for incident in found["struck"].incidents] == [(STRUCK,)]
