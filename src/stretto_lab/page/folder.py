"""Which kind of folder it is."""

from pathlib import Path

from stretto.errors import ConfigError
from stretto_lab.page.contents import Contents
from stretto_lab.page.results import read_comparison
from stretto_lab.page.run import read_run


def read_folder(path: Path, name: str) -> Contents:
    """Return what a folder holds, under a name of the caller's.

    Raises:
        ConfigError: It is neither a run nor a comparison.
    """
    kinds = {
        "config.json": read_run,
        "compare.json": read_comparison,
    }
    for file, read in kinds.items():
        if (path / file).is_file():
            return read(path, name)
    if (path / "updates.jsonl").is_file():
        return read_run(path, name)  # its configuration is gone
    raise ConfigError(
        f"{path}: expected the folder of a run or a comparison, found "
        f"{'no ' + ', '.join(kinds) if path.is_dir() else 'no folder'}"
    )
