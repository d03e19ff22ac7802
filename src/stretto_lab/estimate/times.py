"""How long an update takes, by the time model (`docs/time-model.md`), from a strategy's ledger and a few figures.

Nothing here imports PyTorch. The model takes ranks as equally fast, and computing as undisturbed by communication. An
optimizer step is part of the update's computing. Per update of n micro-batches of t seconds, with R for reducing the
gradients, G for gathering the parameters and C for both:

    zero1       n t + max(R - t_b (K - 1) / K, R / K) + G      K buckets leave during the last backward pass t_b
    dpu, wp     max(n t, C)
    acco        max(n_B t, C) + max(n_A t, C)                  C is one of its two exchanges
    local       n t + rate · average
    diloco      n t + F/H · max(0, average / F - delay n t)    F fragments leave in H updates; average is one
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from stretto.errors import ConfigError
from stretto.link import Link
from stretto.strategies import Average, DiLoCo, Strategy
from stretto.strategies.ledger import Ledger, ledger_of

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
"""By wire: bytes of one gradient with its share of the block's scale; a test holds them to `stretto.exchange.WIRES`."""
_BACKWARD = 2 / 3
"""Of a micro-batch: a backward pass costs about twice its forward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job and its link, in a few figures."""

    parameters: int
    """Trainable ones."""
    update_seconds: float
    """Of computing, per rank and update, without any communication."""
    ranks: int
    """With a link of their own each."""
    micro_batches: int
    """Per rank and update."""
    link: Link
    """Of every rank, in each direction."""
    bucket_bytes: int = 2**20
    """Of a bucket of fp32 gradients: the default of `Options.bucket_bytes`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """What an update of one strategy on one wire takes."""

    seconds: float
    """Of an update."""
    exposed_seconds: float
    """Of it, waiting for communication."""
    wire_seconds: float
    """For which the link is busy, hidden or not; a mean over updates."""
    sent_bytes: float
    """By each rank, per update."""
    memory_bytes: float
    """Of each rank: an fp32 model, gradients, masters and an optimizer with two moments; no activations."""


def time_of(work: Work, strategy: Strategy, wire: str) -> Time:
    """Return what an update takes.

    Raises:
        ConfigError: The time model has no row for the strategy, or not enough micro-batches.
    """
    ledger = ledger_of(strategy)
    if ledger.rounds > work.micro_batches:
        raise ConfigError(
            f"micro_batches={work.micro_batches}: {strategy.name} needs at least {ledger.rounds}"
        )
    element = ELEMENT_BYTES[wire]
    sent = work.parameters * _share_sent(work) * ledger.wire_bytes(element, max(element, 2.0))
    busy = _seconds(work.link, sent)
    seconds = _update_seconds(work, strategy, ledger, busy)
    memory = ledger.memory_bytes(strategy, parameter=4, accumulation=4, world_size=work.ranks)
    return Time(
        seconds=seconds,
        exposed_seconds=max(0.0, seconds - work.update_seconds),
        wire_seconds=busy,
        sent_bytes=sent,
        memory_bytes=work.parameters * memory,
    )


def _update_seconds(work: Work, strategy: Strategy, ledger: Ledger, busy: float) -> float:
    computing = work.update_seconds
    if isinstance(strategy, Average):
        strategy = strategy.outer
    if isinstance(strategy, DiLoCo):
        transfer = busy / ledger.outer_steps / strategy.fragments
        rate = strategy.fragments / strategy.interval
        return computing + rate * max(0.0, transfer - strategy.delay * computing)
    if ledger.local:
        return computing + busy
    exchange = busy / ledger.rounds
    micro_batch = computing / work.micro_batches
    if strategy.overlaps:
        return sum(
            max(quota * micro_batch, exchange) for quota in strategy.quotas(work.micro_batches, ledger.rounds)
        )
    if ledger.replicated:
        raise ConfigError(
            f"{strategy.name}: the time model knows only bounds; zero1 sends as much and is exact too"
        )
    buckets = max(1, math.ceil(4 * work.parameters / work.bucket_bytes))
    reducing, gathering = busy / 2, busy / 2
    hidden = _BACKWARD * micro_batch * (buckets - 1) / buckets
    return computing + max(reducing - hidden, reducing / buckets) + gathering


def _share_sent(work: Work) -> float:
    return (work.ranks - 1) / work.ranks


def _seconds(link: Link, sent_bytes: float) -> float:
    return 0.0 if link.bits_per_second is None else 8 * sent_bytes / link.bits_per_second
