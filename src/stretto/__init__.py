"""Stretto: data-parallel training that keeps every device busy and every replica honest."""

from stretto import echo, errors
from stretto.echo import Auto, Bernoulli, EchoDataset, EchoLoader, EchoOptions, Even, Ready, diagnose
from stretto.engine import Clock, Options
from stretto.errors import StrettoError
from stretto.guards import AtRest, Audit, Guard, ReplicaGuard
from stretto.parallel import DataParallel
from stretto.records import Incident, Update
from stretto.strategies import (
    ACCO,
    DDP,
    DPU,
    LocalSGD,
    PAFTDyn,
    PAFTSync,
    Strategy,
    WeightPrediction,
    ZeRO1,
)

__version__ = "0.2.0.dev0"

__all__ = [
    "ACCO",
    "DDP",
    "DPU",
    "AtRest",
    "Audit",
    "Auto",
    "Bernoulli",
    "Clock",
    "DataParallel",
    "EchoDataset",
    "EchoLoader",
    "EchoOptions",
    "Even",
    "Guard",
    "Incident",
    "LocalSGD",
    "Options",
    "PAFTDyn",
    "PAFTSync",
    "Ready",
    "ReplicaGuard",
    "Strategy",
    "StrettoError",
    "Update",
    "WeightPrediction",
    "ZeRO1",
    "diagnose",
    "echo",
    "errors",
]
