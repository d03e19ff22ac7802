"""Checkpoints that lack what later releases have added go on to the bit as those that have it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stretto as st
from stretto import checkpoint
from stretto.averaging import at_rest
from stretto.averaging.drifting import DriftingReplica
from stretto.averaging.outer import Fragment
from stretto.continuation import Continuation
from stretto_lab.virtual import VirtualCluster, VirtualGroup

STRATEGIES = [
    st.DPU(),
    st.WeightPrediction(),
    st.ACCO(),
    st.DiLoCo(interval=3),
    st.DiLoCo(interval=4, fragments=2, delay=1),
    st.PAFTDyn(),
]
SAVED, UPDATES = 6, 12


def without_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write as the first releases did: without samples at their first use, trips, and the noise that was seen."""
    describe, fragment, drifting = Continuation._describe, Fragment.state_dict, DriftingReplica.state_dict
    packed = at_rest._packed

    def described(self: Continuation, reduction: Any) -> dict[str, Any]:
        found = describe(self, reduction)
        for record in found["records"]:
            del record["fresh_samples"]
        return found

    def of_trip(trip: Any) -> dict[str, Any]:
        found = packed(trip)
        now = trip.report.records.dtype
        first = np.dtype([(name, now[name]) for name in now.names if name != "fresh_samples"])
        records = np.zeros(len(trip.report.records), first)
        for name in first.names or ():
            records[name] = trip.report.records[name]
        return {**found, "report": [record.tobytes() for record in records]}

    def of_drifting(self: DriftingReplica) -> dict[str, Any]:
        found = drifting(self)
        del found["counts"]["probe"]
        return found

    monkeypatch.setattr(Continuation, "_describe", described)
    monkeypatch.setattr(at_rest, "_packed", of_trip)
    monkeypatch.setattr(
        Fragment,
        "state_dict",
        lambda self: {name: one for name, one in fragment(self).items() if name != "trips"},
    )
    monkeypatch.setattr(DriftingReplica, "state_dict", of_drifting)


def trained(strategy: st.Strategy, path: Path, *, saves: bool) -> list[list[bytes]]:
    """Train on three ranks, from the beginning or from the checkpoint; return parameters."""

    def program(rank: int, group: VirtualGroup) -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parallel = st.DataParallel(model, optimizer, strategy, micro_batches=2, group=group)

        def on_update(update: st.Update) -> None:
            if saves and update.step == SAVED:
                checkpoint.save(parallel, path)

        with parallel:
            if not saves:
                checkpoint.load(parallel, path)
            draws = torch.Generator().manual_seed(rank + parallel.steps)
            batches = iter(lambda: torch.randn(4, 6, generator=draws), None)
            for batch in parallel.feed(batches, updates=UPDATES, on_update=on_update):
                parallel.backward(model(batch).square().mean())
            parallel.finish()
        return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]

    return VirtualCluster(3).run(program).values


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_checkpoint_without_later_additions_goes_on_to_the_bit(
    strategy: st.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(strategy, tmp_path / "now", saves=True)
    with monkeypatch.context() as before:
        without_additions(before)
        trained(strategy, tmp_path / "first", saves=True)
    ends = [trained(strategy, tmp_path / which, saves=False) for which in ("now", "first")]
    assert ends[0] == ends[1]
