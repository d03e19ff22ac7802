"""What `stretto estimate` answers, and how it is printed."""

import random
import re

import pytest

from stretto.errors import ConfigError, UnknownName
from stretto.strategies import Average
from stretto_lab.cli import main
from stretto_lab.cli.estimate import print_estimate
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.evidence import of_strategy
from tests.draws import seeds
from tests.terminal import print_on_a_terminal

WORDS = "--parameters 124M --update-seconds 1.0 --ranks 4 --network 1gbit"


def test_it_fits_a_terminal_and_says_what_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    assert main(["estimate", *WORDS.split()]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "sends 744 MB per rank" in shown.replace("\n", " ")  # 8 bytes · 124 million · 3/4


@pytest.mark.parametrize("seed", seeds(24))
def test_every_cell_stands_under_its_heading_and_a_row_fits_a_terminal(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    parameters, seconds = f"{10 ** draw.uniform(3, 13):.0f}", f"{10 ** draw.uniform(-4, 5):.3g}"
    network = draw.choice(["1mbit", "100mbit", "1gbit", "100gbit"])
    words = f"--parameters {parameters} --update-seconds {seconds} --ranks {draw.randint(2, 999)} --network {network}"
    print_estimate(words.split())
    _, table, _ = capsys.readouterr().out.split("\n\n")
    starts, *others = [
        [cell.start() for cell in re.finditer(r"(?<!\S)\S+(?: \S+)*", row)] for row in table.splitlines()
    ]
    assert len(others) > 10
    assert [row for row in others if row != starts] == []
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("seconds", [1e-3, 0.1, 1.0, 100.0, 1e6])
def test_the_choice_is_no_slower_than_the_default_and_exact_where_nothing_is_gained(seconds: float) -> None:
    rows, choice = estimate(EstimateConfig(update_seconds=seconds).work)
    assert choice.time.seconds <= rows[0].time.seconds
    if seconds == 1e6:
        assert choice == rows[0]


@pytest.mark.parametrize("seed", seeds(12))
def test_averages_are_chosen_where_their_measured_loss_is_allowed_and_no_sooner(seed: int) -> None:
    draw = random.Random(seed)
    ranks, seconds = draw.choice([2, 4, 8, 32, 64]), 10 ** draw.uniform(-2, 1)
    work = EstimateConfig(ranks=ranks, update_seconds=seconds, network="100mbit").work
    for allowed in (0.0, 0.02, 0.05, 0.1, 0.3, 1.0):
        rows, choice = estimate(work, allowed)
        assert choice.nats is not None
        assert choice.nats <= allowed
        known = [row for row in rows if row.nats is not None and row.nats <= allowed]
        assert choice.time.seconds <= 1.02 * min(row.time.seconds for row in known)
        averages = {row.strategy: row.nats for row in rows if row.strategy.startswith("average")}
        assert len(averages) == 4
        if ranks == 64:
            assert set(averages.values()) == {None}


def test_what_averages_cost_is_that_of_the_next_larger_number_of_replicas() -> None:
    found = [of_strategy(Average(4), replicas).nats for replicas in (1, 2, 3, 8, 9, 32, 33)]
    assert found == [0.046, 0.046, 0.153, 0.153, 0.402, 0.402, None]
    assert of_strategy(Average(4, fragments=1), 2).nats is None  # another delay than the measured one
    assert of_strategy(Average(4, worker="node"), 2).nats == 0.046


@pytest.mark.parametrize(
    "words", ["--parameters many", "--parameters 0", "--ranks 0", "--network slow", "--rank 4", "--ranks"]
)
def test_what_cannot_be_read_is_refused(words: str) -> None:
    with pytest.raises((ConfigError, UnknownName)):
        print_estimate(words.split())
