"""A terminal to print on."""

import sys

import pytest


def print_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the test prints from now on go to a terminal, which draws no panels."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
