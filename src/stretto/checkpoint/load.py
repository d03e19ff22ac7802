"""Reads a checkpoint into a job, after checking that all of it fits and is undamaged."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import LoadPlan

from stretto import held
from stretto.checkpoint import files as folder
from stretto.checkpoint.background import wait
from stretto.checkpoint.manifest import METADATA, Manifest, Model, models
from stretto.checkpoint.pieces import LoadPlanner, Reader
from stretto.checkpoint.ranks import Ranks, check_job
from stretto.checkpoint.save import file_digest
from stretto.continuation import Loader, check_loader
from stretto.engine.state import State
from stretto.errors import CheckpointError, ConfigError, ForeignCheckpoint, TornCheckpoint
from stretto.fields import check_callable, shown
from stretto.flat import original_name
from stretto.held import Held, Holding, check_whole
from stretto.optimizer import name_of
from stretto.packed import unpack
from stretto.parallel import DataParallel


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What `load` has brought back, beside the state of the job itself."""

    step: int
    """Committed updates behind the checkpoint."""
    extra: Any
    """What `save` was given."""
    path: Path | None
    """The checkpoint's own folder; None where the state was in memory."""
    loader_states: tuple[Any, ...]
    """The loader state of every rank that saved one, in rank order: what a loader for another world size needs."""
    is_pass_over: bool
    """Whether the first `feed` is the rest of the pass that was saved, and has no batch: a loop that counts its epochs
    by `step` would take it for the next one."""
    notes: tuple[str, ...]
    """What could not be continued exactly, and why; empty where the continuation is bit-identical."""


def hold(parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> Held:
    """Return a copy of what this rank holds of the job, for `load` in another job; all ranks call, as for `save`.

    It may be sent to another process, where it takes the place of a checkpoint's files. All that the ranks of a job
    hold together is the state: where the optimizer is sharded, none of the shares may be missing.

    Args:
        parallel: The job, which may go on.
        loader: This rank's, if its position is to be held.
        extra: Anything; see `Restored`.

    Raises:
        OutOfTurn: An update is under way.
    """
    check_job(parallel)
    check_loader(loader)
    with parallel.between_updates("holding a state"):
        return held.hold(
            parallel.continuation(), parallel.strategy.name, loader=loader, extra=extra, copies=True
        )


def continued(
    parallel: DataParallel, begin: Callable[[], DataParallel], *, loader: Loader | None = None
) -> DataParallel:
    """End a job at rest, begin another one, and let it go on from the same state; all ranks must call.

        parallel = continued(parallel, lambda: DataParallel(model, optimizer, ACCO(), wire="int8"), loader=loader)

    It is what `save`, a new process and `load` do, to the bit, without files. The old job commits nothing more, and its
    guards start afresh in the new one; what they have found and nobody was told is in its `late_incidents`.

    Args:
        parallel: The job that ends, right after an `Update`.
        begin: Returns the next one, with any settings, over the same model, optimizer and scheduler.
        loader: This rank's. It stays where it is, and so does an iterator of it that the caller holds.

    Raises:
        OutOfTurn: An update is under way.
    """
    check_callable(begin, "continued(begin)", "a function that returns the next DataParallel")
    share = hold(parallel, loader=loader)
    parallel.leave()
    following = begin()
    check_job(following)
    load(following, [share], loader=loader)
    return following


def load(
    parallel: DataParallel,
    source: str | os.PathLike[str] | Sequence[Held],
    *,
    loader: Loader | None = None,
) -> Restored:
    """Replace the job's state by a checkpoint; all ranks must call, before training or after an `Update`.

    At the saved world size and strategy the run goes on to the bit. At another world size parameters,
    optimizer, carry and prediction are resharded; random states and loader positions are per rank and are
    left as they are, with a note. Under another strategy parameters and optimizer load, and the carry and the
    prediction, which mean nothing there, are dropped with a note. Nothing changes unless all of it can be read.

    Nothing in the checkpoint is run: docs/security.md says what a damaged or hostile one can do.

    Args:
        parallel: The job; its optimizer gets the saved hyperparameters too.
        source: One checkpoint, or a folder of them, of which the latest complete one is taken. Or the shares of a
            state in memory (`hold`) that this rank has: its own as a rule, none on a rank that has come, several where
            ranks have left.
        loader: This rank's, to be told its position at the same world size: `load_state_dict`.

    Raises:
        CheckpointError: There is no checkpoint, or there are shares of different states.
        TornCheckpoint: It is incomplete or damaged; names the file or the entry.
        ForeignCheckpoint: It is of another model, optimizer or format version; says what differs.
        OutOfTurn: An update is under way.
        CommunicationError: A rank died, raised or fell silent.
    """
    check_job(parallel)
    check_loader(loader)
    are_shares = isinstance(source, Sequence) and all(isinstance(one, Held) for one in source)
    if not are_shares and not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"source: expected a folder, or shares that hold() has returned, found {shown(source)}"
        )
    with parallel.job.compute.lifetime.running():
        parallel.job.compute.check_between_updates("loading a checkpoint")
    wait(parallel)
    ranks = Ranks(parallel)
    reading: _Files | _Memory
    if isinstance(source, str | os.PathLike):
        reading = _Files(parallel, ranks, Path(source))
    else:
        reading = _Memory(parallel, ranks, source)
    saved = reading.saved
    with _grown(parallel.job.model.model, models(saved.entries) if isinstance(saved, Manifest) else {}):
        with parallel.job.compute.lifetime.running():
            continuation = parallel.continuation()
            state = continuation.blank(
                reading.names,
                saved.world_size,
                same_strategy=saved.strategy == parallel.strategy.name,
                same_layout=saved.layout == parallel.job.layout_digest,
            )
        reading.read(state)
        ranks.agree("comparing schedulers", lambda: continuation.check_scheduler(state))
    positions = tuple(unpack(packed, "the loader's state") for packed in state.get("loader", {}).values())
    goes_on = loader is not None and bool(positions) and saved.world_size == parallel.world_size
    if loader is not None and goes_on:
        ranks.agree("restoring the loader", lambda: loader.load_state_dict(positions[ranks.rank]))
    with parallel.job.compute.lifetime.running():
        continuation.load(state, goes_on=goes_on)
    place = continuation.pass_of(state) or {}
    notes = (
        *_notes(parallel, saved, reading.names, state),
        *_notes_of_pass(place, reading.names, goes_on=goes_on),
    )
    for note in notes:
        _log.warning("rank %d, after step %d: %s", parallel.rank, parallel.steps, note)
    return Restored(
        step=parallel.steps,
        extra=unpack(state["extra"], "extra"),
        path=reading.path,
        loader_states=positions,
        is_pass_over=goes_on and _is_over(place),
        notes=notes,
    )


@contextlib.contextmanager
def _grown(model: nn.Module, saved: Model) -> Iterator[None]:
    """Let modules with a loading rule of their own take the kinds of what is saved; back again if the block raises.

    Quantisers and banks make buffers in their first forward pass, and load them into a fresh module as well.
    """
    before: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    try:
        for path, module in model.named_modules():
            if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
                continue
            prefix = original_name(f"{path}.") if path else ""
            kinds = {
                name: kind
                for name, kind in saved.items()
                if kind is not None and name.rpartition(".")[0] == prefix.removesuffix(".")
            }
            held = module._buffers
            if all(
                (found := held.get(name.removeprefix(prefix))) is not None and kind.is_of(found)
                for name, kind in kinds.items()
                if name.removeprefix(prefix) not in module._parameters
            ):
                continue
            before.append((module, dict(held)))
            values = {
                **{name: torch.zeros(kind.shape, dtype=kind.dtype) for name, kind in kinds.items()},
                **{
                    prefix + name: one.detach() for name, one in module._parameters.items() if one is not None
                },
            }
            module._load_from_state_dict(values, prefix, {}, False, [], [], [])
        yield
    except BaseException:
        for module, held in before:
            module._buffers.clear()
            module._buffers.update(held)
        raise


class _Memory:
    """One rank's part in reading from what ranks hold."""

    path = None

    def __init__(self, parallel: DataParallel, ranks: Ranks, shares: Sequence[Held]) -> None:
        def gather(record: bytes) -> list[bytes]:
            with parallel.job.compute.lifetime.running():
                parallel.job.replica.wait_for_transfers()
                return parallel.job.everyone.gather_records(record)

        self._ranks = ranks
        self._optimizer = name_of(parallel.optimizer)
        self.saved = Holding(shares, gather)
        self.names = self.saved.names

    def read(self, state: State) -> None:
        """Fill `state`, and make sure that it is of this model and optimizer, and that nothing is missing anywhere."""
        self._ranks.agree("checking a state in memory", lambda: self._check(state))
        missing = self.saved.read(state, moves=self.saved.world_size != self._ranks.world_size)
        self._ranks.agree("reading a state in memory", lambda: check_whole(missing))

    def _check(self, state: State) -> None:
        saved = {name for name in self.names if name.startswith("model.")}
        if other := saved ^ {f"model.{name}" for name in state["model"]}:
            raise ForeignCheckpoint(
                f"the state is of another model: {sorted(other)[:5]} are only in one of both; expected the model that "
                "was held"
            )
        if self.saved.optimizer != self._optimizer:
            raise ForeignCheckpoint(
                f"the state is one of {self.saved.optimizer}, expected {self._optimizer}: build the optimizer that was "
                "held"
            )


class _Files:
    """One rank's part in reading files, by PyTorch's protocol of planners and readers."""

    def __init__(self, parallel: DataParallel, ranks: Ranks, directory: Path) -> None:
        self._optimizer = name_of(parallel.optimizer)
        self._ranks = ranks
        self._planner = LoadPlanner()
        paths = ranks.gather(
            "looking for a checkpoint", lambda: str(folder.find(directory)) if ranks.rank == 0 else None
        )
        self.path = Path(paths[0] or directory)
        self.saved: Manifest = ranks.agree("opening a checkpoint", self._open)
        self.names = set(self.saved.entries)
        """Every entry of the checkpoint."""

    def read(self, state: State) -> None:
        """Fill `state`, once it is known on all ranks that all of it fits and is whole."""
        reader = Reader(self.path, self.saved)
        plan = self._ranks.agree("checking a checkpoint", lambda: self._check(state, reader))
        self._ranks.agree("reading a checkpoint", lambda: reader.read_data(plan, self._planner).wait())

    def _open(self) -> Manifest:
        """Read what the checkpoint says about itself."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, found by rank 0, is not there: expected a file system that all share"
            )
        manifest = Manifest.read(self.path)
        manifest.check_files(self.path)
        if file_digest(self.path / METADATA) != manifest.metadata_digest:
            raise TornCheckpoint(f"{self.path / METADATA} is damaged; go back to an older checkpoint")
        return manifest

    def _check(self, state: State, reader: Reader) -> LoadPlan:
        self.saved.check_optimizer(self._optimizer)
        plan = self._planner.plan(state, reader.metadata)
        plan = self._planner.finish_plan(reader.prepare_local_plan(plan))
        reader.verify(plan)
        return plan


def _notes(
    parallel: DataParallel, manifest: Manifest | Holding, names: set[str], state: State
) -> Iterator[str]:
    """Yield what keeps the continuation from being exact."""
    if manifest.world_size != parallel.world_size:
        yield (
            f"saved by {manifest.world_size} ranks, continued by {parallel.world_size}: random states and loader "
            "positions are not restored"
        )
    kinds = {name.partition(".")[0] for name in names}
    if kinds & {"owed", "debts"} and parallel.job.exchange.feedback is None:
        yield (
            f"saved on a wire that keeps rounding errors, continued on {parallel.options.wire} under "
            f"{parallel.strategy.name}: the errors that ranks had yet to send are dropped"
        )
    dropped = [words for part, words in _AHEAD.items() if part in kinds and part not in state]
    if dropped:
        why = (
            f"saved under {manifest.strategy}, continued under {parallel.strategy.name}"
            if manifest.strategy != parallel.strategy.name
            else "other parameters are trained, or on other ranks, or in other buckets"
        )
        yield f"{why}: {' and '.join(dropped)} dropped"
    if (parallel.scheduler is not None) != ("scheduler" in kinds):
        saved, goes_on = (
            ("without", "with one") if parallel.scheduler is not None else ("with", "without one")
        )
        yield f"saved {saved} a scheduler, continued {goes_on}: its state is not restored"


def _is_over(place: Mapping[str, Any]) -> bool:
    """Return whether nothing is left of a pass that was saved in this place, and whose rest comes next."""
    return bool(place) and not place["is_left"] and bool(place["is_exhausted"] or place["votes"])


def _notes_of_pass(place: Mapping[str, Any], names: set[str], *, goes_on: bool) -> Iterator[str]:
    """Yield what is not exact of the pass that was saved, of which the loader's state may go on.

    Without one a pass that is over, with all its updates, is behind.
    """
    if not place or place["is_left"]:
        return
    is_over = _is_over(place) and (goes_on or "job.round_report" not in names)
    if is_over:
        if goes_on:
            yield (
                "saved after the last batch of a pass: the first feed() is its rest, without a batch; a loop that "
                "counts its epochs by the step begins with the epoch before (restored.is_pass_over)"
            )
    elif not goes_on:
        yield (
            f"saved after {place['position']} batches of a pass, and continued without its loader's state: the first "
            "feed() begins a pass anew; give loader= to save and load"
        )
    if num_out := place.get("num_out", 0):
        yield (
            f"saved by a loop that had asked for {num_out} batches ahead: they were not counted, and do not come again"
        )


_log = logging.getLogger("stretto")

_AHEAD = {
    "carry": "gradients accumulated ahead",
    "shown": "the prediction that was shown",
    "replica": "what each rank has stepped alone since the last average",
}
