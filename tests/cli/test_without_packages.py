"""Without the packages of the extra `cli`, what needs one says how to install it, and the rest works."""

import subprocess
import sys

import pytest

HIDDEN = """
import sys
sys.modules["tensorboard"] = None
from stretto_lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDDEN, *words], capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("words", ["--help", "--version", "simulate digits-resnet --updates 1"])
def test_the_rest_works(words: str) -> None:
    done = command(*words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout
