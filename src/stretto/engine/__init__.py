"""The engine of one rank's job: a compute lane and a communication lane that exchange rounds."""

from stretto.engine.job import Job
from stretto.engine.options import Clock, Options, Total

__all__ = ["Clock", "Job", "Options", "Total"]
