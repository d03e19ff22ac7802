"""Data echoing: a batch is used again while the next one is on its way."""

from stretto.echo.auto import Auto
from stretto.echo.bernoulli import Bernoulli
from stretto.echo.chooser import Plan
from stretto.echo.dataset import EchoDataset
from stretto.echo.diagnosis import Diagnosis, diagnose
from stretto.echo.even import Even
from stretto.echo.loader import EchoLoader
from stretto.echo.options import EchoOptions
from stretto.echo.ready import Ready
from stretto.echo.replay import Replay
from stretto.echo.schedule import Cosine, Linear, MultiStep, Schedule

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
