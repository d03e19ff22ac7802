"""Every row of the table of failures names the test that shows it, or says that nobody has tried it."""

import re

from tests.docs.pages import DOCS, ROOT, table

ROWS = table(DOCS / "failures.md", "tests/docs/test_failures.py")


def test_every_row_names_a_test_that_exists_or_says_that_it_was_not_tried() -> None:
    for row in ROWS:
        shown = row["shown by"]
        named = re.findall(r"`([^`]+\.py)`", shown)
        assert named or shown in ("not tried", "as a kill"), row
        assert [path for path in named if not (ROOT / path).is_file()] == [], row
