"""The claims of the papers as records: what they say and where, our runs, and a verdict that follows from these."""

from stretto_lab.reproduce.book import Book
from stretto_lab.reproduce.intervals import Interval, difference, interval
from stretto_lab.reproduce.minutes import MINUTES
from stretto_lab.reproduce.record import Cell, Effect, Measure, Paper, Record
from stretto_lab.reproduce.records import PAPERS, RECORDS
from stretto_lab.reproduce.reproduction import ReproduceConfig, chosen, reproduce
from stretto_lab.reproduce.results import Found, Site, found
from stretto_lab.reproduce.trial import Trial
from stretto_lab.reproduce.verdict import Limits, Verdict, judge

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
