"""No communication at all: the limit of throughput."""

from collections.abc import Callable
from typing import Any

from stretto.peers.handle import Peer
from stretto.peers.tally import Tally, Totals


class Compute(Peer):
    """Every rank trains a replica of its own: nothing is faster, and nothing is learned together.

    Replicas drift, so rank 0's is the one to evaluate, and its held-out loss is no limit of anything. The records
    suppose that all ranks do what this one does. A wish to stop is seen in the store, and each rank then ends
    after the update it is at.
    """

    name = "compute"
    needs_launcher = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._store = self._control.get_group_store()

    def agree(self, tally: Tally) -> Callable[[], Totals]:
        """Ask nobody but the store."""
        if tally.stop:
            self._store.set("stop", "")
        tally.stop = self._store.check(["stop"])
        everybody = tally.as_tensor().expand(self.world_size, -1)
        return lambda: Totals.of(everybody)
