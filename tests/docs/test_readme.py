"""Both loops of the README run and train the same model where they should; and it is short."""

import json
import re
import statistics
from typing import Any

import torch

import stretto
from benchmarks.figures import OTHER_LIBRARIES
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.peers import PEERS
from tests.bits import unequal
from tests.docs.pages import DOCS, README, ROOT, cells, code_blocks, table, without_code

MARKER = "tests/docs/test_readme.py"
RACE = ROOT / "benchmarks" / "results" / "2026-11-23-race"

(DIFF,) = code_blocks(README, MARKER)


def side(sign: str) -> str:
    """The program before (`-`) or after (`+`) the change."""
    return "\n".join(line[1:] for line in DIFF.splitlines() if line[:1] in ("", " ", sign))


def train(program: str) -> dict[str, Any]:
    """Run a program of the README on a small model and return its names."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(12)]
    names = {
        "model": torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)),
        "loader": batches,
        "loss_function": torch.nn.functional.mse_loss,
    }
    exec(compile(program, "README.md", "exec"), names)
    return names


def test_the_loop_with_the_default_strategy_and_wire_equals_the_plain_loop_to_the_bit() -> None:
    ours = side("+").replace(" stretto.ACCO(),", "").replace(', wire="int8"', "")
    assert "ACCO" not in ours
    assert "wire" not in ours
    # SGD notices a wrong scale of the gradient, AdamW does not.
    plain, ours = (train(program.replace("AdamW", "SGD")) for program in (side("-"), ours))
    # Dividing by 4 micro-batches is exact, before the sum as after it.
    assert unequal(ours["model"].parameters(), plain["model"].parameters()) == []
    assert plain["scheduler"].state_dict() == ours["scheduler"].state_dict()


def test_the_loop_as_printed_commits_an_update_for_every_four_batches() -> None:
    parallel = train(side("+"))["parallel"]
    assert isinstance(parallel.strategy, stretto.ACCO)
    assert parallel.options.wire == "int8"
    assert parallel.steps == 12 // 4


def test_the_table_of_the_results_has_every_measured_arm_with_its_numbers() -> None:
    rows = table(RACE / "README.md", MARKER)
    measured = json.loads((RACE / "time-to-loss.json").read_text())
    found = [
        f"{statistics.median(of_arm):.2f} ({min(of_arm):.2f} to {max(of_arm):.2f})"
        if of_arm
        else "not reached"
        for of_arm in (row["multiples"] for row in measured)
    ]
    assert sorted(row["times a free wire's"] for row in rows) == sorted(found)


def test_the_table_of_the_benchmarks_has_the_fastest_of_ours_and_of_the_others_on_every_link() -> None:
    times = "times a free wire's"
    by_link: dict[str, list[dict[str, str]]] = {}
    for row in table(RACE / "README.md", MARKER):
        by_link.setdefault(row["link"], []).append(row)

    def fastest(rows: list[dict[str, str]], *, stock: bool) -> list[str]:
        of_kind = [
            row
            for row in rows
            if (row["arm"].strip("`").partition(":")[0] in (*PEERS, *OTHER_LIBRARIES)) == stock
            and row[times][0].isdigit()
        ]
        first = min(
            of_kind, key=lambda row: float(row[times].split()[0]), default={"arm": "not timed", times: ""}
        )
        return [first["arm"], first[times]]

    assert cells(DOCS / "benchmarks.md", MARKER) == [
        [link, *fastest(rows, stock=False), *fastest(rows, stock=True)] for link, rows in by_link.items()
    ]


def test_the_readme_is_read_in_minutes() -> None:
    prose = re.sub(
        r"^(?:\||<!--).*$|\]\([^)]*\)",
        "",
        without_code(README.read_text(encoding="utf-8")),
        flags=re.MULTILINE,
    )
    assert len(prose.split()) <= 600


METHODS = {
    "fp32 gradients": (None, "zero1", "fp32"),
    "bf16 gradients": ("torch-ddp-bf16", "zero1", "bf16"),
    "2 bits (": ("zero1:wire=rotated2", "zero1", "rotated2"),
    "2 bits, overlapped": ("acco:wire=rotated2", "acco", "rotated2"),
    "replicas averaged": ("average:4:wire=int4", "average:4", "int4"),
    "hivemind": ("hivemind:interval=8:delay=4", None, None),
}
"""By the beginning of a row of the README's table: the arm of the race, and the strategy and wire that are priced."""


def test_the_table_of_the_readme_is_the_race_at_10_mbit_and_what_estimate_says_of_1_gbit() -> None:
    measured = {
        row["arm"].strip("`"): row["times a free wire's"]
        for row in table(RACE / "README.md", MARKER)
        if row["link"] == "10 Mbit/s"
    }
    work = EstimateConfig(parameters="124M", update_seconds=1.0, ranks=4, network="1gbit").work
    prices = {(row.strategy, row.wire): f"{row.time.seconds:.3g}" for row in estimate(work)[0]}
    rows = cells(README, MARKER)
    assert len(rows) == len(METHODS)
    for (method, found, price), (begins, (arm, strategy, wire)) in zip(rows, METHODS.items(), strict=True):
        assert method.startswith(begins)
        assert found == ("not run" if arm is None else measured[arm])
        assert price == ("" if strategy is None else prices[strategy, wire])


def test_the_loss_that_acco_costs_is_what_estimate_says() -> None:
    config = EstimateConfig(parameters="124M", update_seconds=1.0, ranks=4, network="1gbit")
    _, choice = estimate(config.work)
    text = README.read_text(encoding="utf-8")
    assert f"`{choice.strategy}` cost {choice.nats:.3f} nats per byte" in text
