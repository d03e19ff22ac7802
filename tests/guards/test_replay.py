"""A round whose gradients were taken at damaged parameters is run again, and ends as if nothing had been."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.guards.watched import STRATEGIES, Seen, Trainer, apart

RANKS, STRUCK = 2, 1
REPLAYED = "mended, this rank's micro-batches of the round replayed"
LEFT_OUT = "mended, this rank's gradients of the round skipped"


def flip(parameter: Tensor) -> None:
    """Damage one element as faulty memory does: no version counter hears of it."""
    parameter.data.view(-1).view(torch.int32)[3] ^= 1 << 22


def trained(
    struck_before: int | None,
    strategy: st.Strategy,
    *,
    path: str = "micro_batch",
    length: int = 14,
    weightless_from: int = 99,
    micro_batches: int | st.Clock = 4,
) -> tuple[Seen, ...]:
    """Train on all ranks; one parameter of one rank is damaged right before its micro-batch `struck_before`."""

    def program(rank: int, group: dist.ProcessGroup) -> Seen:
        trainer = Trainer(rank, group, strategy, micro_batches=micro_batches, guards=(st.AtRest(),))
        for index in range(length):
            if rank == STRUCK and index == struck_before:
                flip(next(trainer.model.parameters()))
            replayable = path == "micro_batch" or (path == "both" and index % 2 == 0)
            is_weightless = rank == STRUCK and index >= weightless_from
            trainer.micro_batch(index, replayable=replayable, weight=0.0 if is_weightless else None)
        return trainer.end()

    return VirtualCluster(RANKS).run(program).values


@pytest.mark.parametrize(
    ("strategy", "struck_before", "choices"),
    [
        *((strategy, 6, {}) for strategy in STRATEGIES.values()),
        (st.ZeRO1(), 5, {"length": 6}),  # cut short by the end
        (st.ZeRO1(), 7, {"length": 8, "weightless_from": 5}),
    ],
)
def test_a_replayed_round_ends_as_the_clean_one(
    strategy: st.Strategy, struck_before: int, choices: dict[str, Any]
) -> None:
    clean, struck = (trained(at, strategy, **choices) for at in (None, struck_before))
    assert apart(struck, clean) == []
    assert clean[0].incidents == []
    for seen in struck:
        assert {(one.action, one.ranks) for one in seen.incidents} == {(REPLAYED, (STRUCK,))}


def test_a_round_that_the_clock_decided_is_replayed_too() -> None:
    # The replay takes time, after which the clock decides anew: only the round itself can be compared.
    seen = trained(3, st.ACCO(), micro_batches=st.Clock(minimum=1, maximum=3))
    assert {incident.action for incident in seen[0].incidents} == {REPLAYED}
    assert seen[0].incidents == seen[1].incidents
    assert unequal(seen[0].final[:6], seen[1].final[:6]) == []


@pytest.mark.parametrize("path", ["backward", "both"])
def test_without_all_loss_functions_the_gradients_are_left_out_and_the_incident_says_so(path: str) -> None:
    clean, struck = (trained(at, st.ZeRO1(), path=path) for at in (None, 5))
    assert {incident.action for incident in struck[0].incidents} == {LEFT_OUT}
    assert apart(struck, clean) != []


def test_both_paths_train_the_same() -> None:
    assert apart(trained(None, st.ACCO()), trained(None, st.ACCO(), path="backward")) == []


def test_an_error_in_the_loss_function_ends_the_job_with_its_cause() -> None:
    model = nn.Linear(2, 1)
    parallel = st.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), st.ZeRO1())

    def fails(batch: Tensor) -> Tensor:
        return batch / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        parallel.micro_batch(fails, torch.ones(1, 2))
    with pytest.raises(st.errors.Finished, match="ZeroDivisionError"):
        parallel.finish()
