"""Seals: checksums of a rank's values from one use to the next, which show changes and repair them."""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from stretto.checksums import Checksum, checksums, compared
from stretto.guards.contract import Difference, Part, Sealable
from stretto.guards.repair import repairs


class _Seal(NamedTuple):
    """A sealed part, and its checksum."""

    what: Sealable
    tensor: Tensor
    """The sealed tensor; the part may have a new tensor since then."""
    checksum: Checksum
    version: int
    """The tensor's version counter, which counts PyTorch's writes but not damage."""


class Seals:
    """The seals of one rank."""

    def __init__(self) -> None:
        self._seals: dict[Part, _Seal] = {}

    def add(self, what: Sealable, parts: Iterable[tuple[Part, Tensor]]) -> None:
        """Seal the current values of parts; a part that is already sealed keeps its seal."""
        fresh = {part: tensor for part, tensor in parts if part not in self._seals}
        taken = checksums(list(fresh.values()))
        for (part, tensor), checksum in zip(fresh.items(), taken, strict=True):
            self._seals[part] = _Seal(what, tensor, checksum, tensor._version)

    def renew(self, part: Part) -> None:
        """Seal a part again with its current values, if it is sealed."""
        if part in self._seals:
            seal = self._seals.pop(part)
            self.add(seal.what, [(part, seal.tensor)])

    def drop(self, what: Container[Sealable]) -> None:
        """Drop the seals of values that are about to change."""
        self._seals = {part: seal for part, seal in self._seals.items() if seal.what not in what}

    def drop_written(self, what: Sealable) -> None:
        """Drop the seals of values that the job itself has written since."""
        for part, seal in list(self._seals.items()):
            if seal.what == what and seal.tensor._version != seal.version:
                del self._seals[part]

    def sealed(self, what: Container[Sealable]) -> Iterator[tuple[Part, Tensor]]:
        """Yield the parts of these kinds, each with the tensor that was sealed."""
        yield from [(part, seal.tensor) for part, seal in self._seals.items() if seal.what in what]

    def differences(self, parts: Sequence[Part]) -> list[Difference]:
        """Return the changes of sealed parts; parts without a seal are skipped."""
        seals = [self._seals[part] for part in parts]
        found = compared([seal.checksum for seal in seals], [seal.tensor for seal in seals])
        pairs = zip(parts, found, strict=True)
        return [Difference(part, *of_part) for part, of_part in pairs if of_part[0] != of_part[1]]

    def mend(self, part: Part) -> bool:
        """Repair a sealed part in place, and return whether that succeeded."""
        seal = self._seals[part]
        return repairs(seal.checksum, seal.tensor)

    def tensor(self, part: Part) -> Tensor:
        """Return the tensor of a sealed part."""
        return self._seals[part].tensor
