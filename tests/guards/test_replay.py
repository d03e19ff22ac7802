"""A round whose gradients were taken at damaged parameters is run again, and ends as if nothing had been."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.records import Incident, Update
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.guards.watched import STRATEGIES

RANKS, STRUCK = 2, 1
REPLAYED = "mended, this rank's micro-batches of the round replayed"
LEFT_OUT = "mended, this rank's gradients of the round left out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw."""

    final: list[Tensor]
    """Parameters and buffers."""
    losses: list[float]
    incidents: list[Incident]
    draw: float
    """The next number that the rank would have drawn."""


class Trainer:
    """Trains a model that drops out, counts batches and keeps running statistics."""

    def __init__(self, group: dist.ProcessGroup, **choices: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(5, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Dropout(0.3), nn.Linear(17, 2)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        settings = {"strategy": st.ACCO(), "micro_batches": 4, "guards": (st.AtRest(),), **choices}
        self.parallel = st.DataParallel(self.model, optimizer, group=group, **settings)
        torch.manual_seed(50 + group.rank())
        self._data = torch.Generator().manual_seed(500 + group.rank())
        self.updates: list[Update] = []

    def loss(self, batch: Tensor) -> tuple[Tensor, float, int]:
        """The loss of a batch, which weighs as many as it has rows."""
        return self.model(batch).square().mean(), float(len(batch)), len(batch)

    def micro_batch(self, index: int, *, replayable: bool = True) -> None:
        """Train on a batch of its own length."""
        batch = torch.randn(3 + index % 3, 5, generator=self._data)
        if replayable:
            update = self.parallel.micro_batch(self.loss, batch)
        else:
            loss, weight, samples = self.loss(batch)
            update = self.parallel.backward(loss, weight, samples)
        self.updates += [update] if update else []

    def end(self) -> Seen:
        """Finish, and say what came of it."""
        self.updates += self.parallel.finish()
        values = [*self.model.parameters(), *self.model.buffers()]
        return Seen(
            final=[value.detach().clone() for value in values],
            losses=[update.loss for update in self.updates],
            incidents=[incident for update in self.updates for incident in update.incidents],
            draw=float(torch.rand(())),
        )


def flip(parameter: Tensor) -> None:
    """Damage one element as faulty memory does: no version counter hears of it."""
    parameter.data.view(-1).view(torch.int32)[3] ^= 1 << 22


def trained(
    struck_before: int | None, *, path: str = "micro_batch", length: int = 14, **choices: Any
) -> tuple[Seen, ...]:
    """Train on all ranks; one parameter of one rank is damaged right before its micro-batch `struck_before`."""

    def program(rank: int, group: dist.ProcessGroup) -> Seen:
        trainer = Trainer(group, **choices)
        for index in range(length):
            if rank == STRUCK and index == struck_before:
                flip(next(trainer.model.parameters()))
            trainer.micro_batch(
                index, replayable=path == "micro_batch" or (path == "both" and index % 2 == 0)
            )
        return trainer.end()

    return VirtualCluster(RANKS).run(program).values


def equal(one: Seen, other: Seen) -> bool:
    """Whether parameters, buffers, losses and random draws are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one.final, other.final, strict=True)) and (
        (one.losses, one.draw) == (other.losses, other.draw)
    )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("struck_before", [5, 6])
def test_a_replayed_round_ends_as_the_clean_one(name: str, struck_before: int) -> None:
    strategy = STRATEGIES[name]
    clean, struck = trained(None, strategy=strategy), trained(struck_before, strategy=strategy)
    for one, other in zip(clean, struck, strict=True):
        assert one.incidents == []
        assert equal(one, other)
        ((action, ranks),) = {(incident.action, incident.ranks) for incident in other.incidents}
        assert (action, ranks) == (REPLAYED, (STRUCK,))


def test_a_round_that_the_clock_decided_is_replayed_too() -> None:
    choices = {"strategy": st.ACCO(), "micro_batches": st.Clock(minimum=1, maximum=3)}
    # The replay takes time, after which the clock decides anew: only the round itself can be compared.
    seen = trained(3, **choices)
    assert {incident.action for incident in seen[0].incidents} == {REPLAYED}
    assert seen[0].incidents == seen[1].incidents
    assert unequal(seen[0].final[:6], seen[1].final[:6]) == []


@pytest.mark.parametrize("path", ["backward", "both"])
def test_without_all_loss_functions_the_gradients_are_left_out_and_the_incident_says_so(path: str) -> None:
    clean, struck = trained(None, strategy=st.ZeRO1(), path=path), trained(5, strategy=st.ZeRO1(), path=path)
    assert {incident.action for incident in struck[0].incidents} == {LEFT_OUT}
    assert not equal(clean[0], struck[0])


def test_a_round_cut_short_by_the_end_is_replayed() -> None:
    clean, struck = (trained(at, strategy=st.ZeRO1(), length=6) for at in (None, 5))
    assert [(one, other) for one, other in zip(clean, struck, strict=True) if not equal(one, other)] == []
    assert {incident.action for incident in struck[0].incidents} == {REPLAYED}


def test_both_paths_train_the_same() -> None:
    ours, theirs = trained(None), trained(None, path="backward")
    assert [(one, other) for one, other in zip(ours, theirs, strict=True) if not equal(one, other)] == []


def test_weightless_passes_are_replayed() -> None:
    def program(rank: int, group: dist.ProcessGroup, *, strikes: bool) -> Seen:
        trainer = Trainer(group, strategy=st.ZeRO1())
        generator = torch.Generator().manual_seed(9 + rank)
        loader = [torch.randn(4, 5, generator=generator) for _ in range(8)]
        for index, batch in enumerate(trainer.parallel.feed(loader)):
            if strikes and rank == STRUCK and index == 7:
                flip(next(trainer.model.parameters()))
            weight = 1.0 if rank == 0 or index < 5 else 0.0
            update = trainer.parallel.micro_batch(trainer.loss, batch, weight)
            trainer.updates += [update] if update else []
        return trainer.end()

    clean, struck = (
        VirtualCluster(RANKS).run(lambda rank, group, s=s: program(rank, group, strikes=s)).values
        for s in (False, True)
    )
    assert [(one, other) for one, other in zip(clean, struck, strict=True) if not equal(one, other)] == []
    assert {incident.action for incident in struck[0].incidents} == {REPLAYED}


def test_an_error_in_the_loss_function_ends_the_job_with_its_cause() -> None:
    model = nn.Linear(2, 1)
    parallel = st.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), st.ZeRO1())

    def fails(batch: Tensor) -> Tensor:
        return batch / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        parallel.micro_batch(fails, torch.ones(1, 2))
    with pytest.raises(st.errors.Finished, match="ZeroDivisionError"):
        parallel.finish()
