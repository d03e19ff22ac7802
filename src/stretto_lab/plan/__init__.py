"""The planner measures a job's work and link, prices every strategy and wire by them, and ranks the prices."""

from stretto_lab.plan.choice import Choice, choose
from stretto_lab.plan.measure import Machine, measure
from stretto_lab.plan.price import Price, compute_of, price
from stretto_lab.plan.ranking import (
    UNEQUAL,
    PlanConfig,
    Ranking,
    evidence_of,
    plan,
    rank_by_time,
)

__all__ = [
    "UNEQUAL",
    "Choice",
    "Machine",
    "PlanConfig",
    "Price",
    "Ranking",
    "choose",
    "compute_of",
    "evidence_of",
    "measure",
    "plan",
    "price",
    "rank_by_time",
]
