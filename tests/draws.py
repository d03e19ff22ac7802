"""How many random cases of a law are tried: a quarter at each change; all of them, with other seeds, each night."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

EVERYTHING = os.environ.get("STRETTO_TESTS") == "all"
FIRST_SEED = int(os.environ.get("STRETTO_FIRST_SEED", "0"))


def seeds(count: int) -> range:
    """Return the seeds of a law for `pytest.mark.parametrize`, which takes a quarter of them in `make test`.

    `make test-all` begins at a seed of the day. Pytest prints it first, and `STRETTO_FIRST_SEED` repeats it.
    """
    return range(FIRST_SEED, FIRST_SEED + count)


def draws(most: int, least: int = 2) -> range:
    """Return the seeds of a law inside one test: `most` in `make test-all`, else a quarter, but at least `least`."""
    return seeds(most if EVERYTHING else max(least, most // 4))


def part(cases: Iterable[T]) -> list[T]:
    """Return a quarter of the cases, beginning with the first; all of them in `make test-all`.

    Of every four it is another one each time, so that of a product neither side is left out.
    """
    return [one for number, one in enumerate(cases) if EVERYTHING or number % 4 == number // 4 % 4]
