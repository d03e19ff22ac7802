"""`stretto estimate` answers at once, in an environment without PyTorch."""

import subprocess
import sys

import pytest

from stretto.errors import ConfigError, UnknownName
from stretto_lab.cli import main
from stretto_lab.cli.estimate import print_estimate
from stretto_lab.estimate import EstimateConfig, estimate

WORDS = "--parameters 124M --update-seconds 1.0 --ranks 4 --network 1gbit"
WITHOUT_TORCH = """
import resource, sys
sys.modules["torch"] = None
from stretto_lab.cli import main
code = main(["estimate", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(code)
"""


def test_it_answers_within_a_second_of_processor_time_without_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *WORDS.split()], capture_output=True, text=True, check=True
    )
    assert float(done.stderr) < 1
    assert "First choice: --strategy" in done.stdout


def test_it_fits_a_terminal_and_says_what_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *WORDS.split()]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "sends 744 MB per rank" in shown.replace("\n", " ")  # 8 bytes · 124 million · 3/4


@pytest.mark.parametrize("seconds", [1e-3, 0.1, 1.0, 100.0, 1e6])
def test_the_choice_is_no_slower_than_the_default_and_exact_where_nothing_is_gained(seconds: float) -> None:
    rows, choice = estimate(EstimateConfig(update_seconds=seconds).work)
    assert choice.time.seconds <= rows[0].time.seconds
    if seconds == 1e6:
        assert choice == rows[0]


@pytest.mark.parametrize(
    "words", ["--parameters many", "--parameters 0", "--ranks 0", "--network slow", "--rank 4", "--ranks"]
)
def test_what_cannot_be_read_is_refused(words: str) -> None:
    with pytest.raises((ConfigError, UnknownName)):
        print_estimate(words.split())
