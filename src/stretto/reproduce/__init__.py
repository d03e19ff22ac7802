"""The claims of the papers as records: what they say and where, our runs, and a verdict that follows from these."""

from stretto.reproduce.book import Book
from stretto.reproduce.intervals import Interval, difference, interval
from stretto.reproduce.minutes import MINUTES
from stretto.reproduce.record import Cell, Effect, Measure, Paper, Record
from stretto.reproduce.records import PAPERS, RECORDS
from stretto.reproduce.reproduction import ReproduceConfig, chosen, reproduce
from stretto.reproduce.results import Found, Site, found
from stretto.reproduce.trial import Trial
from stretto.reproduce.verdict import Limits, Verdict, judge

__all__ = [
    "MINUTES",
    "PAPERS",
    "RECORDS",
    "Book",
    "Cell",
    "Effect",
    "Found",
    "Interval",
    "Limits",
    "Measure",
    "Paper",
    "Record",
    "ReproduceConfig",
    "Site",
    "Trial",
    "Verdict",
    "chosen",
    "difference",
    "found",
    "interval",
    "judge",
    "reproduce",
]
