"""A page about runs, made only from the files in their folders."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from stretto.disk import replace_file
from stretto_lab.page.drawing import page
from stretto_lab.page.folder import read_folder

__all__ = ["PAGE", "ReportConfig", "page_of", "report"]

PAGE = "report.html"
"""Name of the page in a run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The options of a report."""

    out: str | None = None
    """The page, which needs no network and replaces an old file. None writes report.html into the folder; for several
    folders, a file in runs/ with their names."""


def page_of(paths: Sequence[Path], config: ReportConfig) -> Path:
    """Return where to write the page about some folders; each folder, and each set of folders, has its own place."""
    if config.out is not None:
        return Path(config.out)
    folders = sorted({path.resolve() for path in paths})
    if len(folders) == 1:
        return paths[0] / PAGE
    digest = hashlib.sha256("\0".join(map(str, folders)).encode()).hexdigest()[:8]
    more = f"-and-{len(folders) - 2}-more" if len(folders) > 2 else ""
    return Path("runs", f"report-{folders[0].name}-{folders[1].name}{more}-{digest}.html")


def report(paths: Sequence[Path], config: ReportConfig) -> list[str]:
    """Write the page about some folders, and return a line for each gap in their data.

    Args:
        paths: Folders of runs and comparisons.
        config: Where to write it.

    Raises:
        ConfigError: A folder is not that of a run or comparison.
        DiskError: The file cannot be written.
    """
    paths = list(dict.fromkeys(paths))
    names = [path.resolve().name for path in paths]
    folders = [
        read_folder(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]
    whole = page(folders)
    replace_file(page_of(paths, config), lambda path: path.write_text(whole, encoding="utf-8"))
    return [f"{folder.name}: {gap}" for folder in folders for gap in folder.gaps]
