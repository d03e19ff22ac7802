"""What a run shows and keeps: records, live display, TensorBoard, tables."""

from stretto.observe.campaign_table import print_campaign
from stretto.observe.comparison_table import print_comparison
from stretto.observe.json_file import replace_json
from stretto.observe.json_lines import JsonLines, append_json_line, read_json_lines
from stretto.observe.observer import Observer, Recorder
from stretto.observe.progress import Header, Progress
from stretto.observe.tensorboard import TensorBoard

__all__ = [
    "Header",
    "JsonLines",
    "Observer",
    "Progress",
    "Recorder",
    "TensorBoard",
    "append_json_line",
    "print_campaign",
    "print_comparison",
    "read_json_lines",
    "replace_json",
]
