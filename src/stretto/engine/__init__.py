"""The engine: two lanes, landing and take-off."""

from stretto.engine.job import Job
from stretto.engine.options import Clock, Options

__all__ = ["Clock", "Job", "Options"]
