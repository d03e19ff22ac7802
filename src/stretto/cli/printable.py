"""Text that a terminal shows and does not obey."""

import unicodedata

_KEPT = ("\n", "\t")


def printable(text: str) -> str:
    """Return `text` with a replacement sign for every control character, and for every byte that is no text.

    What a model writes, or a file's name, may hold sequences that clear the screen or change its colours.
    """
    return "".join(
        sign if sign in _KEPT or unicodedata.category(sign)[0] != "C" else "\N{REPLACEMENT CHARACTER}"
        for sign in text
    )
