"""A group over another one: what torch asks of it beside collectives."""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from stretto.groups.names import OlderNames


class WrappedGroup(OlderNames, dist.ProcessGroup):
    """A process group whose collectives an inner group performs; a subclass says what happens around them.

    Args:
        inner: Performs them.
        store: Of this group, with a prefix of its own; None for the inner group's.
        backend_name: By which the subclass is registered.
    """

    def __init__(self, inner: dist.ProcessGroup, store: Store | None, backend_name: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # missing in torch's stub
        self._inner = inner
        self._store = store
        self._backend_name = backend_name
        self._name = GroupName("")
        self._description = ""

    @property
    def group_name(self) -> GroupName:
        """The name by which torch's registry knows this group."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What whoever made the group said it is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        """The name this group's backend is registered by."""
        return self._backend_name

    def get_group_store(self) -> Store:
        """The store of this group, with a prefix of its own."""
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
