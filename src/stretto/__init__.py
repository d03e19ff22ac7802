"""Stretto: data-parallel training that keeps every device busy and every replica honest.

A part of the library is imported when one of its names is first used, so that the command line can print before PyTorch
is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto import echo, errors
    from stretto.echo import Auto, Bernoulli, EchoLoader, EchoOptions, Even, Ready, diagnose
    from stretto.engine import Clock, Options, Total
    from stretto.errors import StrettoError
    from stretto.groups import local_device
    from stretto.guards import AtRest, Audit, Guard, ReplicaGuard
    from stretto.noise import Noise
    from stretto.parallel import DataParallel
    from stretto.recorder import Recorder
    from stretto.records import Incident, Update
    from stretto.strategies import (
        ACCO,
        DDP,
        DPU,
        Average,
        DiLoCo,
        LocalSGD,
        PAFTDyn,
        PAFTSync,
        Strategy,
        WeightPrediction,
        ZeRO1,
    )
    from stretto.survive import LocalCheckpoints, Term, survives

__version__ = "0.3.0"

__all__ = [
    "ACCO",
    "DDP",
    "DPU",
    "AtRest",
    "Audit",
    "Auto",
    "Average",
    "Bernoulli",
    "Clock",
    "DataParallel",
    "DiLoCo",
    "EchoLoader",
    "EchoOptions",
    "Even",
    "Guard",
    "Incident",
    "LocalCheckpoints",
    "LocalSGD",
    "Noise",
    "Options",
    "PAFTDyn",
    "PAFTSync",
    "Ready",
    "Recorder",
    "ReplicaGuard",
    "Strategy",
    "StrettoError",
    "Term",
    "Total",
    "Update",
    "WeightPrediction",
    "ZeRO1",
    "diagnose",
    "echo",
    "errors",
    "local_device",
    "survives",
]

_PACKAGES = ("checkpoint", "echo", "exchange", "groups", "guards", "integrations", "strategies")
"""Modules that programs use by their full names, as `stretto.checkpoint.save`."""
_PARTS = (
    "parallel", "strategies", "guards", "echo", "engine", "noise", "records", "recorder", "groups",
    "errors", "survive",
)  # fmt: skip
"""Modules that define the public names; `errors` is itself a public name."""


def __getattr__(name: str) -> Any:
    """Return a public name; Python calls this once for each."""
    if name in _PACKAGES:
        return importlib.import_module(f"stretto.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    parts = {part: importlib.import_module(f"stretto.{part}") for part in _PARTS}
    homes = (part for part in parts.values() if name in vars(part))
    globals()[name] = value = parts[name] if name in parts else getattr(next(homes), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
