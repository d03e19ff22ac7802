"""What a job would take on a link, without measuring anything and without PyTorch: the ledger and the time model."""

from stretto_lab.estimate.answer import EstimateConfig, Row, estimate
from stretto_lab.estimate.times import ELEMENT_BYTES, Time, Work, time_of

__all__ = ["ELEMENT_BYTES", "EstimateConfig", "Row", "Time", "Work", "estimate", "time_of"]
