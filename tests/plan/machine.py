"""A machine as `stretto plan` would measure it, and what an update costs on it."""

from stretto.exchange import WIRES
from stretto.groups import Link
from stretto_lab.plan import Machine, Price, price
from stretto_lab.train.arms import parse_arm

BUCKET_BYTES = 2**20
MACHINE = Machine(
    ranks=2,
    parameters=2_000_000,
    forward_seconds=0.05,
    backward_seconds=0.1,
    load_seconds=0.0,
    step_seconds=0.02,
    exchange_seconds={"fp32": 0.01, "bf16": 0.012, "int8": 0.03, "rotated2": 0.06, "int4": 0.03},
    link=Link(bits_per_second=2e8),
    cores=8,
)


def machine_of(
    ranks: int, micro_batch_ms: float, link: Link, slow: dict[int, float], parameters: int
) -> Machine:
    """What would be measured where a simulation takes place: steps and packing take no time there."""
    return Machine(
        ranks=ranks,
        parameters=parameters,
        forward_seconds=micro_batch_ms / 3000,
        backward_seconds=2 * micro_batch_ms / 3000,
        load_seconds=0.0,
        step_seconds=0.0,
        exchange_seconds=dict.fromkeys(WIRES, 0.0),
        link=link,
        cores=8,
    ).with_ranks(ranks, slow)


_PRICED: dict[str, Price] = {}


def priced(
    arm: str, machine: Machine = MACHINE, micro_batches: int = 4, bucket_bytes: int = BUCKET_BYTES
) -> Price:
    """Return the price of an update, which is computed once in a process."""
    asked = repr((arm, machine, micro_batches, bucket_bytes))
    if asked not in _PRICED:
        _PRICED[asked] = price(
            parse_arm(arm), machine, micro_batches=micro_batches, bucket_bytes=bucket_bytes
        )
    return _PRICED[asked]


def seconds(arm: str, machine: Machine = MACHINE) -> float:
    return priced(arm, machine).seconds
