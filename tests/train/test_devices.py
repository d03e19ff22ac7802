"""Which device a worker takes, how many workers there are, and what the first line says of them."""

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from stretto.errors import ConfigError
from stretto.machine import describe_environment
from stretto.random_states import kept_random_states
from stretto_lab.cli.environment import find_ranks
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.rank import title_of
from stretto_lab.train.workers import described_device, device_of, local_workers
from tests.train.tiny import Tiny

Machine = Callable[[int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Let PyTorch find so many devices, none of which can be used."""

    def has(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"Accelerator {device}")

    return has


def test_a_machine_has_one_worker_per_device_and_two_on_processors_unless_told_otherwise(
    machine: Machine,
) -> None:
    for count, chosen in itertools.product(range(9), (None, 1, 3)):
        machine(count)
        assert local_workers(chosen, "cpu") == (chosen or 2)
        assert local_workers(chosen, "auto") == local_workers(chosen, "cuda") == (chosen or count or 2)
        assert find_ranks(chosen, "auto").world_size == (chosen or count or 2)


def test_every_worker_has_a_device_of_its_own_or_all_are_on_processors_or_it_is_an_error(
    machine: Machine,
) -> None:
    for count, workers in itertools.product(range(5), range(1, 5)):
        machine(count)
        fits = workers <= count
        ranks = range(workers)
        assert {device_of("cpu", rank, workers).type for rank in ranks} == {"cpu"}
        chosen = [device_of("auto", rank, workers) for rank in ranks]
        assert chosen == [torch.device("cuda", rank) if fits else torch.device("cpu") for rank in ranks]
        if fits:
            assert [device_of("cuda", rank, workers) for rank in ranks] == chosen
        else:
            with pytest.raises(ConfigError, match=f"finds {count} CUDA devices here, for {workers} workers"):
                device_of("cuda", 0, workers)


@pytest.mark.parametrize(
    ("count", "workers", "first_line"),
    [
        (0, 2, "zero1 on 2 workers (cpu)"),
        (1, 1, "zero1 on 1 worker (cuda, Accelerator cuda:0)"),
        (1, 2, "zero1 on 2 workers (cpu: 1 CUDA device for 2 workers)"),
        (4, 8, "zero1 on 8 workers (cpu: 4 CUDA devices for 8 workers)"),
    ],
)
def test_the_first_line_says_which_device_trains_and_why_it_is_no_other(
    machine: Machine, count: int, workers: int, first_line: str
) -> None:
    machine(count)
    device = device_of("auto", 0, workers)
    assert title_of(RunConfig(task=Tiny()), workers, described_device(device, "auto", workers)) == first_line


def test_records_name_the_device_of_the_model_and_not_one_that_is_only_there(machine: Machine) -> None:
    machine(8)
    assert describe_environment(torch.device("cpu"))["cuda"] is None
    assert describe_environment(torch.device("cuda", 3))["cuda"] == "Accelerator cuda:3"


def test_what_a_look_draws_here_or_on_a_device_changes_no_later_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device's generator is one of the host's: what is held is which one is asked for, and put back.
    there = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: there.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: there.set_state(state))
    kinds = {
        "torch": lambda: torch.rand(1).item(),
        "device": lambda: torch.rand(1, generator=there).item(),
        "numpy": np.random.random,
        "python": random.random,
    }
    for seed in range(50):
        order = random.Random(seed)
        names = order.choices(list(kinds), k=order.randint(1, 12))
        with kept_random_states(torch.device("cuda")):
            expected = {name: draw() for name, draw in kinds.items()}
        with (
            pytest.raises(ZeroDivisionError) if seed % 2 else nullcontext(),
            kept_random_states(torch.device("cuda")),
        ):
            for name in names:
                kinds[name]()
            1 // (1 - seed % 2)
        assert {name: draw() for name, draw in kinds.items()} == expected, names
