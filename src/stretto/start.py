"""Starts a job: checks what it is made of, settles it among ranks, and puts the parts of one rank together."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.averaging import DriftingReplica, FragmentedReplica, LocalReplica
from stretto.engine.accumulation import Accumulation, GradientBuffer
from stretto.engine.agreement import agree, share_start, untrained
from stretto.engine.comm_lane import CommLane
from stretto.engine.compute_lane import ComputeLane
from stretto.engine.failures import FailureDetector
from stretto.engine.hidden import HiddenAccumulation
from stretto.engine.job import Job
from stretto.engine.model import UserModel, is_in_a_job
from stretto.engine.options import Clock, Options, Quota, plan_quota
from stretto.engine.replica import Replica
from stretto.engine.report import settings_text
from stretto.engine.round import Progress
from stretto.engine.runtime import choose_runtime
from stretto.errors import ConfigError, UnsupportedModel
from stretto.exchange import WIRES, Exchange, NativeExchange, PackedWire, TwoLevelExchange, VerifiedExchange
from stretto.fields import did_you_mean
from stretto.flat import Layout, check_parameters, original_name, plan_layout
from stretto.guards import AtRest, Guard, ReplicaGuard
from stretto.guards.interpreter import GuardInterpreter, RehearsingOptimizer
from stretto.guards.replay import GuardedRounds
from stretto.guards.strikes import Strikes, describe_seat
from stretto.guards.weave import guarded
from stretto.optimizer import (
    SeveralSchedulers,
    ShardedOptimizer,
    members_of,
    name_of,
    read_hyperparameters,
    whole_groups,
)
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import Ledger, ledger_of

_OF_OTHERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Names of PyTorch's own wrappers: importing them all to ask for their kind would take a second."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a user has a job made of; equal on all ranks, but for the values of the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    micro_batches: int | Clock
    scheduler: Any
    guards: Sequence[Guard]
    options: Options

    def check(self) -> None:
        """Check the kind of every part, because many programs run without a type checker.

        Raises:
            ConfigError: Something is of another kind.
        """
        if not isinstance(self.model, nn.Module):
            raise UnsupportedModel(f"model: expected an nn.Module, found a {type(self.model).__name__}")
        kinds = {kind for module in self.model.modules() for kind in type(module).__mro__}
        for kind in kinds:
            if kind.__name__ in _OF_OTHERS and kind.__module__.startswith("torch."):
                raise UnsupportedModel(
                    f"model: expected the model itself, found a {kind.__name__}, which averages, copies or shards it "
                    "on its own; hand over the bare model (its .module)"
                )
        if any(map(is_in_a_job, self.model.parameters())):
            raise ConfigError(
                "model: expected parameters of no other job, found some of a DataParallel that has not ended; call its "
                "finish() first, or its fail(error) to give it up"
            )
        _check_scheduler(self.scheduler, self.optimizer)
        for guard in self.guards:
            if not isinstance(guard, Guard):
                is_kind = isinstance(guard, type) and issubclass(guard, Guard)
                meant = f"; did you mean {guard.__name__}()?" if is_kind else ""
                raise ConfigError(
                    f"guards: expected 'standard' or instances such as ReplicaGuard(), found {guard!r}{meant}"
                )
        if len({guard.name for guard in self.guards}) < len(self.guards):
            raise ConfigError(
                f"guards: expected each kind once, found {', '.join(guard.name for guard in self.guards)}"
            )


def start(parts: Parts, group: dist.ProcessGroup) -> Job:
    """Set up both lanes of one rank; all ranks of `group`, which is used by this job and nobody else, must call.

    Raises:
        ConfigError: Model, optimizer or settings cannot be trained, or differ between ranks. Raised before
            any collective but the one that compares settings.
    """
    progress = Progress()
    failures = FailureDetector(group, parts.options.timeout_seconds, progress)
    try:
        return _start(parts, progress, failures)
    except BaseException as error:  # what only one rank cannot train is told to the others
        failures.tell(error)
        raise


def _start(parts: Parts, progress: Progress, failures: FailureDetector) -> Job:
    parts.check()
    strategy, options, group = parts.strategy, parts.options, failures.group
    ledger = ledger_of(strategy)
    _check_guards(parts.guards, strategy, ledger)
    quota = plan_quota(strategy, parts.micro_batches, ledger.rounds)
    check_parameters(parts.model)
    layout, parameters = plan_layout(
        parts.model,
        parts.optimizer,
        world_size=group.size(),
        bucket_bytes=options.bucket_bytes,
        widen=options.accumulate == "fp32",
        parts=max(1, ledger.fragments),
        whole_groups=whole_groups(
            parts.optimizer
        ),  # a replicated optimizer, too, sees flat slices where owners do
    )
    exchange = _exchange(options, group, layout, failures)
    agree(exchange, {**_settings(parts), "model": layout.text()}, f"rank {group.rank()}, before step 1")
    for slot in layout.slots:
        flat = layout.sets[slot.set_index]
        if flat.accumulation_dtype != flat.dtype:
            parameters[slot.index].grad_dtype = flat.accumulation_dtype
    share_start(exchange, parameters, GradientBuffer(layout), parts.model)
    return _put_together(parts, ledger, exchange, parameters, progress, failures, quota)


def _put_together(
    parts: Parts,
    ledger: Ledger,
    exchange: Exchange,
    parameters: Sequence[nn.Parameter],
    progress: Progress,
    failures: FailureDetector,
    quota: Quota,
) -> Job:
    layout, options = exchange.layout, parts.options
    rehearses = any(guard.rehearses_step for guard in parts.guards)
    rank, num_owners = (0, 1) if ledger.replicated else (exchange.rank, exchange.world_size)
    sharded = (RehearsingOptimizer if rehearses else ShardedOptimizer)(
        layout, parameters, parts.optimizer, rank=rank, num_owners=num_owners
    )
    runtime = choose_runtime(
        exchange.group, layout.sets[0].device, overlaps=parts.strategy.overlaps or ledger.asks_ahead
    )
    replica = _kind_of_replica(ledger)(
        exchange,
        sharded,
        replicated=ledger.replicated,
        options=options,
        runtime=runtime,
        progress=progress,
    )
    performers = dict(replica.performers)
    interpreter = _interpreter(parts, ledger, replica)
    if interpreter is not None:
        performers |= interpreter.performers
    weave = None if interpreter is None else functools.partial(guarded, ask=interpreter.ask)
    comm = CommLane(parts.strategy, replica, performers, asks_ahead=ledger.asks_ahead, weave=weave)
    model = UserModel(parts.model, parameters, parts.optimizer, layout)
    compute = ComputeLane(
        model,
        comm,
        quota,
        failures=failures,
        scheduler=parts.scheduler,
        allow_unused=options.allow_unused,
        accumulate=_accumulation(parts, ledger, replica, quota),
    )
    job = Job(
        model=model,
        layout=layout,
        exchange=exchange,
        sharded=sharded,
        replica=replica,
        compute=compute,
        comm=comm,
    )
    if interpreter is not None:
        compute.model.listeners.append(GuardedRounds(job, interpreter))
        interpreter.start()
    return job


def _kind_of_replica(ledger: Ledger) -> Callable[..., Replica]:
    if ledger.fragments:
        return functools.partial(FragmentedReplica, fragments=ledger.fragments)
    if ledger.local:
        return LocalReplica
    return DriftingReplica if ledger.averages else Replica


def _interpreter(parts: Parts, ledger: Ledger, replica: Replica) -> GuardInterpreter | None:
    if not (parts.guards or replica.exchange.is_verified):
        return None
    return GuardInterpreter(
        parts.guards,
        replica,
        fixed=_fixed(parts),
        strikes=_strikes(parts.options, replica.exchange),
        has_copies=ledger.replicated and not ledger.local,
    )


def _accumulation(
    parts: Parts, ledger: Ledger, replica: Replica, quota: Quota
) -> Callable[[Sequence[nn.Parameter], GradientBuffer], Accumulation]:
    """Return what makes the job's accumulation: one from which gradients leave early, where they may.

    The round's end must be known ahead; nothing else may be sent beside the gradients; and nobody may have to look at
    them before. All this is the same on all ranks.
    """
    layout, owes = replica.exchange.layout, replica.exchange.feedback is not None
    replica.hides = (
        parts.options.hide_reductions
        and layout.world_size > 1
        and quota.is_fixed
        and ledger.rounds == 1
        and not (parts.strategy.overlaps or ledger.local or ledger.asks_ahead)
        and not any(guard.looks_before_departure(owes=owes) for guard in parts.guards)
        # Autograd has a thread for every device, and calls hooks on them side by side.
        and len({flat.device for flat in layout.sets}) == 1
    )
    if not replica.hides:
        return Accumulation
    return functools.partial(
        HiddenAccumulation, model=parts.model, replica=replica, micro_batches=quota.minima[0]
    )


def check_strategy(strategy: object) -> Strategy:
    """Return `strategy`, if it is one.

    Raises:
        ConfigError: It is not, but perhaps its class or its name.
    """
    if isinstance(strategy, Strategy):
        return strategy
    named = strategy.name if isinstance(strategy, type) and issubclass(strategy, Strategy) else strategy
    kind = STRATEGIES.get(named) if isinstance(named, str) else None
    meant = "" if kind is None else f"; did you mean {kind.__name__}()?"
    raise ConfigError(f"strategy: expected an instance such as ACCO(), found {strategy!r}{meant}")


def standard_guards(
    word: str, strategy: Strategy, options: Options
) -> tuple[tuple[Guard, ...], Options, dict[str, str]]:
    """Return the guards and options of `guards="standard"`: all that fits the strategy.

    Returns:
        The guards, the options with a verified exchange where one is possible, and why each other one is left out.

    Raises:
        ConfigError: The word is another one.
    """
    if word != "standard":
        hint = did_you_mean(word, ["standard"])
        raise ConfigError(f"guards={word!r}: expected 'standard' or a sequence of guards{hint}")
    ledger = ledger_of(strategy)
    left_out: dict[str, str] = {}
    fitting = []
    for guard in (ReplicaGuard(), AtRest()):
        reason = unfit(guard, strategy, ledger)
        if reason is None:
            fitting.append(guard)
        else:
            left_out[guard.name] = reason
    if options.exchange == "native" or options.ranks_per_node is not None:
        name = "ranks_per_node" if options.exchange != "native" else "exchange='native'"
        left_out["verified"] = f"does not work with {name}"
    else:
        options = dataclasses.replace(options, verified=True)
    return tuple(fitting), options, left_out


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, SeveralSchedulers):
        for member in scheduler.members:
            _check_scheduler(member, optimizer)
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: a ReduceLROnPlateau needs a metric at every step, which the library does not have; leave "
            "scheduler out, and call its step(metric) in on_update, with a metric that is the same on all ranks, such "
            "as update.loss"
        )
    if isinstance(scheduler, torch.optim.Optimizer) or not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"scheduler: expected one of torch.optim.lr_scheduler, or anything with step(), found {scheduler!r}"
        )
    of_another = getattr(scheduler, "optimizer", optimizer)
    if not any(of_another is one for one in (optimizer, *members_of(optimizer))):
        raise ConfigError(
            f"scheduler: expected one of the optimizer that is handed over, found one of another "
            f"{type(of_another).__name__}: its learning rates would have no effect"
        )


def _check_guards(guards: Sequence[Guard], strategy: Strategy, ledger: Ledger) -> None:
    for guard in guards:
        if reason := unfit(guard, strategy, ledger):
            raise ConfigError(f"guard {guard.name} {reason}; guards='standard' takes those that fit")


def unfit(guard: Guard, strategy: Strategy, ledger: Ledger) -> str | None:
    """Return why a guard cannot watch over a job under `strategy`; None if it can."""
    if guard.needs_equal_parameters and (ledger.local or ledger.averages):
        return (
            f"runs a rank's micro-batches again on another, and strategy {strategy.name} lets parameters differ "
            "between ranks"
        )
    if guard.overlaps and not strategy.overlaps:
        return (
            f"runs beside the next update's gradients, and strategy {strategy.name} waits for its "
            "communication lane"
        )
    return None


def _strikes(options: Options, exchange: Exchange) -> Strikes:
    """Return a count of strikes that knows every rank's host and device; none travels where nothing is counted."""
    if options.strikes is None:
        return Strikes(options, [])
    own = describe_seat(exchange.layout.sets[0].device).encode()
    return Strikes(options, [seat.decode() for seat in exchange.gather_records(own)])


def _fixed(parts: Parts) -> list[tuple[str, Tensor]]:
    """Return what nobody is to write: floating-point buffers may be averaged (`stretto.engine.statistics`).

    Beside a lane that overlaps, forward passes may be writing any buffer.
    """
    if parts.strategy.overlaps:
        return []
    model = parts.model
    is_buffer = {original_name(name) for name, _ in model.named_buffers()}
    return [
        (name, tensor)
        for name, tensor in untrained(model)
        if not (name in is_buffer and tensor.is_floating_point())
    ]


def _settings(parts: Parts) -> dict[str, str]:
    """Return what ranks must hold alike, beside the layout, as text by name."""
    options = parts.options
    chosen = [f"{field.name}={getattr(options, field.name)!r}" for field in dataclasses.fields(options)]
    fixed = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in untrained(parts.model)]
    return {
        "strategy": repr(parts.strategy),
        "micro_batches": repr(parts.micro_batches),
        "options": "\n".join(chosen),
        "optimizer": name_of(parts.optimizer),
        "optimizer settings": settings_text(read_hyperparameters(parts.optimizer)),
        "frozen parameters and buffers": "\n".join(fixed),
        "guards": "\n".join(map(repr, parts.guards)),
        "scheduler": type(parts.scheduler).__name__,
    }


def _exchange(
    options: Options, group: dist.ProcessGroup, layout: Layout, failures: FailureDetector
) -> Exchange:
    wire = WIRES[options.wire]
    native = options.exchange == "native" or (
        options.exchange == "auto" and layout.sets[0].device.type == "cuda"
    )
    if options.ranks_per_node is not None:
        return TwoLevelExchange(group, layout, wire, failures.wait, options.ranks_per_node)
    kind = Exchange
    if options.verified:
        kind = VerifiedExchange
    elif native and not isinstance(wire, PackedWire):
        kind = NativeExchange
    return kind(group, layout, wire, failures.wait)
