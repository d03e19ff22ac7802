"""An imprint: what is kept of a tensor to tell later whether it changed, and to mend it."""

import dataclasses

from torch import Tensor

from stretto.digests.digest import digest
from stretto.digests.locate import Located, locate, mend


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

        It does where all damaged words lie in one row or one column of the sums. Where it does not, the tensor is left
        undefined.
        """
        if not tensor.is_contiguous():
            return False
        damage = self.located.damage(locate(tensor))
        if not damage:
            return False
        mend(tensor, damage)
        return digest(tensor) == self.digest
