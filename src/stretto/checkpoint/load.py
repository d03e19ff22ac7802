"""Reads a checkpoint into a job, after checking that all of it fits and is undamaged."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan

from stretto.checkpoint import files as folder
from stretto.checkpoint.background import wait
from stretto.checkpoint.continuation import Continuation, Loader
from stretto.checkpoint.manifest import METADATA, Manifest
from stretto.checkpoint.pieces import LoadPlanner, Reader
from stretto.checkpoint.ranks import Ranks
from stretto.checkpoint.save import file_digest
from stretto.engine.state import State
from stretto.errors import CheckpointError, TornCheckpoint
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
    path: Path
    """The checkpoint's own folder."""
    loader_states: tuple[Any, ...]
    """The loader state of every rank that saved one, in rank order: what a loader for another world size needs."""
    notes: tuple[str, ...]
    """What could not be continued exactly, and why; empty where the continuation is bit-identical."""


def load(
    parallel: DataParallel, directory: str | os.PathLike[str], *, loader: Loader | None = None
) -> Restored:
    """Replace the job's state by a checkpoint; all ranks must call, before training or after an `Update`.

    At the saved world size and strategy the run goes on to the bit. At another world size parameters,
    optimizer, carry and prediction are resharded; random states and loader positions are per rank and are
    left as they are, with a note. Under another strategy parameters and optimizer load, and the carry and the
    prediction, which mean nothing there, are dropped with a note. Nothing changes unless all of it can be read.

    Where strategies take turns (`Switching`), the one goes on that is due at the checkpoint's step. If it is not at
    work yet, gradients accumulated ahead are dropped and replicas averaged even if the checkpoint cannot be read.

    Nothing in the checkpoint is run: docs/security.md says what a damaged or hostile one can do.

    Args:
        parallel: The job; its optimizer gets the saved hyperparameters too.
        directory: One checkpoint, or a folder of them, of which the latest complete one is taken.
        loader: This rank's, to be told its position at the same world size: `load_state_dict`.

    Raises:
        CheckpointError: There is no checkpoint.
        TornCheckpoint: It is incomplete or damaged; names the file or the entry.
        ForeignCheckpoint: It is of another model, optimizer or format version; says what differs.
        OutOfTurn: An update is under way.
        CommunicationError: A rank died, raised or fell silent.
    """
    with parallel.job.compute.lifetime.running():
        parallel.job.compute.check_between_updates("loading a checkpoint")
    wait(parallel)
    ranks = Ranks(parallel)
    paths = ranks.gather(
        "looking for a checkpoint", lambda: str(folder.find(Path(directory))) if ranks.rank == 0 else None
    )
    reading = _Reading(Path(paths[0] or directory))
    manifest = ranks.agree("opening a checkpoint", reading.open)
    try:
        with parallel.job.compute.lifetime.running():
            parallel.enter_phase(manifest.step)
            continuation = Continuation(parallel)
            same = manifest.strategy == parallel.strategy.name
            state = continuation.blank(
                reading.names,
                manifest.world_size,
                same_strategy=same,
                same_layout=manifest.layout == parallel.job.layout.digest(),
            )
        optimizer = name_of(parallel.optimizer)
        ranks.agree("checking a checkpoint", lambda: reading.check(state, optimizer))
        ranks.agree("reading a checkpoint", reading.read)
    except CheckpointError:
        parallel.enter_phase(parallel.steps)
        raise
    positions = tuple(unpack(packed, "the loader's state") for packed in state.get("loader", {}).values())
    goes_on = loader is not None and bool(positions) and manifest.world_size == parallel.world_size
    if loader is not None and goes_on:
        ranks.agree("restoring the loader", lambda: loader.load_state_dict(positions[ranks.rank]))
    with parallel.job.compute.lifetime.running():
        continuation.load(state, goes_on=goes_on)
    return Restored(
        step=parallel.steps,
        extra=unpack(state["extra"], "extra"),
        path=reading.path,
        loader_states=positions,
        notes=tuple(_notes(parallel, manifest, reading.names, state)),
    )


class _Reading:
    """One rank's part in reading, by PyTorch's protocol of planners and readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()
        """Every entry of the checkpoint."""
        self._planner = LoadPlanner()
        self._plan = LoadPlan([])

    def open(self) -> Manifest:
        """Read what the checkpoint says about itself."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, found by rank 0, is not there: expected a file system that all share"
            )
        self._manifest = Manifest.read(self.path)
        self._manifest.check_files(self.path)
        if file_digest(self.path / METADATA) != self._manifest.metadata_digest:
            raise TornCheckpoint(f"{self.path / METADATA} is damaged; go back to an older checkpoint")
        self._reader = Reader(self.path, self._manifest)
        self.names = set(self._manifest.entries)
        return self._manifest

    def check(self, state: State, optimizer: str) -> None:
        """Plan to read into `state`, and make sure that all of it fits and is whole."""
        self._manifest.check_optimizer(optimizer)
        plan = self._planner.plan(state, self._reader.metadata)
        self._plan = self._planner.finish_plan(self._reader.prepare_local_plan(plan))
        self._reader.verify(self._plan)

    def read(self) -> None:
        """Read; `state` is filled."""
        self._reader.read_data(self._plan, self._planner).wait()


def _notes(parallel: DataParallel, manifest: Manifest, names: set[str], state: State) -> Iterator[str]:
    """Yield what keeps the continuation from being exact."""
    if manifest.world_size != parallel.world_size:
        yield (
            f"saved by {manifest.world_size} ranks, continued by {parallel.world_size}: random states and loader "
            "positions are not restored"
        )
    kinds = {name.partition(".")[0] for name in names}
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


_AHEAD = {
    "carry": "gradients accumulated ahead",
    "shown": "the prediction that was shown",
    "replica": "what each rank has stepped alone since the last average",
}
