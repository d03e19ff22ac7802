"""Curves in TensorBoard."""

from stretto.recorder import Curves
from stretto_lab.observe.records import Observer


class TensorBoard(Curves, Observer):
    """Writes one curve per number of an update: `stretto.recorder.Curves`, as an observer."""
