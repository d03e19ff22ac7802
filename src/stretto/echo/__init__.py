"""Data echoing: a batch is used again while the next one is on its way."""

from stretto.echo.dataset import EchoDataset
from stretto.echo.diagnosis import Diagnosis, diagnose
from stretto.echo.loader import EchoLoader
from stretto.echo.measured import Auto, Replay
from stretto.echo.plans import Bernoulli, Even, Plan, Ready
from stretto.echo.state import EchoOptions
from stretto.schedules import Cosine, Linear, MultiStep, Schedule

__all__ = [
    "Auto",
    "Bernoulli",
    "Cosine",
    "Diagnosis",
    "EchoDataset",
    "EchoLoader",
    "EchoOptions",
    "Even",
    "Linear",
    "MultiStep",
    "Plan",
    "Ready",
    "Replay",
    "Schedule",
    "diagnose",
]
