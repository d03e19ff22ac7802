"""Plans of strategies as words and as records: what can be, and one clear line for what cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

import stretto as st
from stretto.errors import ConfigError
from stretto.strategies.ledger import ledger_of
from stretto_lab.faults import Fault
from stretto_lab.observe import read_json_lines
from stretto_lab.page.times import model_seconds, of_totals
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.handle import check_run
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.switching.jobs import Case, Job
from tests.train.runs import tiny_run
from tests.train.tiny import Tiny


def test_a_word_says_what_takes_turns() -> None:
    arm = parse_arm("zero1+acco:wire=int8:clock=2,8@100+diloco:interval=20:wire=bf16@900")
    assert arm.plan() == st.Switching(
        {
            0: st.ZeRO1(),
            100: st.Phase(st.ACCO(), wire="int8", micro_batches=st.Clock(minimum=2, maximum=8)),
            900: st.Phase(st.DiLoCo(interval=20), wire="bf16"),
        }
    )
    assert (arm.is_ours, arm.overlaps) == (True, True)
    assert parse_arm("zero1 + local:rate=0.5@7").plan() == parse_arm("zero1+local:rate=0.5@7").plan()


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("zero1+acko@10", "no strategy is called 'acko'.*did you mean 'acco'"),
        ("zero1+ACCO@10", "no strategy is called 'ACCO'.*did you mean 'acco'"),
        ("zero1+acco", "cannot read 'acco': expected .* as acco@100"),
        ("zero1+acco@abc", "cannot read 'acco@abc': expected .* as acco@100$"),
        ("zero1+acco@10:wire=int8", "cannot read .* as acco:wire=int8@10"),
        ("zero1+acco@0", "update 0: two strategies begin there; expected one"),
        ("zero1+acco@90+ddp@10", "updates 0, 90, 10: .* later than the one before; did you mean 0, 10, 90"),
        ("acco@3+ddp@10", "the first strategy at 0 .* did you mean 0, 3, 10"),
        ("zero1+torch-ddp@5", "torch-ddp is a stock method"),
        ("zero1+acco:lr=1e+3@5", "lr is of the whole run"),
        ("zero1+diloco:interval=0@4", "expected at least 1 update"),
    ],
)
def test_a_wrong_word_gives_one_line_that_says_what_to_do(word: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        parse_arm(word)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("phases", "line"),
    [
        ({}, "did you mean 0"),
        ({0: st.DDP(), 9: st.ACCO(), 4: st.DDP()}, "did you mean 0, 4, 9"),
        ({0: st.DDP(), -1: st.DDP()}, "-1: expected a number of committed updates"),
        ({0: st.DDP(), 5: "acco"}, r"found 'acco'; did you mean ACCO\(\)"),
        ({0: st.DDP(), 5: st.ACCO}, r"did you mean ACCO\(\)"),
        ([st.DDP()], "expected strategies by update"),
    ],
)
def test_a_wrong_plan_gives_one_line(phases: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        st.Switching(phases)


def test_what_a_later_phase_cannot_do_is_said_at_the_start() -> None:
    cases = {
        "needs at least 2 micro-batches": Case(
            strategy=st.Switching({0: st.DDP(), 5: st.ACCO()}), micro_batches=1
        ),
        "did you mean 'int8'": Case(strategy=st.Switching({0: st.DDP(), 5: st.Phase(st.DDP(), wire="int")})),
        "guard audit": Case(
            strategy=st.Switching({0: st.DDP(), 5: st.LocalSGD()}), guards=(st.Audit(rate=0.5),)
        ),
    }
    for line, case in cases.items():
        with pytest.raises(ConfigError, match=line):
            Job(case)


def test_a_run_refuses_what_needs_one_strategy() -> None:
    word = "zero1+acco:clock=2,4@3"
    for settings, line in (
        ({"faults": (Fault(site="masters", rank=0),)}, "faults strike the parts of one strategy"),
        ({"clock": st.Clock()}, "write it where it counts"),
    ):
        with pytest.raises(ConfigError, match=line):
            check_run(tiny_run(strategy=word, **settings), 2)
    with pytest.raises(ConfigError, match="look at each"):
        ledger_of(parse_arm(word).plan())  # type: ignore[arg-type]  # what a type checker finds too
    with pytest.raises(ConfigError, match="look at each of them by itself: zero1, acco"):
        parse_arm(word).strategy()


def test_a_simulated_run_records_its_plan_and_traces_every_phase() -> None:
    word = "zero1+acco:wire=int8@3+ddp@5"
    config = SimulateConfig(
        task=Tiny(), run_dir="run", ranks=2, updates=7, micro_batches=2, network="100mbit,1ms", strategy=word,
        guards=("rest",), trace=True,
    )  # fmt: skip
    simulate(config)
    assert json.loads(Path("run/config.json").read_text())["strategy"] == word
    assert [row["step"] for row in read_json_lines(Path("run/updates.jsonl"))] == list(range(1, 8))
    rows = read_json_lines(Path("run/traces/rank-0.jsonl"))
    reduced = {row["step"] for row in rows if any(kind == "reduce" for kind, *_ in row["communication"])}
    previewed = {row["step"] for row in rows if any(kind == "gather" for kind, *_ in row["communication"])}
    assert reduced == set(range(1, 8))
    assert {6, 7}.isdisjoint(previewed)  # ddp gathers nothing


def test_a_page_does_not_put_the_time_model_of_one_strategy_beside_several() -> None:
    totals = dict.fromkeys(("seconds", "exposed_seconds", "lane_seconds", "updates", "wait_seconds"), 1.0)
    assert model_seconds("acco", 1.0, 1.0, (1.0, 1.0)) is not None
    time = of_totals(totals, "acco:first=1+ddp@100")
    assert time is not None
    assert time.model is None
