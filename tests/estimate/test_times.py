"""What the time model says agrees with the strategies' own code in virtual time, and needs no PyTorch."""

import dataclasses
import random

import pytest

from stretto.exchange import WIRES
from stretto.flat import ALIGNMENT, bucket_bytes_among
from stretto.link import MESSAGE_BYTES, Link
from stretto_lab.estimate.formulas import last_share
from stretto_lab.estimate.times import ELEMENT_BYTES, Work, time_of
from stretto_lab.train.arms import parse_arm
from tests.draws import seeds
from tests.plan.machine import machine_of, priced
from tests.wires import OF_GRADIENTS

CLOSE = 0.1
ARMS = (
    "zero1",
    "wp",
    "dpu",
    "acco",
    "local:rate=0.25",
    "diloco:interval=4:fragments=2:delay=1",
    "average:10",
    "diloco:interval=10",
)


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("seed", seeds(24))
def test_an_update_takes_what_it_takes_in_virtual_time(seed: int) -> None:
    draw = random.Random(seed)
    arm = parse_arm(f"{ARMS[seed % len(ARMS)]}:wire={draw.choice(OF_GRADIENTS)}")
    parameters = round(10 ** draw.uniform(7, 9.5))
    work = Work(
        parameters=parameters,
        bucket_bytes=parameters // 8,  # 32 buckets, so that a twin is small
        update_seconds=10 ** draw.uniform(-1, 1),
        ranks=draw.choice((2, 4, 8, 64)),
        micro_batches=draw.randint(2, 8),
        link=Link(bits_per_second=10 ** draw.uniform(7.5, 11)),
    )
    micro_batch_ms = 1000 * work.update_seconds / work.micro_batches
    machine = machine_of(work.ranks, micro_batch_ms, work.link, {}, work.parameters)
    found = time_of(work, arm.strategy(), arm.wire)
    of_plan = priced(arm.text, machine, work.micro_batches, work.bucket_bytes)
    assert found.seconds == pytest.approx(of_plan.seconds, rel=CLOSE)
    assert found.sent_bytes == pytest.approx(of_plan.sent_bytes, rel=CLOSE)
    assert found.memory_bytes == pytest.approx(of_plan.memory_bytes)


def test_an_exchange_takes_as_long_as_the_slower_of_core_and_link() -> None:
    for arm in map(parse_arm, ("zero1", "wp", "dpu", "acco", "average:10", "diloco:interval=10")):
        work = Work(
            parameters=10**8, update_seconds=1.0, ranks=1024, micro_batches=4, link=Link(), packs_on_core=True
        )
        on_core = time_of(work, arm.strategy(), "rotated2")
        link = Link(bits_per_second=8 * on_core.sent_bytes / on_core.core_seconds)
        on_link = time_of(
            dataclasses.replace(work, link=link, packs_on_core=False), arm.strategy(), "rotated2"
        )
        assert (on_core.seconds, on_core.wire_seconds, on_link.core_seconds) == (
            pytest.approx(on_link.seconds),
            0,
            0,
        )


@pytest.mark.parametrize("seed", seeds(40))
def test_the_last_bucket_is_that_of_the_layout_on_any_number_of_ranks(seed: int) -> None:
    draw = random.Random(seed)
    parameters, ranks = round(10 ** draw.uniform(5, 9)), 2 ** draw.randint(0, 10)
    wire = draw.choice(OF_GRADIENTS)
    on_wire = ELEMENT_BYTES[wire] * parameters
    size = bucket_bytes_among(ranks, 2**20, 4 * parameters, round(on_wire))
    found = last_share(parameters, 2**20, on_wire, ranks * MESSAGE_BYTES)
    # The layout rounds a bucket up to what all ranks are aligned to.
    rounding = 8 * ranks * ALIGNMENT
    assert 1 / found == pytest.approx(4 * parameters / size, abs=1, rel=rounding / (size - rounding))


def test_bytes_of_an_element_are_those_of_the_wires() -> None:
    numel, stored = 2**12, 4  # bytes of a float32: no value is sent in more than it is stored in
    assert {name: min(stored, wire.num_bytes(numel) / numel) for name, wire in WIRES.items()} == ELEMENT_BYTES
