"""The doctor: can a machine's arithmetic, memory, collectives and links be trusted?"""

from stretto.doctor.examination import Examination, examine, examine_rank
from stretto.doctor.report import Finding, Report

__all__ = ["Examination", "Finding", "Report", "examine", "examine_rank"]
