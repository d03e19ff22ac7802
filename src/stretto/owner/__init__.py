"""The owner's side: fp32 masters, a private optimizer, and the two things it can do with a gradient."""

from stretto.owner.gradient import ReducedGradient
from stretto.owner.optimizer import Hyperparameters, read_hyperparameters
from stretto.owner.owner import Owner
from stretto.owner.probe import check_shardable
from stretto.owner.segment import Piece, Segment

__all__ = [
    "Hyperparameters",
    "Owner",
    "Piece",
    "ReducedGradient",
    "Segment",
    "check_shardable",
    "read_hyperparameters",
]
