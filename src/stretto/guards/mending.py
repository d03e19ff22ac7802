"""One rank's repairs of damaged values, while its communication lane is idle."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from torch import Tensor

from stretto.engine.accumulation import GradientBuffer
from stretto.engine.replica import Replica
from stretto.errors import StateCorrupt
from stretto.exchange.broadcast import broadcast
from stretto.guards.contract import Difference, Inspect, Part, Sealable
from stretto.guards.seals import Seals

SHOWN = "values to be shown"
"""Site of the values that the model shows next."""


class Mending:
    """Replaces, publishes again or clears the damaged parts of one rank.

    Args:
        replica: This rank's replica.
        seals: Seals of its parts.
        fixed: The model's tensors that no code may write.
        where: Returns rank and update, for messages.
    """

    def __init__(
        self, replica: Replica, seals: Seals, fixed: Mapping[Part, Tensor], where: Callable[[], str]
    ) -> None:
        self._replica = replica
        self._exchange = replica.exchange
        self._seals = seals
        self._fixed = fixed
        self._where = where

    def replace(
        self, parts: Sequence[Part], differences: Callable[[Sequence[Sealable]], Sequence[Difference]]
    ) -> dict[Part, int]:
        """Replace this rank's damaged parts by parts of other ranks, and send healthy parts to ranks that need them.

        Args:
            parts: Parts that are damaged on this rank and equal on other ranks; all ranks must call it.
            differences: Compares parts with their seals.

        Returns:
            The rank that each part came from.

        Raises:
            StateCorrupt: No other rank holds a part undamaged.
        """
        names = json.dumps(parts).encode() if parts else b""
        damaged = [
            {Part(*fields) for fields in json.loads(record)} if record else set()
            for record in self._exchange.gather_records(names)
        ]
        wanted = sorted(set().union(*damaged), key=str)
        if not wanted:
            return {}
        sources = {}
        for part in wanted:
            healthy = [rank for rank, of_rank in enumerate(damaged) if part not in of_rank]
            if not healthy:
                self.give_up([part])
            onto = tuple(rank for rank, of_rank in enumerate(damaged) if part in of_rank)
            sources[part] = self._exchange.numbers[healthy[0]]
            self.copy(part, self._seals.tensor(part), healthy[0], onto, is_as_sealed=True)
        self._check(differences(Inspect().what))
        return sources

    def publish(self, part: Part) -> None:
        """Publish damaged values again, from masters that this rank holds completely."""
        if self._replica.replicated:
            buffer = GradientBuffer(self._replica.sharded.layout)
            self._replica.sharded.publish(buffer.flats)
            fresh = {Part(SHOWN, f"set {index}"): flat for index, flat in enumerate(buffer.flats)}
            self._seals.tensor(part).copy_(fresh[part])
        self._check(self._seals.differences([part]))

    def clear(self, part: Part) -> None:
        """Set a damaged part to zero."""
        self._seals.tensor(part).zero_()
        self._seals.renew(part)

    def copy(
        self, part: Part, own: Tensor, source: int, onto: tuple[int, ...], *, is_as_sealed: bool = False
    ) -> None:
        """Send a part from one rank to all; the ranks in `onto` keep it, and seal it again unless it matches its
        seal.
        """
        is_wanted = self._exchange.rank in onto
        broadcast(self._exchange, own if is_wanted else own.clone(), source, f"copy of {part}")
        if is_wanted and part.site == "fixed":
            self._replica.progress.accept(part.name, self._fixed[part])
        if is_wanted and not is_as_sealed:
            self._seals.renew(part)

    def give_up(self, parts: Sequence[Part]) -> NoReturn:
        """Raise `StateCorrupt` for parts that nothing can restore."""
        raise StateCorrupt(
            f"{self._where()}: damaged beyond repair: {'; '.join(map(str, parts))}; expected the values of "
            "the last update, and no other rank holds them undamaged; resume from the last checkpoint",
            ranks=[self._replica.rank],
        )

    def _check(self, differences: Sequence[Difference]) -> None:
        if differences:
            self.give_up([difference.part for difference in differences])
