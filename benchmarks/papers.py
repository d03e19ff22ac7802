"""The tables of docs/papers.md, made from the runs in `benchmarks/results/2026-11-25-papers/`.

    python benchmarks/papers.py

`stretto reproduce` has made the runs and judges them. What stands between two comments `<!-- made: NAME -->` and
`<!-- end -->` on the page is replaced; the rest is written by hand. `tests/docs/test_papers.py` makes the page again.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from stretto_lab.reproduce import PAPERS, RECORDS, Book, Found, Record, Site, Verdict, found
from stretto_lab.reproduce.tables import around, cells_table, effects_table, markdown, said, told

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "papers.md"
RUNS = ROOT / "benchmarks" / "results" / "2026-11-25-papers"
MEMORY = ROOT / "benchmarks" / "results" / "2026-11-21-memory" / "memory.json"
_WHO = {"paper": "the paper", "answer": "the authors, in an answer", "question": "we; a reviewer asked"}
_BLOCK = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def results() -> list[Found]:
    """Return what the runs say of every record."""
    book = Book(RUNS)
    return [found(record, book, record.seeds, Site()) for record in RECORDS.values()]


def claims(all_found: Iterable[Found]) -> str:
    """Return the table of all claims with their verdicts."""
    rows = []
    for one in all_found:
        deciding = next((effect for effect in one.effects if effect.verdict is one.verdict), None)
        here = (
            ""
            if deciding is None
            else f"{deciding.effect.says}: {around(deciding.interval, deciding.effect.digits)}"
        )
        paper = told(one.record) if deciding is None else said(deciding)
        place = "what-could-not-be-checked" if one.record.unchecked else _anchor(one.record.id)
        name = f"[{one.record.id}](#{place})"
        rows.append([name, one.record.claim, _WHO[one.record.kind], paper, here, f"**{one.verdict}**"])
    return markdown(
        ["record", "claim", "who says so", "what they say", "here, with the 95 % interval", "verdict"], rows
    )


def counts(all_found: Iterable[Found]) -> str:
    """Return how many claims have which verdict."""
    verdicts = [one.verdict for one in all_found]
    return markdown(["verdict", "records"], [[verdict, str(verdicts.count(verdict))] for verdict in Verdict])


def _anchor(id: str) -> str:
    return re.sub(r"[^\w\- ]", "", id.lower())


def records(all_found: Iterable[Found]) -> str:
    """Return the records that were run, one after the other: the paper's table beside ours."""
    parts: list[str] = []
    shown: list[tuple[str, Found]] = []
    for one in all_found:
        record = one.record
        if record.unchecked:
            continue
        lines = [
            f"#### {record.id}",
            "",
            f"{record.claim}. *{record.source[0].upper()}{record.source[1:]}.*",
            "",
        ]
        lines += [f"Here: {record.scale}; {one.seeds} seeds. Not as there: {record.differences}."]
        if record.answer:
            lines += ["", record.answer]
        before = next((id for id, other in shown if _same_runs(other.record, record)), None)
        table = (
            [f"Its table is that of [{before}](#{_anchor(before)})."]
            if before
            else [markdown(*cells_table(one))]
        )
        shown.append((record.id, one))
        parts += ["\n".join([*lines, "", *table, "", markdown(*effects_table(one))])]
    return "\n\n".join(parts)


def _same_runs(one: Record, other: Record) -> bool:
    return (one.setting, one.cells) == (other.setting, other.cells)


def unchecked(all_found: Iterable[Found]) -> str:
    """Return the records that have no runs, and why."""
    rows = [
        [
            one.record.id,
            one.record.claim,
            one.record.source,
            one.why,
        ]
        for one in all_found
        if one.record.unchecked
    ]
    return markdown(["record", "claim", "source", "why"], rows)


def papers() -> str:
    """Return the papers, with their links and what of them was read."""
    rows = [
        [
            f"*{paper.title}*",
            paper.authors,
            ", ".join(f"[{name}]({link})" for name, link in paper.links.items()),
            paper.read,
        ]
        for paper in PAPERS.values()
    ]
    return markdown(["paper", "authors", "where", "what we read"], rows)


def memory() -> str:
    """Return the bytes per parameter: the paper's, those of our ledger, and measured ones."""
    ours = {"zero1": "4 + 12/N", "acco": "6 + 12/N"}
    rows = [
        [
            f"`{run['strategy']}`",
            str(run["world_size"]),
            f"{eval_paper(ours[run['strategy']], run['world_size']):.2f}",
            f"{run['ledger_bytes_per_parameter']:.2f}",
            f"{run['peak_without_constants_per_parameter']:.2f}",
        ]
        for run in json.loads(MEMORY.read_text(encoding="utf-8"))["runs"]
        if run["dtype"] == "bfloat16" and run["strategy"] in ours
    ]
    return markdown(["strategy", "workers", "the paper's formula", "our ledger", "measured"], rows)


def eval_paper(formula: str, workers: int) -> float:
    """Return what a formula `a + b/N` gives."""
    whole, share = formula.removesuffix("/N").split(" + ")
    return float(whole) + float(share) / workers


def page(text: str, all_found: list[Found]) -> str:
    """Return the page with its tables made anew."""
    made = {
        "papers": papers(),
        "counts": counts(all_found),
        "claims": claims(all_found),
        "memory": memory(),
        "unchecked": unchecked(all_found),
        "questions": records(one for one in all_found if one.record.kind != "paper"),
        **{
            key: records(one for one in all_found if one.record.paper == key and one.record.kind == "paper")
            for key in PAPERS
        },
    }
    return _BLOCK.sub(lambda block: block[1] + _compact(made[block[2]]) + block[3], text)


def _compact(text: str) -> str:
    """Return tables without the spaces that align their columns, which nobody sees on the page."""
    return re.sub(r"-{4,}", "---", re.sub(r" {2,}", " ", text))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results()), encoding="utf-8")
