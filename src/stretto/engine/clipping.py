"""The norm of a mean gradient over all ranks, and what brings it under a limit."""

import math

import numpy as np

from stretto.exchange import Exchange
from stretto.optimizer import ReducedGradient

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


def mean_norm(gradient: ReducedGradient, exchange: Exchange, *, replicated: bool) -> float:
    """Return the 2-norm of the mean gradient; a sum of two reductions has to be measured over ranks."""
    if gradient.norm_squared is None:
        norms = np.array([gradient.measure()])
        if not replicated:
            norms = np.frombuffer(b"".join(exchange.gather_bytes(norms.tobytes())))
        gradient.norm_squared = sum(norms.tolist())
    return math.sqrt(gradient.norm_squared) / gradient.weight


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor that brings a gradient of this norm under the limit."""
    return 1.0 if limit is None else min(1.0, limit / (norm + CLIP_EPSILON))
