"""An owner's fp32 masters and its private optimizer, which can commit a step or preview one."""

from stretto.optimizer.over_shards import over_shards
from stretto.optimizer.probe import whole_groups
from stretto.optimizer.segments import Piece, Segment
from stretto.optimizer.settings import Hyperparameters, learning_rate, read_hyperparameters
from stretto.optimizer.several import SeveralSchedulers, as_one, members_of, name_of
from stretto.optimizer.sharded import ReducedGradient, ShardedOptimizer, squared_norm
from stretto.optimizer.state import PieceState, StateKinds, adopt_states, average_states, piece_states
from stretto.optimizer.turning import Schedule, check_scheduler

__all__ = [
    "Hyperparameters",
    "Piece",
    "PieceState",
    "ReducedGradient",
    "Schedule",
    "Segment",
    "SeveralSchedulers",
    "ShardedOptimizer",
    "StateKinds",
    "adopt_states",
    "as_one",
    "average_states",
    "check_scheduler",
    "learning_rate",
    "members_of",
    "name_of",
    "over_shards",
    "piece_states",
    "read_hyperparameters",
    "squared_norm",
    "whole_groups",
]
