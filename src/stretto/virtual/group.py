"""A virtual cluster's process group: every collective, checked strictly, in virtual time."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from stretto.engine.runtime import Runtime, Work
from stretto.errors import CommunicationError, ConfigError, OutOfTurn
from stretto.groups import link as traffic
from stretto.groups.wrapped import OlderNames
from stretto.virtual.collectives import Hall, VirtualWork
from stretto.virtual.movement import Call, Terms, terms
from stretto.virtual.runtime import Desk, VirtualRuntime


class VirtualGroup(OlderNames, dist.ProcessGroup):
    """One rank's view of a group of a virtual cluster.

    Args:
        hall: Where its ranks meet.
        desk: Where its rank works.
        world_size: How many ranks there are.
    """

    def __init__(self, hall: Hall, desk: Desk, world_size: int) -> None:
        super().__init__(desk.rank, world_size)  # type: ignore[call-arg]  # missing in torch's stub
        self._hall = hall
        self._desk = desk
        self._name = GroupName(hall.name)

    # Virtual time

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the run began."""
        return self._desk.schedule.now_ns

    def charge(self, work: Work, elements: int = 0) -> None:
        """Let a piece of work take the time that the compute model says; `DataParallel` does this by itself."""
        self._desk.charge(work, elements)

    def charge_ns(self, duration_ns: int) -> None:
        """Let this rank be busy for `duration_ns`, with whatever its program does outside `DataParallel`."""
        self._desk.charge_ns("program", duration_ns)

    def wait_until(self, at_ns: int) -> None:
        """Let this rank be idle until `at_ns`, if that lies ahead.

        Raises:
            OutOfTurn: The caller is a thread that takes no turns: none of the rank's own.
        """
        if not self._desk.schedule.current.is_here:
            raise OutOfTurn(
                f"rank {self.rank()}: virtual time passes on the rank's own threads only, not on one beside them: "
                "expected an EchoLoader directly around a VirtualStore, and no other thread that reads it"
            )
        self._desk.schedule.sleep_until(at_ns)

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return what a communication lane on this group runs on; see `stretto.engine.runtime.BringsRuntime`."""
        return VirtualRuntime(self._desk, overlaps=overlaps)

    # Collectives

    def _issue(self, call: Call) -> dist.Work:
        return VirtualWork(self._hall, self._hall.enter(self.rank(), call), self.rank(), call.outputs)

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce every tensor; every rank gets the result in its place."""
        listed = _listed(tensors)
        sent = traffic.all_reduce(_bytes(listed), self.size())
        what = terms("all_reduce", listed, reduction=_reduction(options))
        return self._issue(Call(what, listed, listed, sent, "ring"))

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """As `allreduce`."""
        return self.allreduce(tensors, *options)

    def reduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Reduce every tensor; the root gets the result in its place."""
        listed, root = _listed(tensors), _root(options)
        sent = traffic.reduce(_bytes(listed), self.rank(), root, self.size())
        what = terms("reduce", listed, root, _reduction(options))
        return self._issue(Call(what, listed, listed, sent, "ring"))

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """Give every rank the root's tensors."""
        listed, root = _listed(tensors), _root(options)
        sent = traffic.broadcast(_bytes(listed), self.rank(), root, self.size())
        return self._issue(Call(terms("broadcast", listed, root), listed, listed, sent, "direct"))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Gather every rank's tensor into a list on every rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        _check_one(inputs, "allgather")
        sent = traffic.all_gather(_bytes(inputs), self.size())
        return self._issue(Call(terms("all_gather of lists", inputs), inputs, outputs[0], sent, "ring"))

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Gather every rank's tensor into one on every rank."""
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *options: Any
    ) -> dist.Work:
        """Gather several tensors, each into one."""
        for output, own in zip(outputs, inputs, strict=True):
            self._check_sizes("all_gather", output, own.numel() * self.size(), own)
        sent = traffic.all_gather(_bytes(inputs), self.size())
        return self._issue(Call(terms("all_gather", inputs), inputs, outputs, sent, "ring"))

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Reduce lists of tensors, entry by entry; every rank gets its own entry."""
        _check_one(inputs, "reduce_scatter")
        sent = traffic.reduce_scatter(_bytes(inputs), self.size())
        what = terms("reduce_scatter of lists", inputs[0], reduction=_reduction(options))
        return self._issue(Call(what, inputs[0], outputs, sent, "ring"))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Reduce one tensor; every rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [input], *options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *options: Any
    ) -> dist.Work:
        """Reduce several tensors; every rank gets its part of each."""
        for output, own in zip(outputs, inputs, strict=True):
            self._check_sizes("reduce_scatter", own, output.numel() * self.size(), output)
        sent = traffic.reduce_scatter(_bytes(inputs), self.size())
        what = terms("reduce_scatter", inputs, reduction=_reduction(options))
        return self._issue(Call(what, inputs, outputs, sent, "ring"))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], *options: Any
    ) -> dist.Work:
        """Send every rank its rows; no splits mean equal parts."""
        if not input_splits and not output_splits:
            self._check_sizes("all_to_all", output, input.numel(), input)
            sent = input.nbytes // self.size() * (self.size() - 1)
            return self._issue(Call(terms("all_to_all", [input]), [input], [output], sent, "direct"))
        rows = input.nbytes // max(1, input.shape[0])
        parts = [count * rows for count in input_splits] or [input.nbytes // self.size()] * self.size()
        what = Terms("all_to_all", (str(input.dtype).removeprefix("torch."),), ())
        sent = traffic.all_to_all(parts, self.rank())
        return self._issue(Call(what, [input], [output], sent, "direct", input_splits, output_splits))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> dist.Work:
        """Send every rank its tensor."""
        sent = traffic.all_to_all([tensor.nbytes for tensor in inputs], self.rank())
        return self._issue(Call(terms("all_to_all of lists", inputs), inputs, outputs, sent, "direct"))

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Gather every rank's tensor into a list on the root."""
        _check_one(inputs, "gather")
        root = _root(options)
        sent = traffic.gather(_bytes(inputs), self.rank(), root)
        return self._issue(
            Call(terms("gather", inputs, root), inputs, outputs[0] if outputs else [], sent, "direct")
        )

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Give every rank its entry of the root's list."""
        _check_one(outputs, "scatter")
        root = _root(options)
        sent = traffic.scatter(_bytes(outputs), self.rank(), root, self.size())
        return self._issue(
            Call(terms("scatter", outputs, root), inputs[0] if inputs else [], outputs, sent, "direct")
        )

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        """Wait for all ranks; costs the latency."""
        return self._issue(Call(terms("barrier", []), [], [], 0, "direct"))

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Refused: only collectives are modelled.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a virtual cluster performs collectives, not send and recv")

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> dist.Work:
        """Refused, see `send`."""
        return self.send(tensors, rank, tag)

    def _check_sizes(self, operation: str, whole: Tensor, numel: int, part: Tensor) -> None:
        if whole.numel() != numel or whole.dtype != part.dtype:
            raise CommunicationError(
                f"rank {self.rank()}: {operation} over {self.size()} ranks with tensors of {whole.numel()} elements "
                f"of {whole.dtype} and {part.numel()} of {part.dtype}: expected {numel} for the former, in one dtype"
            )

    # What torch and the library ask of a group

    def private(self) -> "VirtualGroup":
        """Return another group of the same ranks; every rank must call, in the same order."""
        return VirtualGroup(self._hall.sibling(self.rank()), self._desk, self.size())

    def abort(self) -> None:
        """Give the group up after an error: the other ranks wait no longer."""
        self._hall.leave(self.rank())

    def shutdown(self) -> None:
        """Nothing to close."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing ever times out: what cannot complete is an error at once."""

    @property
    def group_name(self) -> GroupName:
        """The name in messages and in the trace."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return f"{self._hall.name} of a virtual cluster"

    def get_group_store(self) -> NoReturn:
        """Refused: failures need none, and a store that ranks wait for would wait in real time.

        Raises:
            RuntimeError: always, as torch's groups do that have none.
        """
        raise RuntimeError("a virtual cluster's group has no store")

    def getBackendName(self) -> str:
        """The name shown in messages."""
        return "virtual"


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _check_one(tensors: Sequence[object], operation: str) -> None:
    if len(tensors) != 1:
        raise CommunicationError(f"{operation}: expected one entry per rank, found {len(tensors)}")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum([_bytes(tensor) for tensor in tensors])


def _root(options: tuple[Any, ...]) -> int:
    """Read the root rank, which is a field of torch's options or an argument of the short forms."""
    first = options[0] if options else 0
    return first if isinstance(first, int) else int(first.rootRank)


def _reduction(options: tuple[Any, ...]) -> str:
    """Read the reduction, which is a field of torch's options or an argument of the short forms."""
    chosen = getattr(options[0], "reduceOp", options[0]) if options else dist.ReduceOp.SUM
    for name, known in _REDUCTIONS:
        if chosen == known:
            return name
    raise ConfigError(
        f"a virtual cluster reduces by {', '.join(name for name, _ in _REDUCTIONS)}, not {chosen}"
    )


_REDUCTIONS = (
    ("sum", dist.ReduceOp.SUM),
    ("average", dist.ReduceOp.AVG),
    ("maximum", dist.ReduceOp.MAX),
    ("minimum", dist.ReduceOp.MIN),
    ("product", dist.ReduceOp.PRODUCT),
)
