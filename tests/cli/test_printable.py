"""What a model writes cannot command the terminal."""

import random
import unicodedata

from stretto.cli.printable import printable


def test_control_characters_are_replaced_and_all_text_stays() -> None:
    draw = random.Random(0)
    for _ in range(200):
        text = bytes(draw.randrange(256) for _ in range(64)).decode("utf-8", "surrogateescape")
        shown = printable(text)
        assert len(shown) == len(text)
        for before, after in zip(text, shown, strict=True):
            assert after in "\n\t" or unicodedata.category(after)[0] != "C"
            assert after == before or unicodedata.category(before)[0] == "C"
    assert printable("\x1b[2Jdef é():\n\treturn\r") == "�[2Jdef é():\n\treturn�"
