"""Of a parametrised test `make test` runs a part."""

import itertools
import random

from tests.draws import draws, sample


def test_of_a_product_every_value_of_every_parameter_stays_and_of_one_list_a_quarter() -> None:
    for seed in draws(200):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
        cases = [dict(zip("abc", one, strict=False)) for one in itertools.product(*map(range, sizes))]
        chosen = sample(cases, f"name {seed}")
        stays = {value for number in chosen for value in cases[number].items()}
        is_product = sum(size > 1 for size in sizes) > 1
        lost = {value for case in cases for value in case.items()} - stays
        assert not is_product or not lost, (sizes, lost)
        assert len(chosen) == len(set(chosen)) >= min(len(cases), max(2, len(cases) // 4)), sizes
        assert is_product or len(chosen) <= max(2, (len(cases) + 3) // 4), sizes
        assert len(sample(cases, f"name {seed}", keep=1)) == 1
