"""Stretto: data-parallel training that keeps every device busy and every replica honest."""

from stretto import errors
from stretto.engine import Clock, Options
from stretto.errors import StrettoError
from stretto.parallel import DataParallel
from stretto.records import Update
from stretto.strategies import ACCO, DDP, DPU, Strategy, WeightPrediction, ZeRO1

__all__ = [
    "ACCO",
    "DDP",
    "DPU",
    "Clock",
    "DataParallel",
    "Options",
    "Strategy",
    "StrettoError",
    "Update",
    "WeightPrediction",
    "ZeRO1",
    "errors",
]
