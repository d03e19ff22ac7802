"""Ranks that step alone meet at averages: what they agree on there, and what happens where they cannot."""

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from stretto import DataParallel, LocalSGD, Options
from tests.exactness.jobs import (
    Case,
    Observed,
    build_model,
    build_optimizer,
    mean_loss,
    same,
    stream,
    train_all,
)
from tests.exactness.matrix import CLIP_NORM
from tests.processes import rank_outcomes, run_ranks

UNEVEN = [
    Case(strategy=LocalSGD(rate=0.3), lengths=(9, 40), until=until, batch_norm=True, settle=False)
    for until in ("any", "all")
]
VARIED = [
    Case(strategy=LocalSGD(rate=0.4, state=True), branch="one rank", lengths=(31,)),
    Case(strategy=LocalSGD(rate=0.4, state=True), optimizer="sgd", branch="some", lengths=(31,)),
    Case(strategy=LocalSGD(rate=0.4), lengths=(31,), options=Options(bucket_bytes=4096, clip_norm=CLIP_NORM)),
    Case(strategy=LocalSGD(rate=0.4, state=True), lengths=(31,), options=Options(wire="bf16")),
    Case(strategy=LocalSGD(rate=0.4, state=True), lengths=(31,), dtype=torch.bfloat16),
    Case(
        strategy=LocalSGD(rate=0.4, state=True),
        lengths=(31,),
        dtype=torch.bfloat16,
        options=Options(wire="bf16", accumulate="parameter"),
    ),
    Case(
        strategy=LocalSGD(rate=0.4),
        lengths=(31,),
        poisoned=(6,),
        batch_norm=True,
        options=Options(nonfinite="skip"),
    ),
]
ALL = [*UNEVEN, *VARIED]


@functools.cache
def observed(world_size: int) -> list[list[Observed]]:
    return run_ranks(world_size, train_all, ALL)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("index", range(len(ALL)))
def test_ranks_end_together_and_equal(index: int, world_size: int) -> None:
    ranks = [found[index] for found in observed(world_size)]
    for one in ranks[1:]:
        assert same(one.final, ranks[0].final)
        assert same(one.final_statistics, ranks[0].final_statistics)
        ends = [[(u.step, u.gap) for u in found.updates] for found in (one, ranks[0])]
        # A rank whose data end first is told of the others' updates at their average, all at once.
        assert ends[0][-1] == ends[1][-1] if ALL[index] in UNEVEN else ends[0] == ends[1]
        assert [
            (a, b) for a, b in zip(one.committed, ranks[0].committed, strict=True) if not same(a, b)
        ] == []
        assert [
            (a, b) for a, b in zip(one.statistics, ranks[0].statistics, strict=True) if not same(a, b)
        ] == []
    assert [value for value in ranks[0].final if not value.isfinite().all()] == []


def test_until_all_uses_every_batch_and_until_any_ends_at_the_next_average() -> None:
    some, everything = (observed(2)[0][i].updates for i in range(2))
    assert sum(sum(update.micro_batches) for update in everything) == 9 + 40
    # Rank 0's last batch lies in update 3; at rate 0.3 the averages are those of updates 4, 7, 10, ...
    assert [(update.step, update.gap) for update in some] == [(1, 1), (2, 2), (3, 3), (4, 0)]
    assert sum(sum(update.micro_batches) for update in some) == 9 + 16


def test_a_round_that_is_left_out_is_left_out_on_its_rank_alone() -> None:
    index = ALL.index(VARIED[6])
    first, second = (found[index].updates for found in observed(2))
    assert [sum(u.skipped_rounds for u in updates) for updates in (first, second)] == [1, 0]


def test_a_narrow_wire_does_not_forget_small_changes() -> None:
    """Masters move by far less than a bf16 parameter resolves, and are averaged at every update."""
    finals = run_ranks(2, creep)
    for final in finals:
        # 50 steps of 1e-5 from 1.0, where bf16 resolves 2^-8: sent as parameters they would still be 1.0. What
        # has changed since the last average is one step, rounded to 2^-9 of itself.
        assert torch.allclose(final, torch.full_like(final, 1.0 - 50 * 1e-5), atol=50 * 1e-5 * 2**-8)


def creep(rank: int) -> torch.Tensor:
    model = torch.nn.Linear(64, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    options = Options(wire="bf16")
    parallel = DataParallel(model, optimizer, LocalSGD(rate=1), micro_batches=1, options=options)
    for _ in range(50):
        parallel.backward(model(torch.ones(1, 64)).sum())
    parallel.finish()
    return model.weight.detach()


def every_third(offset: int) -> Callable[[int], float]:
    def due(index: int) -> float:
        return 1.0 if index % 3 == offset else 0.0

    return due


def run(rank: int, strategy: LocalSGD, **changes: object) -> list[int]:
    case = dataclasses.replace(Case(strategy=strategy, lengths=(40,), settle=False), **changes)
    return [update.step for update in train_all(rank, [case])[0].updates]


def coins_differ(rank: int) -> list[int]:
    return run(rank, LocalSGD(rate=every_third(rank)))


def one_is_poisoned(rank: int) -> list[int]:
    return run(rank, LocalSGD(rate=0.1), lengths=(40, 40), poisoned=(9,))


def test_coins_that_differ_are_noticed_at_the_first_average() -> None:
    for outcome in rank_outcomes(2, coins_differ):
        assert outcome.error is not None
        assert "RanksDisagree" in outcome.error
        assert "rank 0 averages in round 0, rank 1 averages in round 1" in outcome.error


def test_a_rank_that_fails_alone_ends_the_job_on_all() -> None:
    healthy, poisoned = rank_outcomes(2, one_is_poisoned)
    assert "ReplicaNonFinite: rank 1, step 3, round 2: the loss is not finite on ranks [1]" in str(
        poisoned.error
    )
    assert "PeerFailed" in str(healthy.error)
    assert "ReplicaNonFinite" in str(healthy.error)


def send(rank: int, rate: float, wire: str, *, state: bool) -> tuple[int, int, list[int]]:
    case = Case(strategy=LocalSGD(rate=rate, state=state), options=Options(bucket_bytes=4096, wire=wire))
    model = build_model(case)
    parallel = DataParallel(model, build_optimizer(case, model.parameters()), case.strategy, options=case.options,
                            micro_batches=1)  # fmt: skip
    batches = stream(dataclasses.replace(case, lengths=(20,)), rank)
    sent = []
    for batch in batches:
        before = parallel.sent_bytes
        update = parallel.backward(mean_loss(model, batch))
        sent.append(parallel.sent_bytes - before if update else 0)
    start = parallel.sent_bytes - sum(sent)
    parallel.finish()
    return start, parallel.job.sharded.layout.numel, sent


def send_all(rank: int) -> list[tuple[int, int, list[int]]]:
    return [
        send(rank, rate, wire, state=state)
        for rate, wire, state in (
            (0.1, "bf16", False),
            (0.5, "bf16", False),
            (0.1, "fp32", False),
            (0.1, "bf16", True),
        )
    ]


def test_bytes_follow_the_rate_and_rounds_alone_send_nothing() -> None:
    for found in run_ranks(2, send_all):
        for (_, numel, sent), (averages, per_parameter) in zip(
            found, ((2, 4), (10, 4), (2, 8), (2, 4 + 2 * 8)), strict=True
        ):
            busy = [count for count in sent if count]
            assert len(busy) == averages
            # An all-reduce sends (N - 1) / N of the ledger's bytes; records come on top.
            assert [count for count in busy if not 0 <= count - per_parameter * numel // 2 < 2000] == []


def test_the_int8_wire_is_for_gradients_and_averages_travel_in_16_bits() -> None:
    strategy = LocalSGD(rate=0.4, state=True)
    cases = [Case(strategy=strategy, options=Options(wire=wire)) for wire in ("int8", "bf16")]
    for narrow, wide in run_ranks(2, train_all, cases):
        assert same(narrow.final, wide.final)
