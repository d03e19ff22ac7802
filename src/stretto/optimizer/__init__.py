"""An owner's fp32 masters and its private optimizer, which can commit a step or preview one."""

from stretto.optimizer.private import Hyperparameters, learning_rate, read_hyperparameters, wrapped_optimizer
from stretto.optimizer.probe import check_shardable
from stretto.optimizer.segments import Piece, Segment
from stretto.optimizer.sharded import MASTER, ReducedGradient, ShardedOptimizer
from stretto.optimizer.state import PieceState, adopt_states, average_states, piece_states, state_like

__all__ = [
    "MASTER",
    "Hyperparameters",
    "Piece",
    "PieceState",
    "ReducedGradient",
    "Segment",
    "ShardedOptimizer",
    "adopt_states",
    "average_states",
    "check_shardable",
    "learning_rate",
    "piece_states",
    "read_hyperparameters",
    "state_like",
    "wrapped_optimizer",
]
