"""A table on the screen, or in a file."""

from collections.abc import Iterable, Sequence

from stretto.errors import MissingExtra


def print_table(
    what: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, width: int
) -> None:
    """Print rows of cells under headings.

    Args:
        what: The table is of, for the error.
        caption: Below it.
        headings: One per column.
        rows: As many cells each.
        left: So many columns begin at their left edge; the others end at their right one.
        width: In a file, which has none of its own that long rows would have to be folded to; characters.

    Raises:
        MissingExtra: rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtra("rich", "cli", f"the table of a {what}") from error
    table = Table(caption=caption, caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if Console().is_terminal else width).print(table)
