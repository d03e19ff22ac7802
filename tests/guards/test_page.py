"""The guard that the page shows does what the page says."""

from typing import Any

import stretto as st
from tests.docs.pages import DOCS, code_blocks
from tests.guards.watched import Job


def test_the_pages_tripwire_reports_state_that_changed_between_updates() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in code_blocks(DOCS / "guards.md", "tests/guards/test_page.py"):
        exec(compile(block, "guards.md", "exec"), names)
    job = Job(st.ZeRO1(), 0, guards=(names["Tripwire"](),))
    first = [job.micro_batch() for _ in range(2)][1]
    assert first is not None
    assert first.incidents == ()
    job.parallel.job.sharded.masters[0][5] += 1
    second = [job.micro_batch() for _ in range(2)][1]
    assert second is not None
    assert [(v.site, v.part, v.ranks) for v in second.incidents] == [("masters", "bucket 0", (0,))]
