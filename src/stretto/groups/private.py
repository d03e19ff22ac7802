"""Private groups of the library: no other code calls collectives on them, so results cannot be mixed up.

Note [Names of groups]
    The ranks of a group find each other in the store under its name. Torch makes a name from how many groups the
    process has made, or has: two ranks with further groups would get different names, and a falling count would
    repeat a name, under which old addresses are stored. All ranks of the group have made the same number of private
    groups over exactly these ranks. That number is in the name, and it is kept in the store itself, so no name comes
    twice in one store, after any release.
"""

import gc
import hashlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import GroupName

from stretto.errors import CommunicationError, ConfigError
from stretto.fields import shown
from stretto.groups.collective_group import SoloGroup
from stretto.groups.connections import Connection, connections
from stretto.groups.meeting import Meeting
from stretto.groups.wrapped import WrappedGroup


def private_group(
    group: dist.ProcessGroup | None = None,
    ranks: Sequence[int] | None = None,
    timeout_seconds: float = 600.0,
) -> dist.ProcessGroup:
    """Return a new group over the ranks of `group`, over `ranks`, or over all ranks of the job.

    Every rank of the new group must call it, in the same order as its other private groups; other ranks need not. See
    Note [Names of groups].

    Args:
        group: A group whose ranks and backend are copied. A group that PyTorch does not know (such as a virtual
            cluster's) must have `private()`, which returns a sibling.
        ranks: Global ranks, of the default group's backend.
        timeout_seconds: Seconds after which a collective of the new group fails. A group with `private()` has its own
            timeout.

    Raises:
        ConfigError: Arguments contradict each other, or a rank is not in the group or the job.
        CommunicationError: Not all ranks called it.
    """
    if ranks is not None and not (isinstance(ranks, Sequence) and all(isinstance(one, int) for one in ranks)):
        raise ConfigError(f"ranks={shown(ranks)}: expected numbers of ranks, as [0, 1]")
    if group is not None and ranks is not None:
        raise ConfigError("give either a group or ranks, not both: a group has its ranks already")
    if group is not None:
        return _sibling(group, timeout_seconds)
    if dist.is_initialized():
        whole = range(dist.get_world_size())
        return _over(whole if ranks is None else ranks, dist.get_backend(), timeout_seconds)
    if ranks is not None:
        raise ConfigError(
            f"ranks {list(ranks)} need torch.distributed: call init_process_group first, or leave ranks out "
            f"to train on this process alone"
        )
    return SoloGroup()


def host_group(group: dist.ProcessGroup, timeout_seconds: float = 600.0) -> dist.ProcessGroup:
    """Return a new group over the ranks of `group`, for tensors in the host's memory: over Gloo if `group` uses NCCL.

    Every rank must call, in the same order as its other private groups.

    Args:
        group: The group of a job.
        timeout_seconds: Seconds after which a collective of the new group fails, as for `private_group`.

    Raises:
        CommunicationError: Not all ranks called it.
    """
    ranks = _registered_ranks(group)
    if ranks is None or dist.get_backend(group) == dist.Backend.GLOO:
        return _sibling(group, timeout_seconds)
    return _over(ranks, dist.Backend.GLOO, timeout_seconds)


def part_of(
    group: dist.ProcessGroup, members: Sequence[int], timeout_seconds: float = 600.0
) -> dist.ProcessGroup:
    """Return a new group over some of the ranks of `group`, on the same backend.

    Every member must call, in the same order as its other private groups; the other ranks need not.

    Args:
        group: A group; if PyTorch does not know it, it must have `part(members)`, which returns such a group.
        members: Ranks as `group` numbers them, in rising order; including this rank.
        timeout_seconds: Seconds after which a collective of the new group fails. A group with `part(members)` has its
            own timeout.

    Raises:
        ConfigError: The group cannot make a group of some of its ranks.
        CommunicationError: Not all members called it.
    """
    ranks = _registered_ranks(group)
    if ranks is not None:
        own = [ranks[member] for member in members]
        return _over(own, dist.get_backend_config(group), timeout_seconds)
    part = _method(group, "part(members)", "a group of some of its ranks")
    return part(members)


def ranks_of(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the ranks of a group in the default group, in its order; if PyTorch does not know the group, its own
    ranks.

    A group that says itself what its ranks are called has an attribute `names`, which one over it need not repeat.
    """
    names: Sequence[int] | None = getattr(group, "names", None) or _registered_ranks(group)
    if names is None and isinstance(group, WrappedGroup):
        return ranks_of(group.inner)
    return range(group.size()) if names is None else names


def release(group: dist.ProcessGroup) -> None:
    """Destroy a private group; every one of its ranks calls it. It does nothing for groups unknown to PyTorch."""
    group = _innermost(group)
    if _registered_ranks(group) is not None:
        dist.destroy_process_group(group)


def _innermost(group: dist.ProcessGroup) -> dist.ProcessGroup:
    while isinstance(group, WrappedGroup):
        group = group.inner
    return group


_MOST_RETIRED = 8
"""Number of ended jobs' groups over the same ranks that are kept. On two ranks each has five descriptors and three
threads."""
_retired: list[dist.ProcessGroup] = []
"""Retired groups of this process; a global, like PyTorch's own table of groups."""


_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Connection]] = weakref.WeakKeyDictionary()
"""Connections that this process opened while it made each group."""


def opened_by(make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the group from `make`, and record the connections that are opened meanwhile."""
    before = connections()
    group = make()
    _opened[group] = connections() - before
    return group


def connections_of(group: dist.ProcessGroup) -> set[Connection]:
    """Return the connections that were opened while a private group was made; other threads may have opened some of
    them.
    """
    while group not in _opened and isinstance(group, WrappedGroup):
        group = group.inner
    return _opened.get(group, set())


def retire(group: dist.ProcessGroup) -> None:
    """Release the group of an ended job, but not at once, because a job can be saved after its end.

    All ranks release their groups in the same order, after the same job. Groups unknown to torch have nothing to
    release.
    """
    group = _innermost(group)
    if _registered_ranks(group) is not None and group not in _retired:
        _retired.append(group)


def _release_retired(ranks: Sequence[int]) -> None:
    """Release the oldest retired groups over these ranks if there are many; all ranks do this at the same group."""
    known = {group: _registered_ranks(group) for group in _retired}
    ended = [group for group, over in known.items() if over == ranks]
    if len(ended) < _MOST_RETIRED:
        return
    for group in ended:
        release(group)
    _retired[:] = [group for group, over in known.items() if over not in (ranks, None)]
    del known, ended
    gc.collect()  # the parts of a job refer to each other; sockets close when the last reference to the group goes


def _sibling(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):  # torch's marker for a group this rank is not in
        raise ConfigError("this rank is not in the given group; remove the rank from the job")
    ranks = _registered_ranks(group)
    if ranks is not None:
        return _over(ranks, dist.get_backend_config(group), timeout_seconds)
    private = _method(group, "private()", "another group of its ranks")
    return private()


def _method(group: dist.ProcessGroup, call: str, returns: str) -> Callable[..., dist.ProcessGroup]:
    """Return the method by which a group that PyTorch does not know makes another group."""
    method = getattr(group, call.partition("(")[0], None)
    if method is None:
        raise ConfigError(
            f"torch.distributed does not know the {type(group).__name__} it was given, and it has no method "
            f"{call} that returns {returns}; make it with dist.new_group, or add the method"
        )
    return cast("Callable[..., dist.ProcessGroup]", method)


def _registered_ranks(group: dist.ProcessGroup) -> list[int] | None:
    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):  # no entry in torch's map of groups
        return None


def _over(ranks: Sequence[int], backend: str, timeout_seconds: float) -> dist.ProcessGroup:
    rank = dist.get_rank()
    _check(ranks, dist.get_world_size(), rank)
    ranks = sorted(ranks)
    _release_retired(ranks)
    name, timeout = _next_name(ranks, rank), timedelta(seconds=timeout_seconds)
    store = PrefixStore(f"meeting/{name}", dist.distributed_c10d._get_default_store())
    called = ranks_of(dist.distributed_c10d._get_default_group())
    names = [called[one] for one in ranks]
    meeting = Meeting(store, ranks.index(rank), names, timeout_seconds, connections())
    try:
        meeting.wait()
        return opened_by(lambda: meeting.connect(lambda: named_group(name, ranks, rank, backend, timeout)))
    except CommunicationError:
        raise
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank}: no group over ranks {ranks} ({str(error).splitlines()[0]}): one of them has died or did not "
            "ask for it, or they have made different numbers of groups over these ranks before"
        ) from error


def _next_name(ranks: list[int], rank: int) -> str:
    over = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    number = dist.distributed_c10d._get_default_store().add(f"stretto/groups/{over}/{rank}", 1)
    return f"stretto-{over}-{number}"


def named_group(
    name: str, ranks: list[int], rank: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Do the same as `dist.new_group` for the members of the group, under a given name.

    Args:
        name: A name that no other group in PyTorch has now.
        ranks: Ranks in the default group, in rising order.
        rank: Rank of this process in the default group.
        backend: Backend of the default group.
        timeout: Time after which a collective fails.
    """
    c10d = dist.distributed_c10d
    default, own = c10d._get_default_group(), ranks.index(rank)
    device = default.bound_device_id
    # A default group with a device has NCCL split its communicator, for which all its ranks must call: a part of them
    # makes a communicator of its own instead.
    inherited = device if len(ranks) == default.size() else None
    group: dist.ProcessGroup
    default.bound_device_id = inherited
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks), own, ranks, dist.Backend(backend), c10d._get_default_store(), GroupName(name),
            timeout=timeout, device_id=inherited,
        )  # fmt: skip
    finally:
        default.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {other: index for index, other in enumerate(ranks)}
    return group


def _check(ranks: Sequence[int], world_size: int, rank: int) -> None:
    if len(ranks) != len(set(ranks)):
        raise ConfigError(f"rank {rank}: ranks {list(ranks)} name a rank twice")
    if outside := [other for other in ranks if not 0 <= other < world_size]:
        raise ConfigError(
            f"rank {rank}: ranks {outside} do not exist; the job has ranks 0 to {world_size - 1}"
        )
    if rank not in ranks:
        raise ConfigError(f"rank {rank} is not among ranks {list(ranks)}; only these may take part")
