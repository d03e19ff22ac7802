"""The repository holds what people wrote and small results, not what a run has left."""

import subprocess

from tests.style.source import ROOT

MOST_BYTES = 500_000
"""Of one file. Raw results above 200 kB are packed with gzip."""


def test_no_tracked_file_is_large() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 100  # git has told them
    sizes = {file.relative_to(ROOT).as_posix(): file.stat().st_size for file in files if file.is_file()}
    assert {name: size for name, size in sizes.items() if size > MOST_BYTES} == {}
