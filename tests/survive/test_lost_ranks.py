"""Nodes in namespaces are lost, stopped and killed: the short version of `experiments/lost_ranks.py`. Needs root."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None,
    reason="needs Linux, root and iproute2",
)
def test_whatever_is_done_to_nodes_the_others_go_on_or_say_why_not(tmp_path: Path) -> None:
    script = [
        sys.executable,
        "experiments/lost_ranks.py",
        "--first-seed",
        "11",
        "--trials",
        "2",
        "--at-once",
        "2",
    ]
    done = subprocess.run(
        [*script, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "out" / "results.json").read_text())["trials"]
    kinds = [[event["kind"] for event in trial["events"]] for trial in trials]
    assert kinds == [["kill", "stop"], ["node"]]
    assert [(trial["outcome"], trial["faults"]) for trial in trials] == [("went on", [])] * 2
