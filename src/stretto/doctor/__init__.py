"""Whether a machine can be trusted: its arithmetic, its memory, its collectives, its links."""

from stretto.doctor.examination import Examination, examine, examine_seat
from stretto.doctor.report import Finding, Link, Report

__all__ = ["Examination", "Finding", "Link", "Report", "examine", "examine_seat"]
