"""The departure of a round's gradients: their sum over ranks, which goes on as the gradients come."""

from collections.abc import Callable, Sequence

from torch import Tensor

from stretto.exchange.transfer import Prepare, Started, Transfers, Wait
from stretto.flat import Slices


class Departure:
    """The sums of one round's gradients, begun.

    The order in which collectives start is fixed. Whoever holds this decides when to go on, and no two ranks need to
    decide alike.

    Args:
        transfers: Sums gradients into `sums`.
        sums: Of this rank's slices.
        wait: Waits for a collective.
        prepare: Prepares a bucket whose gradients have come, before it leaves; or None.
    """

    def __init__(
        self,
        transfers: Transfers,
        sums: Slices,
        *,
        wait: Wait,
        prepare: Prepare | None,
    ) -> None:
        self.sums = sums
        """Defined after `finish`."""
        self._transfers = transfers
        self._wait = wait
        self._prepare = prepare
        self._awaited: int | Started | None = next(transfers, None)
        self._left: list[tuple[Tensor, int]] = []
        self._was_torn = False

    def tear(self) -> None:
        """Count the gradients that have left as changed, whatever their versions show."""
        self._was_torn = True

    @property
    def is_torn(self) -> bool:
        """Whether a gradient has changed behind its departure, so that ranks have summed something else."""
        return self._was_torn or any(view._version != version for view, version in self._left)

    def go_on(self, come: Callable[[int], Sequence[Tensor] | None]) -> None:
        """Go on for as long as nothing has to be waited for.

        Args:
            come: Returns the views of a bucket's gradients once all of them have come, otherwise None.
        """
        while self._awaited is not None:
            if isinstance(self._awaited, int):
                views = come(self._awaited)
                if views is None:
                    return
                self._left += [(view, view._version) for view in views]
            elif not self._awaited[0].is_completed():
                return
            self._step(self._awaited)

    def finish(self) -> Slices:
        """Go on to the end, with all gradients there, and return the sums."""
        while self._awaited is not None:
            self._step(self._awaited)
        return self.sums

    def _step(self, awaited: int | Started) -> None:
        if not isinstance(awaited, int):
            self._wait(*awaited)
        elif self._prepare is not None:
            self._prepare(awaited)
        self._awaited = next(self._transfers, None)
