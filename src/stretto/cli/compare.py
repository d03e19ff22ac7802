"""`stretto compare RECIPE`: strategies side by side on the same link."""

from collections.abc import Sequence

from stretto.cli.launcher import find_ranks
from stretto.cli.options import parse_options
from stretto.cli.telling import tell
from stretto.observe import print_comparison
from stretto.recipes import TaskConfig
from stretto.train.comparison import compare
from stretto.train.configuration import CompareConfig


def compare_command(words: Sequence[str]) -> None:
    """Run the command.

    Args:
        words: What follows its name.
    """
    _, comparison = parse_options("compare", words, _configure)
    ranks = find_ranks(comparison.workers)
    runs = compare(comparison, ranks, tell if ranks.is_first else _keep_quiet)
    if ranks.is_first:
        print_comparison(runs)


def _configure(task: TaskConfig) -> CompareConfig[TaskConfig]:
    return CompareConfig(task=task)


def _keep_quiet(line: str) -> None:
    """Leave the telling to the first rank."""
