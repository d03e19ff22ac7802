"""Starts a job: plans the layout, settles it among ranks, and sets up both lanes."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine.agreement import agree, gather_text, share_start, untrained
from stretto.engine.compute_lane import ComputeLane
from stretto.engine.guarded_model import GuardedModel
from stretto.engine.lane import Lane
from stretto.engine.options import Options
from stretto.engine.quota import Clock, plan_quota
from stretto.engine.roll_call import settings_text
from stretto.engine.runtime import choose_runtime
from stretto.engine.sentry import Sentry
from stretto.engine.strikes import Strikes, describe_seat
from stretto.engine.watch import Watch
from stretto.errors import ConfigError, UnsupportedModel, UnsupportedOptimizer
from stretto.exchange import (
    DirectExchange,
    Exchange,
    Int8Exchange,
    NativeExchange,
    VerifiedExchange,
    wire_dtype,
)
from stretto.flat import GradientBuffer, Layout, plan_layout
from stretto.guards import Guard
from stretto.optimizer import ShardedOptimizer, check_shardable, read_hyperparameters
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger, ledger_of


def start_lanes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    micro_batches: int | Clock,
    guards: Sequence[Guard],
    options: Options,
    watch: Watch,
) -> ComputeLane:
    """Set up both lanes of one rank; all ranks of the watch's group must call.

    Args:
        model: Trained in place; takes rank 0's values.
        optimizer: The user's; read, never stepped.
        strategy: What the communication lane runs.
        micro_batches: Per rank and update, or by the clock.
        guards: What watches over the job's values.
        options: Everything else.
        watch: Of a group that is used by this job and nobody else.

    Raises:
        ConfigError: Model, optimizer or settings cannot be trained, or differ between ranks. Raised before
            any collective but the one that compares settings.
    """
    _check_kinds(model, optimizer, strategy)
    ledger = ledger_of(strategy)
    _check_guards(guards, strategy, ledger)
    _check_wire(options, strategy, ledger)
    group = watch.group
    quota = plan_quota(strategy, micro_batches, ledger.rounds)
    layout, parameters = plan_layout(
        model,
        optimizer,
        world_size=group.size(),
        bucket_bytes=options.bucket_bytes,
        widen=options.accumulate == "fp32",
    )
    # A replicated optimizer, too, sees flat slices and not the parameters' shapes.
    check_shardable(optimizer)
    exchange = _exchange(options, group, layout, watch)
    settings = _settings(model, optimizer, strategy, micro_batches, options)
    watched = "\n".join(map(repr, guards))
    agree(
        exchange,
        {**settings, "guards": watched, "model": layout.text()},
        f"rank {group.rank()}, before step 1",
    )
    for flat, parameter in ((layout.sets[s.set_index], parameters[s.index]) for s in layout.slots):
        if flat.accumulation_dtype != flat.dtype:
            parameter.grad_dtype = flat.accumulation_dtype
    share_start(exchange, parameters, GradientBuffer(layout), model)
    rank, num_owners = (0, 1) if ledger.replicated else (group.rank(), group.size())
    owner = ShardedOptimizer(layout, parameters, optimizer, rank=rank, num_owners=num_owners)
    runtime = choose_runtime(group, layout.sets[0].device, overlaps=strategy.overlaps or ledger.asks_ahead)
    strikes = _strikes(options, exchange)
    sentry = Sentry(
        guards, exchange, owner, _fixed(model), strikes, replicated=ledger.replicated and not ledger.local
    )
    lane = Lane(strategy, exchange, owner, watch, sentry, options=options, runtime=runtime)
    guarded = GuardedModel(model, parameters, optimizer, layout, is_sealed=sentry.watches_shown)
    return ComputeLane(
        guarded,
        layout,
        lane,
        runtime,
        quota,
        strategy=strategy,
        options=options,
    )


def _check_kinds(model: object, optimizer: object, strategy: object) -> None:
    """Tell apart what a type checker would, for those who run none."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"model: expected an nn.Module, found a {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(
            "model: expected the model itself, found a DistributedDataParallel, which averages gradients on its own; "
            "hand over its .module"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOptimizer(
            f"optimizer: expected a torch.optim.Optimizer, found a {type(optimizer).__name__}"
        )
    # Adagrad has state from the start, at step 0; a momentum has no step count.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        raise UnsupportedOptimizer(
            "optimizer: expected one that has not stepped yet, found state that the library's private optimizer "
            "would not have; make it anew and wrap it before training, or go on from a checkpoint"
        )
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy: expected an instance such as ACCO(), found {strategy!r}")


def _check_wire(options: Options, strategy: Strategy, ledger: Ledger) -> None:
    if ledger.averages and options.wire == "int8":
        raise ConfigError(
            f"Options(wire='int8') is for gradients, and strategy {strategy.name} sends parameters; take wire='bf16'"
        )


def _check_guards(guards: Sequence[Guard], strategy: Strategy, ledger: Ledger) -> None:
    for guard in guards:
        if not isinstance(guard, Guard):
            raise ConfigError(f"guards: expected instances such as ReplicaGuard(), found {guard!r}")
        if guard.needs_equal_parameters and ledger.averages:
            raise ConfigError(
                f"guard {guard.name} runs a rank's micro-batches again on another, and strategy {strategy.name} lets "
                "parameters differ between ranks; take another strategy"
            )
        if guard.needs_replicas and not ledger.replicated:
            raise ConfigError(
                f"guard {guard.name} compares replicas with each other, and strategy {strategy.name} shards the "
                "optimizer, so that every rank holds another part; see the table in docs/guards.md"
            )
        if guard.overlaps and not strategy.overlaps:
            raise ConfigError(
                f"guard {guard.name} runs beside the next update's gradients, and strategy {strategy.name} waits for "
                "its lane; take a strategy that overlaps"
            )


def _strikes(options: Options, exchange: Exchange) -> Strikes:
    """Return a count of strikes that knows every rank's host and device; none travels where nothing is counted."""
    seat = describe_seat(exchange.layout.sets[0].device)
    return Strikes(options, [] if options.strikes is None else gather_text(exchange, seat))


def _fixed(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return what nobody is to write: floating-point buffers may be averaged (`stretto.engine.statistics`)."""
    is_buffer = {name for name, _ in model.named_buffers()}
    return [
        (name, tensor)
        for name, tensor in untrained(model)
        if not (name in is_buffer and tensor.is_floating_point())
    ]


def _settings(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    micro_batches: int | Clock,
    options: Options,
) -> dict[str, str]:
    """Return what ranks must hold alike, beside the layout, as text by name."""
    chosen = [f"{field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
    fixed = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in untrained(model)]
    return {
        "strategy": repr(strategy),
        "micro_batches": repr(micro_batches),
        "options": "\n".join(chosen),
        "optimizer": type(optimizer).__name__,
        "optimizer settings": settings_text(read_hyperparameters(optimizer)),
        "frozen parameters and buffers": "\n".join(fixed),
    }


def _exchange(options: Options, group: dist.ProcessGroup, layout: Layout, watch: Watch) -> Exchange:
    if options.verified:
        return VerifiedExchange(group, layout, wire_dtype(options.wire), watch.wait)
    if options.wire == "int8":
        return Int8Exchange(group, layout, watch.wait)
    native = options.exchange == "native" or (
        options.exchange == "auto" and layout.sets[0].device.type == "cuda"
    )
    kind = NativeExchange if native else DirectExchange
    return kind(group, layout, wire_dtype(options.wire), watch.wait)
