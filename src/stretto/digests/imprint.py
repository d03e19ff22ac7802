"""An imprint: what is kept of a tensor to tell later whether it changed, and to mend it."""

import dataclasses
import itertools

from torch import Tensor

from stretto.digests.digest import digest
from stretto.digests.locate import Damage, Located, locate, mend

_BYTES_TRIED = 2**34
"""Read at most to tell which of several explanations is the right one: seconds, where the alternative is a restart."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Imprint:
    """Digest and sums of a tensor as it was."""

    digest: int
    located: Located

    @classmethod
    def of(cls, tensor: Tensor) -> "Imprint":
        """Take the imprint of a tensor as it is."""
        return cls(digest(tensor), locate(tensor))

    def mends(self, tensor: Tensor) -> bool:
        """Bring a damaged tensor back to the bit, in place, and return whether that succeeded.

        It does where all damaged words lie in one column of the sums, or in a run of less than a row. Where it does
        not, the tensor is as it was.
        """
        if not tensor.is_contiguous():
            return False
        tries = max(1, _BYTES_TRIED // max(1, tensor.nbytes))
        for damage in itertools.islice(self.located.explanations(locate(tensor)), tries):
            mend(tensor, damage)
            if digest(tensor) == self.digest:
                return True
            mend(tensor, [Damage(found.word, -found.change) for found in damage])
        return False
