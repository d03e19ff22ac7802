"""What a model, another rank or a file name has written cannot command the terminal."""

import random
import unicodedata

from stretto.terminal import printable


def test_no_control_character_reaches_the_terminal_and_all_other_text_stays() -> None:
    draw = random.Random(0)
    for _ in range(200):
        text = bytes(draw.randrange(256) for _ in range(64)).decode("utf-8", "surrogateescape")
        shown = printable(text)
        assert [
            sign
            for sign in shown
            if not (sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs"))
        ] == []
        plain = "".join(sign for sign in text if unicodedata.category(sign)[0] != "C")
        assert printable(plain) == plain
    assert printable("\x1b[2Jdef é():\n\treturn\r") == "\\x1b[2Jdef é():\n\treturn\\r"
