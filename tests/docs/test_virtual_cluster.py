"""The page's program runs, and its formulas are those of the tests of time."""

from tests.docs.pages import DOCS
from tests.virtual import test_time

PAGE = DOCS / "virtual-cluster.md"


def test_the_formulas_are_those_that_are_tested() -> None:
    formulas = [
        line.split(maxsplit=1)[1] for line in str(test_time.__doc__).splitlines() if line.startswith("    ")
    ]
    page = PAGE.read_text(encoding="utf-8").replace("·", " ")
    tested = [formula.replace("zero1", "").strip() for formula in formulas]
    assert len(tested) == 4
    assert [formula for formula in tested if formula not in page] == []
