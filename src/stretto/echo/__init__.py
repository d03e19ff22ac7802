"""Data echoing: batches are used again while the next ones are being read.

Reading order: `plans` (which batches are used), `buffer` (held batches), `reader` (reading ahead), `state` (options,
saved states), `updates` (the update of each batch), `loader` (all five together). Then `draws` (races between random
draws), `measured` (is an echo worth it) and `statistics` (input statistics of an update).
"""

from stretto.echo.loader import EchoLoader
from stretto.echo.measured import Auto, Diagnosis, diagnose
from stretto.echo.plans import Bernoulli, Even, Plan, Ready, Selector, StepRecord
from stretto.echo.state import EchoOptions
from stretto.schedules import Cosine, Linear, MultiStep, Schedule

__all__ = [
    "Auto",
    "Bernoulli",
    "Cosine",
    "Diagnosis",
    "EchoLoader",
    "EchoOptions",
    "Even",
    "Linear",
    "MultiStep",
    "Plan",
    "Ready",
    "Schedule",
    "Selector",
    "StepRecord",
    "diagnose",
]
