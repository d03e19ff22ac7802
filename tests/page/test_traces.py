"""What a trace records, in virtual time, where every span has a length that is known; and how much of it is shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import ConfigError
from stretto_lab.observe import Trace, read_json_lines
from stretto_lab.page.contents import Event
from stretto_lab.page.traces import BUDGET_BYTES, open_traces, rank_times, stretches
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.observe.updates import update
from tests.page.pages import numbers, page_of
from tests.train.runs import model_bits
from tests.train.tiny import Tiny

MILLISECOND = 1000
"""In microseconds, the unit of traces."""


def simulated(folder: str, **settings: Any) -> None:
    chosen = {
        "ranks": 2,
        "updates": 6,
        "micro_batches": 2,
        "network": "100mbit,1ms",
        "trace": True,
        **settings,
    }
    simulate(SimulateConfig(task=Tiny(), run_dir=folder, micro_batch_ms=10.0, step_ms=3.0, **chosen))


def lines(folder: str, rank: int) -> list[dict[str, Any]]:
    return [
        {
            name: value for name, value in line.items() if name != "peak_bytes"
        }  # of the process that runs the tests
        for line in read_json_lines(Path(folder, "traces", f"rank-{rank}.jsonl"))
    ]


@pytest.mark.parametrize("strategy", ["zero1", "acco", "diloco:interval=2"])
def test_a_traced_run_is_the_same_run(strategy: str) -> None:
    simulated("traced", strategy=strategy, guards=("standard",))
    simulated("plain", strategy=strategy, guards=("standard",), trace=False)
    assert model_bits("traced") == model_bits("plain")
    assert Path("traced/updates.jsonl").read_bytes() == Path("plain/updates.jsonl").read_bytes()
    assert not Path("plain/traces").exists()


def test_spans_have_the_lengths_that_the_cluster_gives_them() -> None:
    simulated("run", strategy="wp", slow={1: 2.0})
    for rank, factor in ((0, 1), (1, 2)):
        spans = [span for line in lines("run", rank) for span in line["compute"] + line["communication"]]
        lengths = {kind: {length for one, _, length in spans if one == kind} for kind, _, _ in spans}
        assert lengths["micro-batch"] == {10 * MILLISECOND * factor}
        assert lengths["step"] == {3 * MILLISECOND * factor}
        assert lengths["preview"] == {3 * MILLISECOND * factor}
        assert sum(kind == "micro-batch" for kind, _, _ in spans) == 6 * 2
    waits = [
        [one[2] for line in lines("run", rank) for one in line["compute"] if one[0] == "exposed"]
        for rank in (0, 1)
    ]
    assert sum(waits[0]) > sum(waits[1])  # the fast rank waits for the slow one


def test_exposed_spans_are_what_the_updates_say() -> None:
    simulated("run", strategy="zero1")
    exposed = [sum(span[2] for span in line["compute"] if span[0] == "exposed") for line in lines("run", 0)]
    updates = read_json_lines(Path("run", "updates.jsonl"))
    assert exposed[:6] == [round(1e6 * one["exposed_seconds"]) for one in updates]


def test_two_simulations_have_equal_traces() -> None:
    simulated("one", jitter=0.3, strategy="acco")
    simulated("two", jitter=0.3, strategy="acco")
    assert [lines("one", rank) for rank in (0, 1)] == [lines("two", rank) for rank in (0, 1)]


def test_the_straggler_is_named_with_what_it_costs() -> None:
    simulated("run", ranks=3, slow={1: 2.0})
    page = page_of("run")
    assert "Rank 1 is the slowest: its micro-batches take 2.00 times as long as the fastest." in page
    times = rank_times(open_traces(Path("run"), []))
    assert [one.micro_batch for one in times] == pytest.approx([0.01, 0.02, 0.01])
    assert [one.last for one in times] == [0.0, 1.0, 0.0]
    assert numbers(page)["runs"][0]["time"]["model"] is not None


def test_gradients_that_leave_during_the_backward_pass_are_seen_leaving() -> None:
    simulated("hidden", strategy="zero1")
    simulated("plain", strategy="zero1", hide_reductions=False)
    found = {
        folder: [span for line in lines(folder, 0) for span in line["communication"] if span[0] == "leaving"]
        for folder in ("hidden", "plain")
    }
    assert [length for _, _, length in found["hidden"]] == [
        10 * MILLISECOND
    ] * 6  # the last micro-batch of each update
    assert found["plain"] == []


def test_a_trace_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace needs a folder"):
        SimulateConfig(task=Tiny(), trace=True)


def trace(resumed_from: int | None, clock: list[float]) -> Trace:
    return Trace(
        Path("traces/rank-0.jsonl"), resumed_from, now=lambda: clock[0], epoch=100.0, peak_bytes=lambda: 7
    )


def work(one: Trace, clock: list[float], steps: range) -> None:
    """Half a second of a step each, then an update, one second apart."""
    for step in steps:
        clock[0] = float(step)

        def half_a_second() -> None:
            clock[0] += 0.5

        one.timed(half_a_second, "communication", "step")()
        one.updated(update(step), clock[0])


def test_every_update_is_in_the_file_as_soon_as_it_is_known() -> None:
    clock = [0.0]
    one = trace(None, clock)
    work(one, clock, range(1, 4))
    found = read_json_lines(
        Path("traces/rank-0.jsonl")
    )  # before it is closed, which a killed process does not
    one.close()
    expected = {"compute": [], "communication": [["step", 0, 500_000]], "peak_bytes": 7}
    assert found == [{"step": step, "at": (100 + step) * 1_000_000, **expected} for step in (1, 2, 3)]


def test_a_resumed_run_drops_the_spans_behind_its_checkpoint() -> None:
    clock = [0.0]
    for resumed_from, steps in ((None, range(1, 6)), (3, range(4, 5))):
        one = trace(resumed_from, clock)
        work(one, clock, steps)
        one.close()
    assert [line["step"] for line in read_json_lines(Path("traces/rank-0.jsonl"))] == [1, 2, 3, 4]


def long_traces(updates: int, ranks: int) -> list[str]:
    """Files of a long run, with 16 spans per update and rank."""
    Path("long", "traces").mkdir(parents=True)
    Path("long", "config.json").write_text('{"strategy": "zero1"}')
    spans = json.dumps([["micro-batch", 1000 * index, 900] for index in range(8)])
    for rank in range(ranks):
        with Path("long", "traces", f"rank-{rank}.jsonl").open("w") as file:
            for step in range(1, updates + 1):
                file.write(
                    f'{{"step": {step}, "at": {10_000 * step}, "compute": {spans}, "communication": {spans}, '
                    '"peak_bytes": 1}\n'
                )
    with Path("long", "updates.jsonl").open("w") as file:
        for step in range(1, updates + 1):
            file.write(f'{{"step": {step}, "loss": {1 / step}, "training_seconds": {step}, "echoed": 1}}\n')
    return [f"long/traces/rank-{rank}.jsonl" for rank in range(ranks)]


def test_a_page_of_a_long_run_stays_small_and_keeps_stretches_whole() -> None:
    long_traces(5_000, 8)  # what is drawn does not depend on the length: the next test
    page = page_of("long", updates=(3000, 3005))
    assert len(page.encode()) < 9_000_000
    (timeline,) = numbers(page)["timelines"]
    chosen = timeline["stretches"][0]
    assert chosen["label"] == "updates 3000 to 3005"
    for row in chosen["rows"]:
        assert [row["step"].count(step) for step in range(3000, 3006)] == [8] * 6
    assert len(chosen["rows"]) == 16
    labels = [stretch["label"] for stretch in timeline["stretches"]]
    assert any(label.startswith("the end") for label in labels)


@pytest.mark.parametrize("chosen", [None, (1, 2000)])
def test_what_is_shown_of_a_run_does_not_grow_with_its_length(chosen: tuple[int, int] | None) -> None:
    files = long_traces(2_000, 8)
    size = sum(Path(file).stat().st_size for file in files)
    assert size > 2 * BUDGET_BYTES
    events = [Event(step=step, kind="incident", text="x") for step in range(10, 1000, 10)]
    found = stretches(open_traces(Path("long"), []), events, chosen)
    spans = sum(len(row["start"]) for stretch in found for row in stretch.rows)
    bytes_per_span = size / (2_000 * 8 * 16)
    assert spans * bytes_per_span <= BUDGET_BYTES
    if chosen is not None:
        assert found[0].label == f"updates 1 to 2000, the first {spans // (8 * 16)} of them"


def test_what_is_not_to_be_seen_in_full_has_stretches_to_choose_from() -> None:
    long_traces(2_000, 8)
    events = [Event(step=500, kind="incident", text="x")]
    labels = [one.label for one in stretches(open_traces(Path("long"), []), events, None)]
    assert labels[:4] == [
        "from the middle: update 1001", "the beginning: update 1", "the end: update 2000", "incident: update 500"
    ]  # fmt: skip
