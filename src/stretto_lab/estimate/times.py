"""How long an update takes, by the time model (`docs/time-model.md`), from a strategy's ledger and a few figures.

Nothing here imports PyTorch. The model takes ranks as equally fast, and computing as undisturbed by communication. An
optimizer step is part of the update's computing. Per update of n micro-batches of t seconds, with R for reducing the
gradients, G for gathering the parameters and C for both:

    zero1       n t + max(R - t_b (K - 1) / K, R / K) + G      K buckets leave during the last backward pass t_b
    dpu, wp     max(n t, C)
    acco        max(n_B t, C) + max(n_A t, C)                  C is one of its two exchanges
    local       n t + rate · average
    diloco      n t + F/H · max(0, average / F - delay n t)    F fragments leave in H updates; average is one

Each is the computing, and a sum over parts of the communication, each hidden by a part of the computing.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stretto.errors import ConfigError
from stretto.link import MESSAGE_BYTES, Link
from stretto.strategies import Average, DiLoCo, Strategy
from stretto.strategies.ledger import Ledger, ledger_of
from stretto_lab.estimate.formulas import busy_seconds, last_share, of_rank, sent_bytes, waiting_seconds

ELEMENT_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "fp32": 4.0,
        "bf16": 2.0,
        "int8": 1 + 1 / 16,
        "int4": 1 / 2 + 1 / 32,
        "int2": 1 / 4 + 1 / 32,
        **{f"rotated{bits}": bits / 8 + 1 / 32 for bits in (4, 3, 2, 1)},
    }
)
"""Bytes per gradient on each wire, with its share of the block's scale; a test compares them with
`stretto.exchange.WIRES`."""
_PLAIN, _KEEPING = ("fp32", "bf16"), ("int8", "int4", "int2")
"""Wires that send values, and wires that keep their rounding errors for the next round."""
_CORE_SECONDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "int8": (2.6e-9, 1.4e-9),
        "int4": (3.0e-9, 1.2e-9),
        "int2": (2.8e-9, 1.2e-9),
        "rotated4": (5.2e-9, 4.0e-9),
        "rotated3": (6.2e-9, 4.7e-9),
        "rotated2": (6.4e-9, 4.1e-9),
        "rotated1": (5.6e-9, 4.2e-9),
    }
)
"""Seconds in which one core packs a value on each wire, for any number of ranks, and reads it: measured on int4 and
rotated2 (`benchmarks/results/2026-11-28-rotated-rows`), the others from their ratio to these two there."""
_BACKWARD = 2 / 3
"""Share of a micro-batch: a backward pass costs about twice its forward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job and its link as plain numbers."""

    parameters: int
    """Trainable parameters."""
    update_seconds: float
    """Seconds of computing per rank and update, without communication."""
    ranks: int
    """Number of ranks, each with its own link."""
    micro_batches: int
    """Micro-batches per rank and update."""
    link: Link
    """The link of every rank, in each direction."""
    packs_on_core: bool = False
    """Whether one core of each rank packs; a device takes next to no time."""
    bucket_bytes: int = 2**20
    """Size of a bucket of fp32 gradients on few ranks: the default of `Options.bucket_bytes`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """Time, bytes and memory of an update, for one strategy on one wire."""

    seconds: float
    """Seconds per update."""
    exposed_seconds: float
    """Seconds of these spent waiting for communication."""
    wire_seconds: float
    """Seconds for which the link is busy, hidden or not; a mean over updates."""
    core_seconds: float
    """Seconds for which a core packs and reads; an exchange takes as long as the slower of core and link."""
    sent_bytes: float
    """Bytes that each rank sends per update."""
    memory_bytes: float
    """Bytes on each rank: an fp32 model, gradients, masters, an optimizer with two moments, and the wire's buffers; no
    activations."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of an update's communication, and what hides it."""

    share: float
    """Share of the seconds for which an update keeps the link busy."""
    hidden: float
    """Share of an update's computing during which it is sent."""
    times: float = 1.0
    """How often the part is sent per update; a mean over updates."""
    in_buckets: bool = False
    """Whether it is sent bucket by bucket during that computing, the last bucket after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bill:
    """The demands of an update for one strategy on one wire, for any model, link and number of ranks."""

    bytes_each: float
    """Bytes sent per parameter, before the factor (N - 1) / N of N ranks."""
    whole: float
    """Bytes per parameter that every rank holds, out of `Time.memory_bytes`."""
    shared: float
    """Bytes per parameter that all ranks hold together, out of `Time.memory_bytes`."""
    core_whole: float
    """Seconds per parameter in which a core packs its own values for all ranks, and unpacks theirs."""
    core_shared: float
    """Seconds per parameter in which all ranks together pack the values that they publish."""
    parts: Sequence[Part]
    """The parts of the communication."""


def bill_of(strategy: Strategy, wire: str, micro_batches: int) -> Bill:
    """Return the demands of an update.

    Raises:
        ConfigError: The time model has no row for the strategy, or not enough micro-batches.
    """
    ledger = ledger_of(strategy)
    if ledger.rounds > micro_batches:
        raise ConfigError(f"micro_batches={micro_batches}: {strategy.name} needs at least {ledger.rounds}")
    element = ELEMENT_BYTES[wire]
    pack, read = _CORE_SECONDS.get(wire, (0.0, 0.0))
    sums, gathers = ledger.gradient_transfers + ledger.outer_steps, ledger.gathers + ledger.outer_steps
    alone, two = (bytes_held(strategy, wire, ranks) for ranks in (1, 2))
    return Bill(
        bytes_each=ledger.wire_bytes(element, max(element, 2.0)),
        whole=2 * two - alone,
        shared=2 * (alone - two),
        core_whole=sums * (pack + read) + gathers * read,
        core_shared=gathers * pack,
        parts=_parts(strategy, ledger, micro_batches),
    )


def time_of(work: Work, strategy: Strategy, wire: str) -> Time:
    """Return the time of an update; raises as `bill_of`."""
    bill = bill_of(strategy, wire, work.micro_batches)
    sent = sent_bytes(work.parameters, work.ranks, bill.bytes_each)
    on_link = busy_seconds(sent, work.link.bits_per_second or math.inf)
    on_core = work.packs_on_core * of_rank(work.parameters, work.ranks, bill.core_whole, bill.core_shared)
    busy = max(on_link, on_core)
    on_wire = ELEMENT_BYTES[wire] * work.parameters
    last = last_share(work.parameters, work.bucket_bytes, on_wire, work.ranks * MESSAGE_BYTES)
    waiting = sum(
        part.times
        * waiting_seconds(work.update_seconds, busy, part.share, part.hidden, last if part.in_buckets else 0)
        for part in bill.parts
    )
    return Time(
        seconds=work.update_seconds + waiting,
        exposed_seconds=waiting,
        wire_seconds=on_link,
        core_seconds=on_core,
        sent_bytes=sent,
        memory_bytes=of_rank(work.parameters, work.ranks, bill.whole, bill.shared),
    )


def bytes_held(strategy: Strategy, wire: str, ranks: int) -> float:
    """Return the bytes per parameter of `Time.memory_bytes`, if `ranks` share the optimizer."""
    held = ledger_of(strategy).memory_bytes(strategy, parameter=4, accumulation=4, world_size=ranks)
    return held + kept_by_wire(strategy, wire, ranks)


def kept_by_wire(strategy: Strategy, wire: str, ranks: int) -> float:
    """Return the bytes per parameter that a wire keeps on a rank, for an fp32 model and fixed counts."""
    ledger, is_packed, keeps = ledger_of(strategy), wire not in _PLAIN, wire in _KEEPING
    if ledger.fragments:  # rounding errors, and the owner's values, of which the anchor has what was sent
        return 4 * keeps + 4 * is_packed / ranks
    steps_alone = ledger.local
    leaves_early = ledger.rounds == 1 and not (strategy.overlaps or steps_alone or ledger.asks_ahead)
    last_average = 4 * (ledger.may_average and wire != "fp32")
    errors = 0 if steps_alone else 4 * keeps
    sent = 4 * (keeps and leaves_early)  # a gradient is still added to while it is sent with its errors
    anchor = 0 if steps_alone or ledger.replicated else 4 * is_packed
    return last_average + errors + sent + anchor


def _parts(strategy: Strategy, ledger: Ledger, micro_batches: int) -> list[Part]:
    if isinstance(strategy, Average):
        strategy = strategy.outer
    if isinstance(strategy, DiLoCo):
        rate = strategy.fragments / strategy.interval
        return [Part(1 / ledger.outer_steps / strategy.fragments, strategy.delay, times=rate)]
    if ledger.local:
        return [Part(1.0, 0.0)]
    if strategy.overlaps:
        quotas = strategy.quotas(micro_batches, ledger.rounds)
        return [Part(1 / ledger.rounds, quota / micro_batches) for quota in quotas]
    if ledger.replicated:
        raise ConfigError(
            f"{strategy.name}: the time model has only bounds for it; zero1 sends as much and is exact too"
        )
    reducing = Part(1 / 2, _BACKWARD / micro_batches, in_buckets=True)
    return [reducing, Part(1 / 2, 0.0)]
