"""Torch's older names for collectives."""

from typing import Any


class OlderNames:
    """Lets a Python group that defines the newer names be called by the older ones, which torch still does."""

    def _allgather_base(self: Any, *call: Any, **named: Any) -> Any:
        return self.all_gather_single(*call, **named)

    def _reduce_scatter_base(self: Any, *call: Any, **named: Any) -> Any:
        return self.reduce_scatter_single(*call, **named)

    def alltoall_base(self: Any, *call: Any, **named: Any) -> Any:
        """`all_to_all_single`."""
        return self.all_to_all_single(*call, **named)

    def allgather_into_tensor_coalesced(self: Any, *call: Any, **named: Any) -> Any:
        """`all_gather_single_coalesced`."""
        return self.all_gather_single_coalesced(*call, **named)

    def reduce_scatter_tensor_coalesced(self: Any, *call: Any, **named: Any) -> Any:
        """`reduce_scatter_single_coalesced`."""
        return self.reduce_scatter_single_coalesced(*call, **named)
