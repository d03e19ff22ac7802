"""Which kind of folder it is."""

from pathlib import Path

from stretto.errors import ConfigError
from stretto_lab.page.contents import Contents
from stretto_lab.page.results import read_campaign, read_comparison
from stretto_lab.page.run import read_run


def read_folder(path: Path, name: str) -> Contents:
    """Return what a folder holds, under a name of the caller's.

    Raises:
        ConfigError: It is none of a run, a comparison or a campaign.
    """
    kinds = {
        "config.json": read_run,
        "compare.json": read_comparison,
        "campaign.json": read_campaign,
    }
    for file, read in kinds.items():
        if (path / file).is_file():
            return read(path, name)
    if (path / "updates.jsonl").is_file():
        return read_run(path, name)  # its configuration is gone
    raise ConfigError(
        f"{path}: expected the folder of a run, a comparison or a campaign, found "
        f"{'no ' + ', '.join(kinds) if path.is_dir() else 'no folder'}"
    )
