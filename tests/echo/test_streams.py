"""Streaming data sets of Hugging Face: every pass begins where it should, also after a resume in the middle."""

import functools
from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from stretto import Bernoulli, EchoLoader, EchoOptions, Even

LENGTH = 4


@functools.cache
def numbers() -> Dataset:
    return Dataset.from_dict({"number": list(range(2 * LENGTH))})


def stream() -> IterableDataset:
    return numbers().to_iterable_dataset(num_shards=2).batch(2)


def passes(loader: EchoLoader[Any], count: int) -> list[list[int]]:
    return [[batch["number"][0] // 2 for batch in loader] for _ in range(count)]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("resume", ["refetch", "drop"])
@pytest.mark.parametrize("plan", [Even(2.5), Bernoulli(0.4)], ids=repr)
def test_a_run_goes_on_at_every_cut_and_later_passes_begin_at_the_beginning(plan: Any, resume: Any) -> None:
    options = EchoOptions(resume=resume)
    whole = passes(EchoLoader(stream(), plan, options=options), 3)
    for epoch in range(2):
        for cut in range(len(whole[epoch]) + 1):
            left = EchoLoader(stream(), plan, options=options)
            passes(left, epoch)
            batches = iter(left)
            seen = [next(batches)["number"][0] // 2 for _ in range(cut)]
            state = left.state_dict()
            resumed = EchoLoader(stream(), plan, options=options)
            resumed.load_state_dict(state)
            first, *later = passes(resumed, 3 - epoch)
            assert [one for one in later if set(one) != set(range(LENGTH))] == [], (epoch, cut)
            if resume != "drop" or not state["position"]["in_epoch"]:
                assert [seen + first, *later] == whole[epoch:], (epoch, cut)


def test_a_state_of_another_epoch_is_taken_up_in_its_epoch() -> None:
    def shuffled() -> EchoLoader[Any]:
        return EchoLoader(stream().shuffle(seed=3, buffer_size=1), Even(1))

    left = shuffled()
    left.set_epoch(1)
    whole = passes(left, 1)[0]
    left = shuffled()
    left.set_epoch(1)
    batches = iter(left)
    seen = [next(batches)["number"][0] // 2 for _ in range(2)]
    resumed = shuffled()
    resumed.load_state_dict(left.state_dict())
    assert seen + passes(resumed, 1)[0] == whole
