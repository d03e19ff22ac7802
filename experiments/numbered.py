"""The numbers of micro-batches in one order without end, by which trials find any that counts twice or not at all."""

from collections.abc import Iterator, Sequence

import stretto as st


class Numbered:
    """One rank's numbers: they are dealt to ranks in turn in every update, and it can go on from a position.

    Args:
        rank: From 0.
        world_size: How many ranks share the order.
        total: Micro-batches of all ranks together in an update.
    """

    def __init__(self, rank: int, world_size: int, total: st.Total) -> None:
        self._rank, self._world_size, self._total = rank, world_size, total
        self._taken = 0
        self.begin = 0
        """The first number that this deal gives to anybody."""
        self.given: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while True:
            update, turn = divmod(self._taken, self._total.of(self._rank, self._world_size))
            place = update * self._total.micro_batches + turn * self._world_size + self._rank
            self.given.append(self.begin + place)
            self._taken += 1
            yield self.given[-1]

    def state_dict(self) -> dict[str, int]:
        """Return where it is."""
        return {"begin": self.begin, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.begin, self._taken = state["begin"], state["taken"]

    def deal(self, states: Sequence[dict[str, int]]) -> None:
        """Go on after all that ranks of another number have taken."""
        self.begin, self._taken = states[0]["begin"] + sum(state["taken"] for state in states), 0
