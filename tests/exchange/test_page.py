"""The worked example of docs/adding-a-wire.md runs, and its own assertions hold."""

from typing import Any

import pytest

from stretto.exchange import WIRES
from tests.docs.pages import DOCS, code_blocks


def test_the_example_packs_trains_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIRES, "signs", None)  # so that its absence is put back at the end
    del WIRES["signs"]
    names: dict[str, Any] = {"__name__": "example"}
    blocks = code_blocks(DOCS / "adding-a-wire.md", "tests/exchange/test_page.py")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/adding-a-wire.md", "exec"), names)
    assert WIRES["signs"].num_bytes(64) == 12
