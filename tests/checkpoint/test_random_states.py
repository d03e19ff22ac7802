"""Random states of a rank are written in tensors, and come back to the bit."""

import random
from typing import Any

import numpy as np
import torch

from stretto.packed import pack, unpack
from stretto.random_states import (
    kept_random_states,
    read_random_states,
    restore_random_states,
    written_random_states,
)

CPU = torch.device("cpu")


def draws(count: int) -> tuple[Any, ...]:
    """What follows in every generator; normal numbers come in pairs, of which a state may hold one."""
    return (
        torch.randn(count).tolist(),
        np.random.standard_normal(count).tolist(),  # the state that is global
        np.random.randint(2**31, size=count).tolist(),
        [random.gauss(0, 1) for _ in range(count)],
        [random.random() for _ in range(count)],
    )


def test_what_is_drawn_after_a_state_was_read_is_what_was_drawn_after_it_was_written() -> None:
    with kept_random_states(CPU):
        for seed in range(20):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            draws(seed)
            packed = pack(written_random_states(CPU), "random states")
            expected = draws(9)
            draws(seed)
            restore_random_states(read_random_states(unpack(packed, "random states")), CPU)
            assert draws(9) == expected, seed


def test_a_generator_that_the_user_has_put_in_numpys_place_comes_back() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        packed = pack(written_random_states(CPU), "random states")
        expected = draws(9)[1:3]
        restore_random_states(read_random_states(unpack(packed, "random states")), CPU)
        assert draws(9)[1:3] == expected
    finally:
        np.random.set_bit_generator(before)
