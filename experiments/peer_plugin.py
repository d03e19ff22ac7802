"""A plugin of pytest for peer_suites.py: puts a class in the place of a trainer's own, and notes what tests come to."""

import functools
import json
import os
from pathlib import Path
from typing import Any


def pytest_configure() -> None:
    """Put the class of PEER_KIND in its place, before any test is imported."""
    if "PEER_LIBRARY" in os.environ:
        {"lightning": _into_lightning, "transformers": _into_transformers}[os.environ["PEER_LIBRARY"]]()


def _into_transformers() -> None:
    import transformers

    if os.environ["PEER_KIND"] == "ours":
        from stretto.integrations.transformers import StrettoTrainer

        transformers.Trainer = StrettoTrainer  # type: ignore[misc]  # what tests import from here on


def _into_lightning() -> None:
    """Give every Trainer that would run in one process on the CPU, or under DDP, the strategy."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    strategy: Any = DDPStrategy
    if os.environ["PEER_KIND"] == "ours":
        from stretto.integrations.lightning import StrettoStrategy

        strategy = StrettoStrategy
    original = Trainer.__init__

    @functools.wraps(original)
    def init(self: Trainer, *args: Any, **given: Any) -> None:
        asked = given.get("strategy", "auto")
        is_alone = given.get("accelerator", "auto") in ("auto", "cpu") and given.get("devices", 1) in (
            "auto",
            1,
            "1",
        )
        if asked == "auto" and is_alone:
            given |= {"strategy": strategy(), "accelerator": "cpu", "devices": 1}
        elif asked in ("ddp", "ddp_spawn", "ddp_fork"):
            given["strategy"] = strategy(start_method=asked[4:] or "popen")
        original(self, *args, **given)

    Trainer.__init__ = init  # type: ignore[method-assign]  # as a test of theirs makes one


def pytest_runtest_logreport(report: Any) -> None:
    """Note what became of a test, once for each."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = "" if report.outcome == "passed" else str(getattr(crash, "message", report.longrepr))
        outcome = {
            "passed": report.outcome == "passed",
            "skipped": report.outcome == "skipped",
            "message": message,
        }
        with Path(os.environ["PEER_RESULTS"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, outcome]) + "\n")
