"""Every strategy that a table of ours prints is typed as it stands, and trains."""

import dataclasses
import functools
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.figures import OTHER_LIBRARIES
from stretto.exchange import WIRES
from stretto.groups import Link, register_throttled
from stretto.strategies import STRATEGIES
from stretto_lab.cli.options import parse_alone
from stretto_lab.peers import PEERS
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.docs.pages import DOCS, ROOT, pages, table
from tests.peers import training
from tests.processes import run_ranks
from tests.train.tiny import Tiny

UPDATES = 2
_IN_CELLS = re.compile(r"`([^`]+)`")
_WORD = re.compile(r"[a-z][\w-]*")


def printed(page: Path) -> list[str]:
    """What stands in a page's tables as code, and begins with the name of a strategy or of a stock method."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    texts = [text for row in rows for text in _IN_CELLS.findall(row)]
    names = {text: found[0] for text in texts if (found := _WORD.match(text))}
    return [text for text, name in names.items() if name in (*STRATEGIES, *PEERS, *OTHER_LIBRARIES)]


PAGES = [*pages(), *sorted((ROOT / "benchmarks" / "results").glob("*/README.md"))]
ALL = list(dict.fromkeys(text for page in PAGES for text in printed(page)))
STOCK = [text for text in ALL if re.split(r"[^\w-]", text)[0] in PEERS]
REFUSED = {
    "zero1:wire=int2", "zero1:wire=int2:changes=int4", "acco:wire=int2:micro_batches=4:lr=0.012", "local:rate=echo",
}  # fmt: skip
"""Arms of earlier results, whose format loses too much of gradients, and one of the page of what has gone."""
OURS = [text for text in ALL if text.partition(":")[0] in STRATEGIES and text not in REFUSED]


@pytest.fixture(autouse=True)
def example_of_a_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some results are of a wire that the examples bring; who types those has registered it."""
    monkeypatch.setitem(WIRES, "largest", WIRES["int8"])  # what the example puts there is gone afterwards
    runpy.run_path(str(ROOT / "examples" / "extend" / "wire.py"))


@pytest.mark.parametrize("text", OURS)
def test_a_strategy_in_a_table_trains_as_it_stands(text: str) -> None:
    strategy, *words = shlex.split(text)
    each = parse_arm(strategy).settings.get("ranks_per_node", 1)
    tiny = SimulateConfig(task=Tiny(), ranks=2 * each, nodes=2, updates=UPDATES, micro_batches=2)
    asked = parse_alone("simulate", ["--strategy", strategy, *words], tiny)
    outcome = simulate(dataclasses.replace(asked, micro_batch_ms=1.0)).values[0]
    assert outcome.updates == UPDATES


def trained(rank: int) -> list[tuple[str, int]]:
    """How many updates each stock method has made, of a model with enough parameters for eight fragments."""
    found = []
    for text in STOCK:
        arm, inputs = parse_arm(text), torch.ones(4, 6)
        model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(16)))
        peer = training.make_peer(arm.name, model, torch.optim.AdamW(model.parameters()), 1, **arm.options)
        updates = [peer.backward(peer.model(inputs).square().mean()) for _ in range(UPDATES)]
        peer.finish()
        found.append((text, len([update for update in updates if update is not None])))
    return found


def test_a_stock_method_in_a_table_trains_as_it_stands() -> None:
    torch.set_num_threads(1)
    prepare = functools.partial(register_throttled, Link.parse("none"))
    for of_rank in run_ranks(2, trained, backend="throttled", prepare=prepare):
        assert of_rank == [(text, UPDATES) for text in STOCK]


def meant(text: str) -> object:
    """What an arm is, whatever words it is written in."""
    if "@" in text:
        return text  # raw data of strategies in turns, which has gone since
    name, *settings = text.split(":")
    if name in OTHER_LIBRARIES:
        return name, sorted(settings)
    arm = parse_arm(text)
    made = arm.strategy() if arm.is_ours else PEERS[arm.name].options_type(**arm.options)
    return arm.name if not arm.is_ours else "", getattr(made, "outer", made), arm.settings


def test_the_table_of_losses_on_a_slow_link_is_what_was_measured() -> None:
    measured = json.loads(
        (ROOT / "benchmarks" / "results" / "2026-11-23-frontier" / "frontier.json").read_text()
    )
    settings = measured["settings"]
    columns = {"two ranks": "2-ranks", "eight": "8-ranks", "32": "32-ranks"}
    for row in table(DOCS / "slow-links.md", "tests/docs/test_arms.py"):
        way = meant(row["way"].strip("`"))
        for title, setting in columns.items():
            found = [
                one["against_ddp"]["mean"] for arm, one in settings[setting].items() if meant(arm) == way
            ]
            assert [row[title]] == ([f"{mean:.3f}".replace("-", "−") for mean in found] or [""]), row


def test_the_table_of_learning_rates_is_what_was_measured() -> None:
    lines = (ROOT / "benchmarks" / "results" / "2026-11-23-frontier" / "runs.jsonl").read_text().splitlines()
    tuning = [run for run in map(json.loads, lines) if run["seed"] == 1000]
    for row in table(DOCS / "strategies.md", "tests/docs/test_arms.py"):
        way, setting = (
            meant(row["way"].strip("`")),
            {"2": "2-ranks", "8": "8-ranks-same-batch"}[row["ranks"][0]],
        )
        found = {
            run["lr"]: run["curve"][-1][1]
            for run in tuning
            if run["setting"] == setting and meant(run["arm"]) == way
        }
        best = min(found, key=found.__getitem__)
        for rate in (0.004, 0.008, 0.016):
            assert row[f"{rate}"] == (f"**{found[rate]:.3f}**" if rate == best else f"{found[rate]:.3f}")
