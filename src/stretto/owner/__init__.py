"""The owner's side: fp32 masters, a private optimizer, and the two things it can do with a gradient."""

from stretto.owner.averaging import average_states
from stretto.owner.gradient import ReducedGradient
from stretto.owner.optimizer import Hyperparameters, read_hyperparameters
from stretto.owner.owner import MASTER, Owner
from stretto.owner.probe import check_shardable
from stretto.owner.segment import Piece, Segment
from stretto.owner.state import PieceState, adopt_states, piece_states, state_like

__all__ = [
    "MASTER",
    "Hyperparameters",
    "Owner",
    "Piece",
    "PieceState",
    "ReducedGradient",
    "Segment",
    "adopt_states",
    "average_states",
    "check_shardable",
    "piece_states",
    "read_hyperparameters",
    "state_like",
]
