"""`stretto report`, and the page that other commands write; nothing here imports PyTorch."""

from collections.abc import Sequence
from pathlib import Path

from stretto.errors import StrettoError, UnknownName
from stretto.terminal import printable
from stretto_lab.cli.options import named_as_options, parse_alone
from stretto_lab.patience import waiting


def report_command(words: Sequence[str]) -> None:
    """Write a page about the folders of runs and comparisons."""
    from stretto_lab.page import ReportConfig, page_of, report  # with NumPy, which an estimate does without

    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    if not count:
        raise UnknownName("report needs the folder of a run first: stretto report FOLDER...")
    config = parse_alone("report", words[count:], ReportConfig())
    folders = [Path(word) for word in words[:count]]
    with named_as_options(config), waiting("reading the folders and drawing the page"):
        missing = report(folders, config)
    for line in missing:
        print(f"missing: {printable(line)}")
    print(f"open in a browser: {page_of(folders, config)}")


def show_page(folder: str | None) -> None:
    """Write the page about a folder into it, and print its path; print an error, since the run itself is complete."""
    if folder is None:
        return
    from stretto_lab.page import PAGE, ReportConfig, report

    page = Path(folder, PAGE)
    try:
        with waiting("drawing the page"):
            report([Path(folder)], ReportConfig(out=str(page)))
    except StrettoError as error:
        print(f"no page         {error}")
    else:
        print(f"in a browser    {page}")
