"""Fingerprints of tensors: one that tells whether they changed, one that also says where."""

from stretto.digests.digest import digest, hexadecimal
from stretto.digests.imprint import Imprint
from stretto.digests.locate import Damage, Located, locate, mend
from stretto.digests.words import same_bytes

__all__ = ["Damage", "Imprint", "Located", "digest", "hexadecimal", "locate", "mend", "same_bytes"]
