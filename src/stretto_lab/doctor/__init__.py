"""The doctor: can a machine's arithmetic, memory, collectives and links be trusted?"""

from stretto_lab.doctor.examination import Examination, examine, examine_rank
from stretto_lab.doctor.report import Finding, Report

__all__ = ["Examination", "Finding", "Report", "examine", "examine_rank"]
