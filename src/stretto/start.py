"""Starts a job: checks its parts, compares settings between ranks, and builds the parts of one rank."""

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.averaging import DivergingReplica, LocalReplica
from stretto.averaging.worker import Worker, check_worker, exchange_inside
from stretto.engine.accumulation import Accumulate, Accumulation, GradientBuffer
from stretto.engine.agreement import agree, share_start
from stretto.engine.comm_lane import CommLane, Weave
from stretto.engine.compute_lane import ComputeLane
from stretto.engine.early_accumulation import EarlyAccumulation
from stretto.engine.failures import BACKEND_MARGIN_SECONDS, FailureDetector
from stretto.engine.frozen_state import frozen_state
from stretto.engine.holding import mark_on
from stretto.engine.job import Job
from stretto.engine.messages import check_messages
from stretto.engine.model import UserModel
from stretto.engine.node_group import NodeGroup, NodeRuntime
from stretto.engine.noisy import NoisyRank
from stretto.engine.on_device import choose_runtime
from stretto.engine.options import BufferChoices, Clock, Options, Quota, Total, check_formats, plan_quota
from stretto.engine.replica import Replica
from stretto.engine.report import ADDRESS, settings_text
from stretto.engine.round import Progress
from stretto.errors import ConfigError, UnsupportedModel, UnsupportedOptimizer
from stretto.exchange import (
    FP32,
    WIRES,
    Exchange,
    PackedWire,
    VerifiedExchange,
)
from stretto.exchange.transfer import Wait
from stretto.flat import Layout, check_parameters, most_rows, original_name, plan_layout, shard_of
from stretto.groups import may_wait_again, part_of, private_group
from stretto.guards import Guard
from stretto.guards.fitting import check_guards
from stretto.guards.interpreter import GuardInterpreter
from stretto.guards.replay import GuardedRounds
from stretto.guards.strikes import Strikes, describe_seat
from stretto.guards.weave import guarded
from stretto.optimizer import (
    ShardedOptimizer,
    StateKinds,
    check_scheduler,
    name_of,
    over_shards,
    read_hyperparameters,
    whole_groups,
)
from stretto.strategies import Strategy
from stretto.strategies.ledger import Ledger, ledger_of

if TYPE_CHECKING:
    from stretto.engine.sharding import Sharding  # which imports FSDP2

_OF_OTHERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Names of other libraries' wrappers: importing them to check types would take a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a job that the user passes; equal on all ranks, except for the values of the model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    micro_batches: int | Total | Clock
    scheduler: Any
    guards: Sequence[Guard]
    options: Options

    @functools.cached_property
    def ledger(self) -> Ledger:
        """The strategy's ledger, read once: it may simulate a thousand updates."""
        return ledger_of(self.strategy)

    def check(self) -> None:
        """Check the type of every part, because many programs run without a type checker.

        Raises:
            ConfigError: A part has another type.
        """
        if not isinstance(self.model, nn.Module):
            raise UnsupportedModel(f"model: expected an nn.Module, found a {type(self.model).__name__}")
        kinds = {kind for module in self.model.modules() for kind in type(module).__mro__}
        for kind in kinds:
            if kind.__name__ in _OF_OTHERS and kind.__module__.startswith("torch."):
                raise UnsupportedModel(
                    f"model: expected the model itself, found a {kind.__name__}, which averages, copies or "
                    "shards it ; pass the bare model (its .module)"
                )
        marks = {mark for mark in map(mark_on, self.model.parameters()) if mark is not None}
        if any(mark.is_held for mark in marks):
            gc.collect()  # a job that was dropped may be held by nothing but a cycle
        if any(mark.is_held for mark in marks):
            raise ConfigError(
                "model: expected parameters of no other job, found parameters of a DataParallel that has not "
                "ended; call its finish() first, or its fail(error) to end it"
            )
        check_scheduler(self.scheduler, self.optimizer)
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


def sharding_for(
    parts: Parts,
    mesh: object,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int] | None,
) -> "tuple[Sharding | None, Sequence[int] | None]":
    """Return which ranks hold shards of the model together, and which train; all ranks of the node must call it.

    Args:
        parts: The parts of the job.
        mesh: The dimension across which the job trains; None if no rank holds a shard.
        group: The group that trains; with a mesh, a group of the same ranks in the same order.
        ranks: The ranks that train, instead of a group and a mesh.

    Raises:
        ConfigError: The model is not sharded over another dimension of that mesh, or a setting does not work with
            shards.
    """
    if mesh is None:
        return None, ranks
    from stretto.engine.sharding import sharding_of  # FSDP2 takes half a second to import

    _check_fits_shards(parts)
    if ranks is not None:
        raise ConfigError("mesh says which ranks train: omit ranks")
    sharding = sharding_of(parts.model, mesh)
    if group is None:
        return sharding, sharding.everyone
    if sharding.everyone != list(range(group.size())) or dist.get_rank() != group.rank():
        raise ConfigError(
            f"mesh and group: expected the same ranks in the same order, found ranks {sharding.everyone} on the mesh, "
            f"and a group of {group.size()}, whose rank {group.rank()} is rank {dist.get_rank()} of torch's default "
            "group: make the mesh of the group's ranks (under survives, term.meshes()), or omit group"
        )
    return sharding, None


def _check_fits_shards(parts: Parts) -> None:
    """Raise unless all settings work with shards inside nodes."""
    parts.check()
    unfit = {
        f"strategy {parts.strategy.name}, which averages what should be equal": parts.ledger.may_average
        and not parts.ledger.local,
        "worker='node', which every node of shards is anyway": parts.ledger.by_node,
        "a guard that repeats the micro-batches of one rank alone (Audit)": any(
            type(guard).watch_rounds is not Guard.watch_rounds and not guard.agrees_inside
            for guard in parts.guards
        ),
        "Options(noise=...)": parts.options.noise is not None,
        "Options(ranks_per_node=...): sums inside a node are FSDP2's": parts.options.ranks_per_node
        is not None,
    }
    if refused := [what for what, is_asked in unfit.items() if is_asked]:
        raise ConfigError(
            f"a model that is sharded inside nodes (mesh=...) does not work yet with {'; nor with '.join(refused)}: "
            "remove that, or train whole models with ZeRO1() or ACCO(), which shard the optimizer"
        )


def start(parts: Parts, group: dist.ProcessGroup, sharding: "Sharding | None" = None) -> Job:
    """Set up both lanes of one rank; all ranks of `group`, which only this job uses, must call it.

    Args:
        parts: The parts of the job.
        group: The group of all ranks.
        sharding: The ranks that hold shards of one model together, if any.

    Raises:
        ConfigError: Model, optimizer or settings do not work, or differ between ranks. It is raised before any
            collective except the comparison of settings.
    """
    progress = Progress()
    model: object = parts.model  # nobody has checked it yet
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    devices = [p.device for p in parameters if not p.is_meta]  # that it has no values is told to all ranks
    device = devices[0] if devices else torch.device("cpu")
    options = parts.options
    failures = _kind_of_detector(sharding)(
        group,
        device,
        timeout_seconds=options.timeout_seconds,
        silent_seconds=options.silent_seconds,
        progress=progress,
    )
    try:
        return _start(parts, progress, failures, sharding)
    except BaseException as error:  # what only one rank cannot train is told to the others
        cause = failures.cause_of(error)
        failures.tell(cause)
        if cause is error:
            raise
        raise cause from error


def _start(
    parts: Parts,
    progress: Progress,
    failures: FailureDetector,
    sharding: "Sharding | None",
) -> Job:
    ledger = parts.ledger
    _check(parts, failures.group, sharding)
    layout, registered = _planned(parts, failures.world_size, sharding)
    parameters = [shard_of(parameter)[0] for parameter in registered]
    exchange, node_group = _connected(parts, layout, failures, sharding)
    inside = exchange_inside(exchange, failures) if ledger.by_node else None
    for slot in layout.slots:
        flat = layout.sets[slot.set_index]
        if flat.accumulation_dtype != flat.dtype:
            registered[slot.index].grad_dtype = flat.accumulation_dtype
    everyone = exchange if node_group is None else node_group.everyone
    lacks_values = share_start(exchange, parameters, GradientBuffer(layout), parts.model, everyone)
    if parts.guards:
        progress.watch(_fixed(parts.model))
    owner = _owner_of(parts, parameters, exchange, node_group)
    if sharding is not None:
        StateKinds(owner).check_over_shards()
    lane = _lane_of(parts, exchange, inside, owner, progress, node_group)
    model = _kind_of_model(sharding)(
        parts.model,
        parameters,
        parts.optimizer,
        layout,
        BufferChoices.read(parts.options.buffers),
        registered,
    )
    model.begin(lacks_values=lacks_values)
    compute = ComputeLane(
        model,
        lane.comm,
        lane.quota,
        failures=failures,
        scheduler=parts.scheduler,
        allow_unused=parts.options.allow_unused,
        accumulate=lane.accumulate,
    )
    if sharding is not None:
        _watch_passes(parts.model, failures, sharding)
    job = Job(
        model=model, layout=layout, exchange=exchange, sharded=owner, replica=lane.comm.replica,
        compute=compute, comm=lane.comm, node_group=node_group,
        layout_digest=layout.digest() if node_group is None else node_group.digest_of(layout),
    )  # fmt: skip
    lane.watch(job)
    for listener in model.listeners:
        listener.began_again()
    failures.let_go()
    return job


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """What a strategy brings into a job."""

    comm: CommLane
    quota: Quota
    accumulate: Accumulate
    interpreter: GuardInterpreter | None
    """Performs the effects of guards, if there are any."""

    def watch(self, job: Job) -> None:
        """Connect guards to the job; they wait for its `began_again`."""
        if self.interpreter is not None:
            job.model.listeners.append(GuardedRounds(job, self.interpreter))


def _check(parts: Parts, group: dist.ProcessGroup, sharding: "Sharding | None") -> None:
    """Raise unless these parts can form a job."""
    parts.check()
    place = (group.rank(), group.size()) if sharding is None else (sharding.node, len(sharding.across))
    check_guards(parts.guards, parts.strategy, parts.ledger)
    check_worker(parts.strategy, parts.ledger, parts.options)
    plan_quota(parts.strategy, parts.micro_batches, parts.ledger.rounds, *place)
    check_messages(parts.model, parts.strategy, group)
    check_formats(parts.options, parts.strategy, parts.ledger)
    check_parameters(parts.model, sharded=sharding is not None)


def _planned(parts: Parts, world_size: int, sharding: "Sharding | None") -> tuple[Layout, list[nn.Parameter]]:
    """Return the layout, and the parameters in its order."""
    whole = whole_groups(parts.optimizer)  # a replicated one, too, sees flat slices where owners do
    layout, parameters = plan_layout(
        parts.model,
        parts.optimizer,
        world_size=world_size if sharding is None else len(sharding.across),
        bucket_bytes=parts.options.bucket_bytes,
        bytes_per_value=WIRES[parts.options.wire].bytes_per_value,
        widen=parts.options.accumulate == "fp32",
        parts=max(1, parts.ledger.fragments),
        whole_groups=whole,
    )
    if sharding is not None:
        _check_rows(parts, layout, len(sharding.inside))
    # Fragments are cut out of the buckets' first order.
    if sharding is not None and not parts.ledger.fragments:
        from stretto.engine.sharding import arrivals

        layout = layout.filled_by(arrivals(parts.model, parameters))
    return layout, parameters


def _check_rows(parts: Parts, layout: Layout, num_shards: int) -> None:
    """Raise unless every shard has rows of the tensors that the ranks of a node step together."""
    for slot in (one for one in layout.slots if one.is_whole and all(one.whole_shape)):
        rows, *_ = slot.whole_shape
        if (num_shards - 1) * most_rows(rows, num_shards) >= rows:
            raise UnsupportedOptimizer(
                f"{name_of(parts.optimizer)} steps {slot.name!r} as a whole, and of its {rows} rows some of the node's "
                f"{num_shards} shards have none: expected a row for each shard; give the parameter to an optimizer "
                "that steps each element alone, such as AdamW, or set element_wise = True in its class"
            )


def _connected(
    parts: Parts,
    layout: Layout,
    failures: FailureDetector,
    sharding: "Sharding | None",
) -> tuple[Exchange, NodeGroup | None]:
    """Compare the settings of all ranks, and return the strategy's exchange.

    If the ranks of a node hold shards, that exchange connects ranks with the same shard, and the second result
    connects the node's ranks.
    """
    options = parts.options
    # Nobody knows yet that all verify, or none.
    exchange = before = Exchange(failures.group, layout, FP32, failures.wait)
    follow: Wait | None = failures.follow if failures.orders_streams else None
    if sharding is None:  # what cannot be made of the options is told before anything is sent
        exchange = _exchange_of(options, failures.group, layout, failures.wait, follow)
    text = layout.text() if sharding is None else layout.text_of_wholes()
    agree(before, {**_settings(parts), "model": text}, f"rank {failures.rank}, before step 1")
    if sharding is None:
        exchange.take_account(before)
        return exchange, None
    small = VerifiedExchange if options.verified else Exchange  # of records, which need no wire
    seconds = failures.timeout_seconds + BACKEND_MARGIN_SECONDS
    # Of torch's own, which steps of whole tensors ask for.
    inside = private_group(sharding.group, timeout_seconds=seconds)
    across = part_of(failures.group, sharding.across, seconds)
    where = " across nodes"
    wait = failures.among(across, sharding.across, where)
    follow = failures.follow_among(sharding.across, where) if failures.orders_streams else None
    numbers = sharding.inside

    def asks(work: dist.Work, what: str) -> None:
        failures.wait(work, f"{what} inside a node", numbers)

    node_group = NodeGroup(
        small(inside, layout, FP32, failures.among(inside, numbers), None, numbers),
        small(sharding.group, layout, FP32, asks, None, numbers),
        small(failures.group, layout, FP32, failures.wait),
        numbers,
    )
    return _exchange_of(options, across, layout, wait, follow, sharding.across), node_group


def _watch_passes(model: nn.Module, failures: FailureDetector, sharding: "Sharding") -> None:
    from stretto.engine.passes import watch_passes
    from stretto.engine.sharding import NodeFailures

    if isinstance(failures, NodeFailures) and may_wait_again(sharding.group, next(model.parameters()).device):
        watch_passes(model, failures, sharding.inside)


def _kind_of_detector(sharding: "Sharding | None") -> Callable[..., FailureDetector]:
    if sharding is None:
        return FailureDetector
    from stretto.engine.sharding import NodeFailures

    return functools.partial(NodeFailures, sharding=sharding)


def _kind_of_model(sharding: "Sharding | None") -> Callable[..., UserModel]:
    if sharding is None:
        return UserModel
    from stretto.engine.sharded_model import ShardedModel  # FSDP2 takes half a second to import

    return ShardedModel


def _owner_of(
    parts: Parts, parameters: Sequence[Tensor], exchange: Exchange, node_group: NodeGroup | None
) -> ShardedOptimizer:
    """Return this rank's masters, copied from the parameters, with an optimizer that has not stepped."""
    rank, num_owners = (0, 1) if parts.ledger.replicated else (exchange.rank, exchange.world_size)
    layout, optimizer = exchange.layout, parts.optimizer
    if node_group is not None and (whole := {slot.group for slot in layout.slots if slot.is_whole}):
        optimizer = over_shards(optimizer, whole, node_group.exchange.group, layout.sets[0].device)
    return ShardedOptimizer(layout, parameters, optimizer, rank=rank, num_owners=num_owners)


def _lane_of(
    parts: Parts,
    exchange: Exchange,
    inside: Exchange | None,
    sharded: ShardedOptimizer,
    progress: Progress,
    node_group: NodeGroup | None,
) -> Lane:
    """Build the strategy's parts of a job; all ranks must call it.

    Args:
        parts: The parts of the job.
        exchange: The job's exchange.
        inside: The exchange among the ranks of this node, if the strategy needs one.
        sharded: This rank's masters, as `_owner_of` cuts them.
        progress: The job's progress.
        node_group: The ranks of this node, where each holds a shard of the model.
    """
    ledger = parts.ledger
    group = exchange.group
    quota = plan_quota(parts.strategy, parts.micro_batches, ledger.rounds, group.rank(), group.size())
    runtime = choose_runtime(
        exchange.group, exchange.layout.sets[0].device, overlaps=parts.strategy.overlaps or ledger.asks_ahead
    )
    if node_group is not None and not quota.is_fixed:
        runtime = NodeRuntime(runtime, node_group)
    replica = _kind_of_replica(ledger, exchange, inside)(
        exchange,
        sharded,
        replicated=ledger.replicated,
        options=parts.options,
        runtime=runtime,
        progress=progress,
        overlaps_backward=_overlaps_backward(parts, ledger, exchange, quota)
        # FSDP2's hooks run in a stream of its own there, and nobody has tried two communicators at once.
        and (node_group is None or not exchange.orders_streams),
        in_place=_steps_in_place(parts, ledger, exchange),
        node_group=node_group,
    )
    performers = dict(replica.performers)
    interpreter = _interpreter(parts, ledger, replica)
    if interpreter is not None:
        performers |= interpreter.performers
    weave: Weave | None = None if interpreter is None else functools.partial(guarded, ask=interpreter.ask)
    if parts.options.noise is not None:
        noisy = NoisyRank(parts.options.noise, replica)
        performers |= noisy.after_averages(performers)
        weave = noisy.around(weave)
    return Lane(
        comm=CommLane(parts.strategy, replica, performers, asks_ahead=ledger.asks_ahead, weave=weave),
        quota=quota,
        accumulate=_accumulation(parts, replica, quota),
        interpreter=interpreter,
    )


def _kind_of_replica(ledger: Ledger, exchange: Exchange, inside: Exchange | None) -> Callable[..., Replica]:
    if not ledger.local:
        return functools.partial(DivergingReplica, probe=ledger.probe) if ledger.may_average else Replica
    return functools.partial(LocalReplica, worker=Worker(exchange, inside), fragments=ledger.fragments)


def _interpreter(parts: Parts, ledger: Ledger, replica: Replica) -> GuardInterpreter | None:
    if not (parts.guards or replica.exchange.is_verified):
        return None
    return GuardInterpreter(
        parts.guards,
        replica,
        # Beside a lane that overlaps, forward passes may be writing any buffer.
        fixed=() if parts.strategy.overlaps else _fixed(parts.model),
        strikes=_strikes(
            parts.options, replica.exchange if replica.node_group is None else replica.node_group.everyone
        ),
        has_copies=ledger.replicated and not ledger.local,
    )


def _overlaps_backward(parts: Parts, ledger: Ledger, exchange: Exchange, quota: Quota) -> bool:
    """Return whether gradients may be sent during the backward pass.

    The end of the round must be known in advance; the round may send nothing else; and no guard may need to inspect the
    gradients first. All of this is equal on all ranks.
    """
    layout, has_residual = exchange.layout, exchange.feedback is not None
    return (
        parts.options.hide_reductions
        and layout.world_size > 1
        and quota.is_fixed
        and ledger.rounds == 1
        and not (parts.strategy.overlaps or ledger.local or ledger.asks_ahead)
        and not any(guard.looks_before_sending(has_residual=has_residual) for guard in parts.guards)
        # Autograd has a thread for every device, and calls hooks on them side by side.
        and len({flat.device for flat in layout.sets}) == 1
    )


def _steps_in_place(parts: Parts, ledger: Ledger, exchange: Exchange) -> bool:
    """Return whether only the step reads gradients once they are whole, and only the model the values after it."""
    is_observed = parts.guards or exchange.is_verified or parts.options.noise is not None
    return not (is_observed or parts.strategy.overlaps or ledger.previews) and ledger.rounds == 1


def _accumulation(parts: Parts, replica: Replica, quota: Quota) -> Accumulate:
    """Return the constructor of the job's accumulation, which sends gradients early if allowed."""
    kind: Accumulate
    kind, hidden = Accumulation, EarlyAccumulation
    if replica.node_group is not None:
        from stretto.engine.sharded_model import EarlyShards, ShardedAccumulation

        kind, hidden = ShardedAccumulation, EarlyShards
    if not replica.overlaps_backward:
        return kind
    return functools.partial(hidden, model=parts.model, replica=replica, micro_batches=quota.minima[0])


def _strikes(options: Options, exchange: Exchange) -> Strikes:
    """Return a count of strikes with every rank's host and device; hosts and devices are exchanged only if strikes
    count.
    """
    if options.strikes is None:
        return Strikes(None, [])
    own = describe_seat(exchange.layout.sets[0].device).encode()
    return Strikes(options.strikes, [seat.decode() for seat in exchange.gather_records(own)])


def _fixed(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that no code may write; floating-point buffers are not among them
    (`stretto.engine.buffer_sync`).
    """
    is_buffer = {original_name(name) for name, _ in model.named_buffers()}
    return [
        (name, tensor)
        for name, tensor in frozen_state(model)
        if not (name in is_buffer and tensor.is_floating_point())
    ]


def _settings(parts: Parts) -> dict[str, str]:
    """Return the settings, other than the layout, that must be equal on all ranks, as text by name."""
    chosen = [f"{field.name}={getattr(parts.options, field.name)!r}" for field in dataclasses.fields(Options)]
    fixed = [f"{name}: {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in frozen_state(parts.model)]
    found = {
        "strategy": repr(parts.strategy),
        "micro_batches": repr(parts.micro_batches),
        "options": "\n".join(chosen),
        "optimizer": name_of(parts.optimizer),
        "optimizer settings": settings_text(read_hyperparameters(parts.optimizer)),
        "frozen parameters and buffers": "\n".join(fixed),
        "guards": "\n".join(map(repr, parts.guards)),
        "scheduler": type(parts.scheduler).__name__,
    }
    return {name: ADDRESS.sub("", text) for name, text in found.items()}


def _exchange_of(
    options: Options,
    group: dist.ProcessGroup,
    layout: Layout,
    wait: Wait,
    follow: Wait | None,
    numbers: Sequence[int] | None = None,
) -> Exchange:
    """Return an exchange of the kind and on the wire that the options name."""
    wire = WIRES[options.wire]
    device = layout.sets[0].device
    is_over_nccl = device.type == "cuda" and not may_wait_again(group, device)
    kind = VerifiedExchange if options.verified else Exchange
    is_plain = not (options.verified or options.ranks_per_node or isinstance(wire, PackedWire))
    return kind(
        group,
        layout,
        wire,
        wait,
        follow,
        numbers,
        ranks_per_node=options.ranks_per_node,
        is_native=is_over_nccl and is_plain,
    )
