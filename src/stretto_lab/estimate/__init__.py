"""The time of an update on a link, computed from the ledger and the time model, without PyTorch."""

from stretto_lab.estimate.answer import ARMS, EstimateConfig, Row, estimate
from stretto_lab.estimate.times import ELEMENT_BYTES, Bill, Part, Time, Work, bill_of, time_of

__all__ = [
    "ARMS",
    "ELEMENT_BYTES",
    "Bill",
    "EstimateConfig",
    "Part",
    "Row",
    "Time",
    "Work",
    "bill_of",
    "estimate",
    "time_of",
]
