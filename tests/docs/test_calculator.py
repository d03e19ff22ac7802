"""The calculator of the site answers as `stretto estimate` does."""

import ast
import inspect
import json
import random
import re
import shutil
import subprocess

import pytest

from stretto.link import Link
from stretto_lab.estimate import Row, Work, estimate, formulas
from tests.docs.pages import DOCS, ROOT
from website.calculator import COUNTS, script

CALCULATOR = ROOT / "website/theme/javascripts/calculator.js"
FUNCTION = re.compile(r"^const (\w+) = \((.*)\) => (.*);$", re.MULTILINE)
NODE = shutil.which("node")
ASK = """
const answer = (job) => { const { rows, choice } = calculate(job); return { rows, choice }; };
console.log(JSON.stringify(JSON.parse(require("fs").readFileSync(0)).map(answer)));
"""


def random_job(seed: int) -> tuple[Work, float]:
    draws = random.Random(seed)
    work = Work(
        parameters=round(10 ** draws.uniform(3, 11)),
        update_seconds=10 ** draws.uniform(-3, 3),
        ranks=draws.choice((1, 2, 3, 4, 8, 9, 32, 33, 1024)),
        micro_batches=draws.choice(COUNTS),
        link=Link(bits_per_second=10 ** draws.uniform(6, 11)),
        packs_on_core=draws.random() < 0.5,
    )
    return work, draws.choice((0.0, 0.02, 0.05, 0.3, 1.0))


def test_a_formula_in_javascript_is_the_expression_of_the_function_that_the_command_runs() -> None:
    """Read as Python again, without the name of the library before its functions."""
    written = {name: (names, text.replace("Math.", "")) for name, names, text in FUNCTION.findall(script())}
    functions = [
        one for one in ast.parse(inspect.getsource(formulas)).body if isinstance(one, ast.FunctionDef)
    ]
    assert written.keys() == {one.name for one in functions}
    for function in functions:
        names, text = written[function.name]
        assert names == ", ".join(one.arg for one in function.args.args)
        assert isinstance(returned := function.body[-1], ast.Return)
        assert returned.value is not None
        assert ast.dump(ast.parse(text, mode="eval").body) == ast.dump(returned.value)


def test_the_script_asks_for_no_other_formula_and_computes_none_of_its_own() -> None:
    text = CALCULATOR.read_text(encoding="utf-8")
    called = set(re.findall(r"\b([a-z]+_[a-z]+)\(", text))
    assert called == {name for name, _, _ in FUNCTION.findall(script())}


@pytest.mark.skipif(NODE is None, reason="no node to run JavaScript with")
def test_it_gives_all_rows_and_the_choice_of_random_jobs() -> None:
    assert NODE is not None
    jobs = [random_job(seed) for seed in range(200)]
    asked = [
        {
            "parameters": work.parameters,
            "computing": work.update_seconds,
            "ranks": work.ranks,
            "bitsPerSecond": work.link.bits_per_second,
            "packs": int(work.packs_on_core),
            "microBatches": work.micro_batches,
            "allowed": allowed,
        }
        for work, allowed in jobs
    ]
    program = script() + CALCULATOR.read_text(encoding="utf-8") + ASK
    done = subprocess.run(
        [NODE, "-e", program], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    for (work, allowed), answer in zip(jobs, json.loads(done.stdout), strict=True):
        rows, choice = estimate(work, allowed)
        assert len(answer["rows"]) == len(rows)
        for row, found in zip(rows, answer["rows"], strict=True):
            named = (found.pop("strategy"), found.pop("wire"), found.pop("nats"))
            assert named == (row.strategy, row.wire, row.nats)
            assert found == pytest.approx(figures(row), rel=1e-9, abs=1e-9 * work.update_seconds)
        assert answer["choice"] == rows.index(choice)


def figures(row: Row) -> dict[str, float]:
    return {
        "sent": row.time.sent_bytes,
        "link": row.time.wire_seconds,
        "core": row.time.core_seconds,
        "waiting": row.time.exposed_seconds,
        "seconds": row.time.seconds,
        "memory": row.time.memory_bytes,
    }


def test_the_page_has_a_field_for_every_figure_that_the_script_reads() -> None:
    page = (DOCS / "calculator.md").read_text(encoding="utf-8")
    read = re.findall(r'value\("(\w+)"\)', CALCULATOR.read_text(encoding="utf-8"))
    assert sorted(read) == sorted(re.findall(r'name="(\w+)"', page))
