"""Process groups over an inner group: Gloo performs the collectives, a wrapper acts before and after."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import ConfigError
from stretto.groups.collective_group import CollectiveGroup
from stretto.groups.collectives import Call


class WrappedGroup(CollectiveGroup):
    """A process group whose collectives an inner group performs; a subclass adds code before and after them.

    Args:
        inner: The group that performs the collectives.
        store: The store of this group, with its own prefix; None for the inner group's.
        backend_name: The name under which the subclass is registered.
    """

    inner_device: torch.device | None = None
    """The device of the inner group's tensors; None for the device of this group's tensors."""

    def __init__(self, inner: dist.ProcessGroup, store: Store | None, backend_name: str) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._store = store
        self._backend_name = backend_name

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that performs the collectives."""
        return self._inner

    def perform(self, call: Call) -> dist.Work:
        """Let the inner group perform the call."""
        return call.on(self._inner)

    def getBackendName(self) -> str:
        """The name under which this group's backend is registered."""
        return self._backend_name

    def get_group_store(self) -> Store:
        """The store of this group, with its own prefix."""
        return self._inner.get_group_store() if self._store is None else self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives."""
        self._inner.set_timeout(timeout)

    def abort(self) -> None:
        """Abort the inner group."""
        self._inner.abort()

    def shutdown(self) -> None:
        """Shut the inner group down."""
        self._inner.shutdown()


def may_wait_again(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a work stays valid after a wait that times out, so that a caller may wait again.

    True for Gloo. With NCCL such a wait ends the group. False for other backends, which are not known, and for groups
    written in Python, unless they set an attribute `may_wait_again`.

    Args:
        group: The group that performs the collectives.
        device: Device of their tensors.
    """
    if isinstance(group, WrappedGroup):
        return group.may_wait_again and may_wait_again(group.inner, group.inner_device or device)
    if type(group) is not dist.ProcessGroup:
        return bool(getattr(group, "may_wait_again", False))
    return group._get_backend(device).name() == "gloo"


def orders_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a wait for a work orders streams, and the host continues at once.

    True for NCCL: work that the caller then queues on its stream runs after the collective. Groups written in Python
    set an attribute `orders_streams`; a wrapped group uses the inner group's, unless it sets its own.

    Args:
        group: The group that performs the collectives.
        device: Device of their tensors.
    """
    own: bool | None = getattr(group, "orders_streams", None)
    if own is not None:
        return own
    if isinstance(group, WrappedGroup):
        return orders_streams(group.inner, device)
    return type(group) is dist.ProcessGroup and group._get_backend(device).name() == "nccl"


def register_over_gloo(
    name: str, wrap: Callable[[dist.ProcessGroup, Store], WrappedGroup], address: str | None = None
) -> None:
    """Make `name` a backend of `torch.distributed`: the result of `wrap` for a plain Gloo group and its store.

    Args:
        name: Name of the backend.
        wrap: Called with the Gloo group and its store.
        address: Address of this machine where Gloo listens; None lets Gloo choose.

    Raises:
        ConfigError: PyTorch already has a backend of that name.
    """
    if name in dist.Backend.backend_list and name.upper() not in dist.Backend._plugins:
        raise ConfigError(f"{name!r} is a backend of torch's own; choose another name for this one")

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> WrappedGroup:
        return wrap(gloo_group(PrefixStore("inner", store), rank, world_size, timeout, address), store)

    dist.Backend.register_backend(name, create, devices=["cpu"])


def gloo_group(
    store: Store, rank: int, world_size: int, timeout: timedelta, address: str | None
) -> dist.ProcessGroup:
    """Return a plain Gloo group that is not in PyTorch's registries."""
    group = dist.ProcessGroup(store, rank, world_size)
    if address is None:
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        gloo = dist.ProcessGroupGloo(store, rank, world_size, options)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda"):  # Gloo takes tensors of both
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
