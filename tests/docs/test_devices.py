"""What the pages say of GPUs is what has been tried: a folder of results, a test or a check stands behind each line."""

import json
import re

from benchmarks.first_half_hour import CHECKS
from tests.docs.pages import DOCS, README, ROOT, table

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-gpu"))
NOT_YET = {
    README: "- Not tried on GPUs. The code for CUDA and NCCL is there, but no line of it has run on one",
    DOCS / "devices.md": "**Nothing on this page has run on a GPU yet.**",
    DOCS / "faq.md": "**no line of it has run on a GPU yet**",
}
"""What has to go when there is a folder of results."""


def test_pages_say_once_that_nothing_has_run_on_a_gpu_until_there_are_results() -> None:
    found = {
        page.name: page.read_text(encoding="utf-8").count(sentence) for page, sentence in NOT_YET.items()
    }
    assert found == {page.name: 0 if RESULTS else 1 for page in NOT_YET}


def test_results_were_made_on_a_device_and_are_linked_from_the_readme() -> None:
    for folder in RESULTS:
        lines = [json.loads(line) for line in (folder / "checks.jsonl").read_text().splitlines()]
        assert {line["device"] for line in lines} == {"cuda"}
        assert folder.name in README.read_text(encoding="utf-8")


def test_every_row_names_tests_and_checks_that_exist_or_says_that_there_are_none() -> None:
    rows = table(DOCS / "devices.md", "tests/docs/test_devices.py")
    assert len({row["what"] for row in rows}) == len(rows)
    for row in rows:
        held, looked_at = row["held without a GPU by"], row["looked at on one by"]
        tests = re.findall(r"`(tests/[^`]+)`", held)
        assert held == "by reading alone" or tests, row
        assert [test for test in tests if not (ROOT / test).is_file()] == [], row
        checks = re.findall(r"`(\w+)`", looked_at)
        assert looked_at == "not tried" or (checks and set(checks) <= CHECKS.keys()), row
