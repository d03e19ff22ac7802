"""Reads a checkpoint into a job, after checking that all of it fits and is undamaged."""

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto import share
from stretto.checkpoint import files as folder
from stretto.checkpoint.background import wait
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.ranks import Ranks, check_job
from stretto.checksums import bytes_of
from stretto.continuation import Continuation, Loader, check_loader, unpack_entries
from stretto.dealing import Holding, check_whole, differences, in_order, models
from stretto.disk import folder_of, replace_file
from stretto.engine.buffers import are_alike
from stretto.engine.state import State
from stretto.errors import CheckpointError, ConfigError, TornCheckpoint
from stretto.fields import check_callable, shown
from stretto.flat import Runs, original_name
from stretto.optimizer import name_of
from stretto.parallel import DataParallel
from stretto.share import Held, Kind, Kinds, kinds_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The result of `load`, apart from the job's own state."""

    step: int
    """Number of committed updates in the checkpoint."""
    extra: Any
    """The `extra` of `save`."""
    path: Path | None
    """The checkpoint's own folder; None if the state was in memory."""
    loader_states: tuple[Any, ...]
    """The loader state of every rank that saved one, in rank order, for loaders at another world size."""
    is_pass_over: bool
    """Whether the first `feed` only completes the saved pass and has no batch: a loop that counts its epochs by
    `step` would otherwise take it for the next epoch."""
    notes: tuple[str, ...]
    """Parts that could not be restored exactly, and why; empty if the continuation is bit-identical."""


def hold(parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> Held:
    """Return a copy of this rank's part of the job, for `load` in another job; all ranks call it, as for `save`.

    It may be sent to another process, where it replaces a checkpoint's files. The parts of all ranks together are the
    state: if the optimizer is sharded, none may be missing.

    Args:
        parallel: The job, which may continue.
        loader: This rank's loader, if its position is included.
        extra: Any value; see `Restored`.

    Raises:
        OutOfTurn: An update is in progress.
    """
    check_job(parallel)
    check_loader(loader)
    with parallel.between_updates("holding a state"):
        continuation = parallel.continuation()
        state = continuation.write()
        return share.hold(continuation, parallel.strategy.name, state, loader, extra, copies=True)


def continued(
    parallel: DataParallel, begin: Callable[[], DataParallel], *, loader: Loader | None = None
) -> DataParallel:
    """End a job between updates, and start another that continues from the same state; all ranks must call it.

        parallel = continued(parallel, lambda: DataParallel(model, optimizer, ACCO(), wire="int8"), loader=loader)

    It is bit-identical to `save`, a new process and `load`, without files. The old job commits nothing more, and its
    guards start again in the new one; incidents that were not reported yet are in its `late_incidents`.

    Args:
        parallel: The job that ends, right after an `Update`.
        begin: Returns the next job, with any settings, over the same model, optimizer and scheduler.
        loader: This rank's loader. Its position does not change, nor does an iterator of it that the caller holds.

    Raises:
        OutOfTurn: An update is in progress.
    """
    check_callable(begin, "continued(begin)", "a function that returns the next DataParallel")
    held = hold(parallel, loader=loader)
    parallel.leave()
    following = begin()
    check_job(following)
    following.job.model.first_buffers = parallel.job.model.first_buffers
    load(following, [held], loader=loader)
    return following


def load(
    parallel: DataParallel,
    source: str | os.PathLike[str] | Sequence[Held],
    *,
    loader: Loader | None = None,
    partly: bool = False,
) -> Restored:
    """Replace the job's state by a checkpoint; all ranks must call it, before training or after an `Update`.

    At the saved world size and strategy the continuation is bit-identical. At another world size parameters, optimizer,
    carry and prediction are resharded; random states and loader positions belong to one rank each and are not loaded,
    with a note. Under another strategy parameters and optimizer load, and the carry and the prediction, which mean
    nothing there, are dropped with a note. Nothing changes unless all of it can be read.

    No code in the checkpoint is executed: docs/security.md describes the effects of a damaged or hostile checkpoint.

    Args:
        parallel: The job; its optimizer gets the saved hyperparameters too.
        source: One checkpoint, or a folder of them, of which the latest complete one is taken. Or the shares of a
            state in memory (`hold`) that this rank has: its own as a rule, none on a new rank, several if ranks have
            left.
        loader: This rank's. At the same world size `load` restores its position with `load_state_dict`, or, if it has
            none, by reading the pass's earlier batches again.
        partly: Load the parts that fit a model that has grown or changed: parameters and buffers of the same name,
            shape and dtype, with their optimizer state. All others keep this job's values, and notes name them.

    Raises:
        CheckpointError: There is no checkpoint, or there are shares of different states.
        TornCheckpoint: It is incomplete or damaged; names the file or the entry.
        ForeignCheckpoint: It belongs to another model, optimizer or format version; the message names the difference.
        OutOfTurn: An update is in progress.
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
    path: Path | None = None
    if isinstance(source, str | os.PathLike):
        path, source = _shares_in(Path(source), ranks)
    # All ranks see all files, and each reads what it needs.
    saved = Holding(source, partial(_gather, parallel) if path is None else lambda record: [record])
    continuation, state, differing = _read(parallel, saved, ranks, moves=path is None, partly=partly)
    positions = tuple(state.get("loader", {}).values())
    goes_on = loader is not None and bool(positions) and saved.header.world_size == parallel.world_size
    place, differs = continuation.pass_of(state) or {}, ""
    if goes_on:
        restore = partial(parallel.feeding.restore, loader, positions[parallel.rank], place)
        differs = ranks.agree("restoring the loader", restore)
    with parallel.job.compute.lifetime.running():
        continuation.load(state, goes_on=goes_on)
    notes = (
        *([differs] if differs else []),
        *([_UNSAVED[unsaved]] if not goes_on and (unsaved := continuation.unsaved(state)) else []),
        *(f"{one}: not loaded" for one in differing),
        *_notes(parallel, saved, state),
        *_notes_of_pass(place, saved.names, goes_on=goes_on),
    )
    for note in notes:
        _log.warning("rank %d, after step %d: %s", parallel.rank, parallel.steps, note)
    return Restored(
        step=parallel.steps,
        extra=state["extra"],
        path=path,
        loader_states=positions,
        is_pass_over=goes_on and _is_over(place),
        notes=notes,
    )


def _read(
    parallel: DataParallel, saved: Holding, ranks: Ranks, *, moves: bool, partly: bool
) -> tuple[Continuation, dict[str, Any], list[str]]:
    """Return the object that loads the state, the state, and the entries that keep the job's values; all ranks must
    call it.

    Args:
        parallel: The job.
        saved: The state.
        ranks: The ranks, which agree on every error.
        moves: Whether ranks send each other their shares.
        partly: As in `load`.
    """
    differing: list[str] = []
    with _grown(parallel.job.model.model, saved.model):
        with parallel.job.compute.lifetime.running():
            continuation = parallel.continuation()
            if partly:
                differing = saved.leave_out(continuation.blank((), 0, same_strategy=False, same_layout=False))
            state = continuation.blank(
                saved.names,
                0 if differing else saved.header.world_size,
                same_strategy=saved.header.strategy == parallel.strategy.name,
                same_layout=saved.header.layout == parallel.job.layout_digest,
            )
            present = continuation.write()["model"] if differing else {}
            kept = {name: one for name, one in present.items() if name not in saved.model}
            state["model"] = {name: one for name, one in state["model"].items() if name not in kept}
        ranks.agree("checking a checkpoint", lambda: saved.check(name_of(parallel.optimizer), state["model"]))
        if moves:
            missing = saved.read(state, moves=saved.header.world_size != parallel.world_size)
        else:
            missing = ranks.agree("reading a checkpoint", lambda: saved.read(state, moves=False))
        ranks.agree("reading a checkpoint", lambda: check_whole(missing))
        state["model"] |= kept
        ranks.agree("unpacking a checkpoint", lambda: unpack_entries(state))
        ranks.agree("comparing optimizers and schedulers", lambda: continuation.check(state))
    return continuation, state, differing


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a checkpoint for any program, without a job: whole tensors, as in plain PyTorch.

        state = checkpoint.read("checkpoints")
        model.load_state_dict(state["model"])

    Args:
        source: One checkpoint, or a folder of them, of which the latest complete one is taken.

    Returns:
        By part, dictionaries: "model" as `model.state_dict()`, "optimizer" in PyTorch's flattened form, "master" where
        models hold coarser values, "job" with its counts, and others for Stretto alone. A tensor that one rank has
        written is in the memory of the file.

    Raises:
        CheckpointError: There is no checkpoint.
        TornCheckpoint: It is incomplete or damaged; names the file or the entry.
        ForeignCheckpoint: It has another format version.
    """
    path = folder.find(folder_of(source, "source"))
    manifest = Manifest.read(path)
    shares = [manifest.share(path, rank) for rank in range(len(manifest.shares))]
    state: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in shares for name in one.entries):
        part, _, key = name.partition(".")
        entry = _whole(shares, name, path)
        # Bytes of other parts are packed: for the rank that continues.
        if type(entry) is not bytes or part in ("model", "optimizer"):
            state.setdefault(part, {})[key] = entry
    return state


def export(source: str | os.PathLike[str], directory: str | os.PathLike[str], *, config: Any = None) -> Path:
    """Write the model of a checkpoint into `directory` as `model.safetensors`, with one tensor in memory at a time.

        checkpoint.export("checkpoints", "model", config=model.config)

    It needs no job, and no process holds the whole model, however it was sharded.

    Args:
        source: One checkpoint, or a folder of them, of which the latest complete one is taken.
        directory: The folder; made if it does not exist.
        config: Configuration of a Hugging Face model, for `from_pretrained`: `model.config`.

    Returns:
        The file.

    Raises:
        CheckpointError: There is no checkpoint.
        TornCheckpoint: It is incomplete or damaged; names the file or the entry.
        ForeignCheckpoint: It has another format version.
        DiskError: The file cannot be written.
    """
    file = folder_of(directory, "directory") / "model.safetensors"
    path = folder.find(folder_of(source, "source"))
    manifest = Manifest.read(path)
    shares = [manifest.share(path, rank, whole=False) for rank in range(len(manifest.shares))]
    kinds = models({n: kind for one in shares for n, kind in kinds_of(one.entries).items() if kind})
    # As the format's own writer: the widest first, so that every tensor is aligned in the file.
    names = sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    index: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + kinds[name].num_bytes
        index[name] = {
            "dtype": _SAFETENSORS[kinds[name].dtype], "shape": kinds[name].shape, "data_offsets": [begin, end]
        }  # fmt: skip
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)

    def write(unfinished: Path) -> None:
        with unfinished.open("wb") as stream:
            stream.write(len(head).to_bytes(8, "little") + head)
            for name in names:
                stream.write(bytes_of(_whole(shares, f"model.{name}", path)).numpy().data)

    replace_file(file, write)
    if config is not None:
        config.save_pretrained(file.parent)
    return file


def _whole(shares: Sequence[Held], name: str, path: Path) -> Any:
    """Return an entry that the shares of a checkpoint hold together."""
    entry, *others = (share.take(name) for share in shares if name in share.entries)
    if not isinstance(entry, Runs):
        return entry
    together = Runs(entry.shape, entry.dtype, in_order(one.values for one in (entry, *others)))
    whole = together.run(0, math.prod(entry.shape))
    if whole is None:
        raise TornCheckpoint(
            f"{path}: the shares do not hold all of {name!r}; go back to an older checkpoint"
        )
    return whole.view(entry.shape)


@contextlib.contextmanager
def _grown(model: nn.Module, saved: Kinds) -> Iterator[None]:
    """Give modules with their own loading rule tensors of the saved kinds; undo this if the block raises.

    Quantisers and banks make buffers in their first forward pass, and load them into a fresh module as well.
    """
    before: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    try:
        for prefix, module in _modules(model):
            held = module._buffers
            taken = _taken(module, prefix, held, saved)
            if taken is not held:
                before.append((module, dict(held)))
                held |= {name: one for name, one in taken.items() if not are_alike(one, held.get(name))}
        yield
    except BaseException:
        for module, held in before:
            module._buffers.clear()
            module._buffers.update(held)
        raise


def check_loads(model: nn.Module, first: Mapping[str, Tensor], saved: Kinds) -> None:
    """Raise unless a fresh model loads what this one saves.

    Args:
        model: Has taken its steps.
        first: Its buffers when it was wrapped, by name.
        saved: The kinds of the entries that it saves.

    Raises:
        CheckpointError: Says which buffers it does not load.
    """
    fresh = dict(saved)
    for prefix, module in _modules(model):
        now = module._buffers
        held = {name: first.get(prefix + name) for name in now}
        if all(map(are_alike, held.values(), now.values())):
            continue
        for name, one in _taken(module, prefix, held, saved).items():
            if prefix + name in saved and one is None:
                del fresh[prefix + name]
            elif one is not None and prefix + name in saved:
                fresh[prefix + name] = Kind(tuple(one.shape), one.dtype)
    if found := differences(saved, fresh):
        raise CheckpointError(
            f"a fresh model does not load what this one saves: {'; '.join(found)}: give buffers that change in "
            "training their later shapes before the model is wrapped, a _load_from_state_dict that makes them, or "
            "persistent=False"
        )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module that has buffers, behind what its entries begin with."""
    for path, module in model.named_modules():
        if module._buffers:
            yield original_name(f"{path}.") if path else "", module


def _taken(
    module: nn.Module, prefix: str, held: dict[str, Tensor | None], saved: Kinds
) -> dict[str, Tensor | None]:
    """Return a module's buffers `held` once tensors of the saved kinds are loaded into them; `held`, if all fit.

    A twin loads them; the module itself does not change.
    """
    if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
        return held
    kinds = {
        name: kind
        for name, kind in saved.items()
        if kind is not None and name.rpartition(".")[0] == prefix.removesuffix(".")
    }
    if all(
        (found := held.get(name.removeprefix(prefix))) is not None and kind == (found.shape, found.dtype)
        for name, kind in kinds.items()
        if name.removeprefix(prefix) not in module._parameters
    ):
        return held
    twin = _twin(module, held)
    values = {
        **{name: torch.zeros(kind.shape, dtype=kind.dtype) for name, kind in kinds.items()},
        **{prefix + name: one for name, one in twin._parameters.items() if one is not None},
    }
    twin._load_from_state_dict(values, prefix, {}, False, [], [], [])
    return twin._buffers


def _twin(module: nn.Module, held: Mapping[str, Tensor | None]) -> nn.Module:
    """Return a module to load into instead of `module`, which does not change."""
    twin = object.__new__(type(module))
    vars(twin).update(
        vars(module),
        # `.data` counts writes of its own: the job's parameters remain unwritten.
        _parameters={name: None if one is None else one.data for name, one in module._parameters.items()},
        _buffers={
            name: None if one is None else torch.zeros_like(one, device="cpu") for name, one in held.items()
        },
        _modules={
            name: None if one is None else _twin(one, one._buffers) for name, one in module._modules.items()
        },
        _load_state_dict_pre_hooks={},
    )
    return twin


def _shares_in(path: Path, ranks: Ranks) -> tuple[Path, list[Held]]:
    """Return a checkpoint's own folder, and its shares, this rank's first; each rank checks its own, or every N-th."""
    found = Path(
        ranks.first("looking for a checkpoint", lambda: str(folder.find(path)) if ranks.rank == 0 else "")
    )

    def opened() -> Manifest:
        if not found.is_dir():
            raise CheckpointError(
                f"rank 0 finds {found}, and this rank does not: expected a file system that all ranks share"
            )
        manifest = Manifest.read(found)
        if ranks.rank == 0:
            manifest.check_files(found)
            for place in (found.parent, found):
                folder.say_doubts(place)
        return manifest

    manifest = ranks.agree("opening a checkpoint", opened)
    every = range(len(manifest.shares))
    mine = every[ranks.rank :: ranks.world_size]
    order = sorted(every, key=lambda rank: len(every) == ranks.world_size and rank not in mine)
    return found, ranks.agree(
        "checking a checkpoint",
        lambda: [manifest.share(found, rank, whole=rank in mine) for rank in order],
    )


def _gather(parallel: DataParallel, record: bytes) -> list[bytes]:
    with parallel.job.compute.lifetime.running():
        parallel.job.replica.wait_for_transfers()
        return parallel.job.everyone.gather_records(record)


def _notes(parallel: DataParallel, saved: Holding, state: State) -> Iterator[str]:
    """Yield what keeps the continuation from being exact."""
    if saved.header.world_size != parallel.world_size:
        yield (
            f"saved by {saved.header.world_size} ranks, continued by {parallel.world_size}: random states and loader "
            "positions are not restored"
        )
    kinds = {name.partition(".")[0] for name in saved.names}
    if kinds & {"owed", "debts"} and parallel.job.exchange.feedback is None:
        yield (
            f"saved on a wire that keeps rounding errors, resumed on {parallel.options.wire} under "
            f"{parallel.strategy.name}: errors that ranks had not sent yet are dropped"
        )
    dropped = [words for part, words in _AHEAD.items() if part in kinds and part not in state]
    if dropped:
        why = (
            f"saved under {saved.header.strategy}, continued under {parallel.strategy.name}"
            if saved.header.strategy != parallel.strategy.name
            else "other parameters are trained, or on other ranks, or in other buckets"
        )
        yield f"{why}: {' and '.join(dropped)} dropped"
    if (parallel.scheduler is not None) != ("scheduler" in kinds):
        how = ("without", "with one") if parallel.scheduler is not None else ("with", "without one")
        yield f"saved {how[0]} a scheduler, continued {how[1]}: its state is not restored"


def _is_over(place: Mapping[str, Any]) -> bool:
    """Return whether a saved pass has no batch left, although its rest comes next."""
    return bool(place) and not place["is_left"] and bool(place["is_exhausted"] or place["votes"])


def _notes_of_pass(place: Mapping[str, Any], names: set[str], *, goes_on: bool) -> Iterator[str]:
    """Yield notes on the saved pass that are not exact, unless the loader's state continues it.

    Without one a pass that is over, with all its updates, is behind.
    """
    if not place or place["is_left"]:
        return
    is_whole = "job.round_report" not in names and not any(name.startswith("replica.") for name in names)
    is_over = _is_over(place) and (goes_on or is_whole)
    if is_over:
        if goes_on:
            yield (
                "saved after the last batch of a pass: the first feed() ends that pass and gives no batch; if your "
                "loop computes its epoch from the step, begin with the epoch before (restored.is_pass_over)"
            )
    elif not goes_on:
        yield (
            f"saved after {place['position']} batches of a pass, and resumed without the state of its loader: "
            "the first feed() begins a new pass; pass loader= to save and load"
        )
    if num_out := place.get("num_out", 0):
        yield (
            f"saved by a loop that had asked for {num_out} batches ahead: no update counted them, and feed() "
            "does not repeat them"
        )


_log = logging.getLogger("stretto")

_UNSAVED = {
    "draws": "the loader draws from its own generator, which was not saved or not loaded: give loader= to both",
    "loop": "saved by a loop without feed(), and resumed without the state of its loader: its place in the data is "
    "not known; iterate parallel.feed(loader), and give loader= to save and load",
}
_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

_AHEAD = {
    "carry": "gradients accumulated ahead",
    "shown": "the prediction that was shown",
    "replica": "what each rank has stepped alone since the last average",
}
