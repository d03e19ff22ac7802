"""Whether the tests see faults that are planted in the code, and whether they saw the same faults at an earlier commit.

A fault is one token of one line: a comparison that is turned, a sum that becomes a difference, a number that is one
more, a condition that is negated. Only lines are drawn that stand in both commits with the same neighbours, so that the
same fault is planted in both. Tests of the file run, as it is called, then those of its package, and then those that
cross packages. A fault that no test can see, because the line does the same with it, counts as not seen all the same. A
test that fails has seen the fault if it passes without it, at once after that; else it is left out, and the others run
again.

    python experiments/planted_faults.py --before COMMIT --faults 120 --out benchmarks/results/DATE-planted-faults

It needs a working tree of git, and the environment of the tests. Faults that stand in files of the folder already are
not tried again.
"""

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TURNED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "*",
    "+=": "-=", "-=": "+=", "and": "or", "or": "and", "True": "False", "False": "True", "min": "max", "max": "min",
    "any": "all", "all": "any", "not": "",
}  # fmt: skip
"""What stands in the place of a token. Integers become one more."""
ACROSS = ("exactness", "strategies")
"""Folders whose tests cross packages."""
SECONDS = 900.0
"""For the tests of one folder; a fault that makes them hang is seen."""
HUNG = "hung"
"""In the place of a test's name."""
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """One token in one line of a package."""

    package: str
    path: tuple[str, str]
    """Of the file, before and now."""
    number: tuple[int, int]
    """Of the line, before and now, from 0."""
    line: str
    """As it should be."""
    planted: str
    """As it is."""


def planted_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield number, line and faulty line of every fault that may be planted in a file."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        turned = TURNED.get(token.string)
        if token.type == tokenize.NUMBER and token.string.isdigit():
            turned = str(int(token.string) + 1)
        if turned is None:
            continue
        line, column = lines[token.start[0] - 1], token.start[1]
        if line.lstrip().startswith(("from ", "import ", "def ", "@", "raise ", 'f"')):
            continue
        if token.string in "*-+" and line[column + 1 : column + 2] != " ":  # a star of arguments, a sign
            continue
        yield token.start[0] - 1, line, line[:column] + turned + line[column + len(token.string) :]


def places(tree: Path) -> dict[tuple[str, ...], tuple[str, int]]:
    """Return where in the sources a line stands, by itself and its neighbours, if it does so once."""
    found: dict[tuple[str, ...], tuple[str, int]] = {}
    times: Counter[tuple[str, ...]] = Counter()
    for path in sorted(tree.glob("src/**/*.py")):
        lines = ["", "", *path.read_text().splitlines(), "", ""]
        for number in range(len(lines) - 4):
            key = tuple(lines[number : number + 5])
            times[key] += 1
            found[key] = (str(path.relative_to(tree)), number)
    return {key: place for key, place in found.items() if times[key] == 1}


def drawn(before: Path, now: Path, faults: int, seed: int, packages: Sequence[str] | None) -> list[Fault]:
    """Return faults that can be planted in both trees, as many of each package as far as there are any."""
    old, by_package = places(before), dict[str, list[Fault]]()
    keys = {place: key for key, place in places(now).items()}
    for path in sorted({path for path, _ in keys}):
        for number, line, planted in planted_in((now / path).read_text()):
            key = keys.get((path, number))
            if key in old and (now / "tests" / Path(path).parts[2]).is_dir():
                was, at = old[key]
                package = Path(path).parts[2]
                if (before / "tests" / package).is_dir() and (packages is None or package in packages):
                    fault = Fault(package, (was, path), (at, number), line, planted)
                    by_package.setdefault(package, []).append(fault)
    rng = random.Random(seed)
    for found in by_package.values():
        rng.shuffle(found)
    chosen: list[Fault] = []
    while len(chosen) < faults and any(by_package.values()):
        for package in sorted(by_package):
            lines = {(fault.path, fault.number) for fault in chosen}
            while by_package[package]:
                fault = by_package[package].pop()
                if (fault.path, fault.number) not in lines:
                    chosen.append(fault)
                    break
    return chosen[:faults]


def seen(tree: Path, which: int, fault: Fault) -> str:
    """Plant a fault, run tests, take it back; return the test that has seen it, or ''."""
    path = tree / fault.path[which]
    own = f"tests/{fault.package}/test_{path.name}"
    wholes = [own] if (tree / own).is_file() else []
    wholes += [f"tests/{folder}" for folder in dict.fromkeys((fault.package, *ACROSS))]
    right = path.read_text()
    lines = right.splitlines(keepends=True)
    lines[fault.number[which]] = fault.planted + "\n"
    faulty = "".join(lines)
    for tests in wholes:
        unsteady: list[str] = []
        while True:
            path.write_text(faulty)
            try:
                failed = first_failed(tree, tests, *(f"--deselect={test}" for test in unsteady))
            finally:
                path.write_text(right)
            if not failed:
                break
            if failed == HUNG or not first_failed(tree, failed):
                return failed
            unsteady.append(failed)
    return ""


def first_failed(tree: Path, *words: str) -> str:
    """Return the first test that fails, or ''."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *words]
    process = subprocess.Popen(
        command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"},
    )  # fmt: skip
    try:
        written, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return HUNG
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", written, re.MULTILINE)
    return "" if process.returncode == 0 else found[1] if found else HUNG


def main(words: Sequence[str] | None = None) -> None:
    """Plant faults, one after another, in both trees."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--packages", nargs="+", help="of these alone; otherwise of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--part", type=int, nargs=2, default=[0, 1], metavar=("K", "N"), help="every N-th, from K"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    part, parts = options.part
    trees = [options.out.resolve() / f"{name}-{part}" for name in ("before", "now")]
    for tree, commit in zip(trees, (options.before, "HEAD"), strict=True):
        if not tree.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
    known = [json.loads(line) for path in options.out.glob("faults-*.jsonl") for line in path.open()]
    tried = {(tuple(row["path"]), row["planted"]) for row in known}
    with open(options.out / f"faults-{part}.jsonl", "a") as out:
        for fault in drawn(*trees, options.faults, options.seed, options.packages)[part::parts]:
            if (fault.path, fault.planted) in tried:
                continue
            began = time.monotonic()
            by = [seen(tree, which, fault) for which, tree in enumerate(trees)]
            row = asdict(fault) | {"seen_by": by, "seconds": round(time.monotonic() - began)}
            print(json.dumps(row), file=out, flush=True)
            print(fault.package, by, row["seconds"], fault.planted.strip(), flush=True)


if __name__ == "__main__":
    main()
