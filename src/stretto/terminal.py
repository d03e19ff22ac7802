"""Text that cannot steer a terminal, whatever a model, another rank or a file name has put into it."""

import unicodedata

_STEERING = {"Cc", "Cf", "Cs"}
"""Unicode's categories of control and format characters: escape sequences, carriage returns, changes of direction."""


def printable(text: str) -> str:
    """Return `text` with its control characters written as escapes; line ends and tabs stay."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in _STEERING else _escape(letter)
        for letter in text
    )


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
