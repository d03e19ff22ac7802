"""Ranks that step alone meet at averages: what they agree on there, and what happens where they cannot."""

import dataclasses
import functools
from collections.abc import Callable

import torch

from stretto import DataParallel, LocalSGD, Options
from tests.exactness.jobs import Case, Observed, same, train_all
from tests.processes import rank_outcomes, run_ranks

UNEVEN = [
    Case(strategy=LocalSGD(rate=0.3), lengths=(9, 40), until=until, settle=False) for until in ("any", "all")
]
SKIPPING = Case(strategy=LocalSGD(rate=0.4), lengths=(31,), poisoned=(6,), options=Options(nonfinite="skip"))
BY_WIRE = [
    Case(strategy=LocalSGD(rate=0.4, state=True), options=Options(wire=wire)) for wire in ("int8", "bf16")
]


@functools.cache
def observed() -> list[list[Observed]]:
    """What two ranks saw of every case."""
    return run_ranks(2, train_all, [*UNEVEN, SKIPPING, *BY_WIRE])


def test_until_all_uses_every_batch_and_until_any_ends_at_the_next_average() -> None:
    some, everything = (one.updates for one in observed()[0][:2])
    assert sum(sum(update.micro_batches) for update in everything) == 9 + 40
    # Rank 0's last batch lies in update 3; at rate 0.3 the averages are those of updates 4, 7, 10, ...
    assert [(update.step, update.gap) for update in some] == [(1, 1), (2, 2), (3, 3), (4, 0)]
    assert sum(sum(update.micro_batches) for update in some) == 9 + 16


def test_a_round_that_is_left_out_is_left_out_on_its_rank_alone() -> None:
    first, second = (found[2].updates for found in observed())
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


def test_the_int8_wire_is_for_gradients_and_averages_travel_in_16_bits() -> None:
    for *_, narrow, wide in observed():
        assert same(narrow.final, wide.final)
