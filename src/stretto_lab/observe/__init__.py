"""Output of a run: records in files, lines and tables on the screen."""

from stretto.json_lines import JsonLines, append_json_line, read_json_lines, replace_json
from stretto_lab.observe.progress import Header, Progress, speed_text
from stretto_lab.observe.records import Observer, StrikeRecorder, strikes_file
from stretto_lab.observe.stages import Stages
from stretto_lab.observe.tables import print_comparison

__all__ = [
    "Header",
    "JsonLines",
    "Observer",
    "Progress",
    "Stages",
    "StrikeRecorder",
    "append_json_line",
    "print_comparison",
    "read_json_lines",
    "replace_json",
    "speed_text",
    "strikes_file",
]
