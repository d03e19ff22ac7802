"""How many random cases of a law are tried: a quarter at each change; all of them, with other seeds, each night."""

import os
import random
from collections.abc import Iterable, Mapping, Sequence
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


def sample(cases: Sequence[Mapping[str, int]], name: str, keep: int | None = None) -> list[int]:
    """Return the numbers of the cases of a parametrised test that stay: a quarter, or `keep`, drawn by its name.

    Of a product of several parameters every value stays, unless `keep` is fewer. A case holds, by parameter, which of
    its values it has.
    """
    at_least = keep or max(2, (len(cases) + 3) // 4)
    by_parameter = {tuple(case[parameter] for case in cases) for parameter in cases[0]}
    is_product = sum(len(set(values)) > 1 for values in by_parameter) > 1
    left = random.Random(name).sample(range(len(cases)), len(cases))
    seen: set[tuple[str, int]] = set()
    while left:
        best = max(left, key=lambda number: len(cases[number].items() - seen))
        is_new = is_product and not keep and bool(cases[best].items() - seen)
        if len(cases) - len(left) >= at_least and not is_new:
            break
        left.remove(best)
        seen |= cases[best].items()
    return sorted({*range(len(cases))} - {*left})
