"""Settings of the user's optimizer, which schedulers and users change: read when the first round of an update is
sent.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Hyperparameters = list[dict[str, Any]]
"""Per parameter group, every entry except the parameters."""


def read_hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """Return copies of the current settings that schedulers and users may change."""
    return [
        {key: by_value(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; NaN if its optimizer has none, or adapts it itself."""
    return math.nan if group.get("lr") is None else float(group["lr"])


def by_value(value: Any) -> Any:
    """Return a copy of a setting, or of an entry of the state, unless it is immutable."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value
