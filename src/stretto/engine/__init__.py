"""The engine: two lanes, landing and take-off."""

from stretto.engine.compute_lane import ComputeLane
from stretto.engine.options import Options
from stretto.engine.quota import Clock
from stretto.engine.start import start_lanes
from stretto.strategies.ledger import Ledger, ledger_of

__all__ = ["Clock", "ComputeLane", "Ledger", "Options", "ledger_of", "start_lanes"]
