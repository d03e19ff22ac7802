"""Another library's own tests of its trainer, with our class in the place of its own: what differs, and why?

    nice python experiments/peer_suites.py CHECKOUT --tests tests/tests_pytorch/trainer -k "not gpu"

CHECKOUT holds the tests of Lightning (`tests/tests_pytorch`) or transformers (`tests/trainer`), of about the version
that is installed. Nothing is fetched. The tests run twice, each time in a process of pytest: with the stock class (for
Lightning its `DDPStrategy`, so that the strategy alone differs) and with ours. What passes with stock and not with
ours is a difference. It is known if its message or its name stands in a list below, with a reason. The exit code is 1
if one is not.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = {"lightning": "tests/tests_pytorch", "transformers": "tests/trainer"}
"""Where a checkout of each library has those of its trainer."""


PYTEST = [
    "-p",
    "peer_plugin",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "--continue-on-collection-errors",
    "--timeout=180",
]
"""The checkout's own options may need plugins that are not here."""


@dataclass(frozen=True)
class Known:
    """A kind of difference, and its reason."""

    reason: str
    message: str = ""
    """A regular expression that is found in what the test says; empty for any."""
    test: str = "*"
    """A pattern of the test's name."""


REFUSED = "refused at the start: see the table in docs/integrations.md"
CALLS = "counts calls of a class that is not called: the job steps a private optimizer"
KNOWN: Mapping[str, Sequence[Known]] = {
    "lightning": (
        Known(REFUSED, r"StrettoStrategy does not work with"),
        Known("optimizers with closures and several optimizers are refused", r"LBFGS|expected one optimizer"),
        Known("parameters outside the optimizer are refused", r"in no group|not in the optimizer"),
        Known(
            "the job keeps the state of the optimizer", r"the state of this optimizer is empty during the job"
        ),
        Known(
            "a private optimizer of the same class is made from its settings",
            r"cannot be made again|takes no param",
        ),
        Known("an optimizer that cannot be sharded is refused, by name", r"UnsupportedOptimizer"),
        Known(
            "the job runs the closure, and never the optimizer's step", r"DID NOT RAISE", "*step_no_closure*"
        ),
        Known("a job that has ended takes no more batches", r"the job has ended"),
        Known(
            "refused at the start, where the test waits for a warning",
            r"DID NOT WARN",
            "*test_manual_optimization*",
        ),
        Known(
            "refused at the start, where the test waits for a warning",
            r"DID NOT WARN|did not match any of the \d+ warnings",
            "*test_stochastic_weight_avg*",
        ),
        Known(
            "a checkpoint at an address has no folder beside it: ranks share a file system",
            r"http:.*expected the folder",
        ),
        Known("counts the files: the folder with the state of the job is beside each", r"\.ckpt\.stretto"),
        Known(
            "torch.save is a mock, so that no state is written",
            r"EOFError",
            "*checkpoint_callback_frequency*",
        ),
        Known("counts the readings of a clock, which the job reads too", test="*time_and_epoch_gated*"),
        Known("parameters that nothing uses need Options(allow_unused=True)", r"UnusedParameters"),
        Known(
            "between updates gradients are views of the job's buffer: zero, and not None",
            r"assert False",
            "*test_validation_during_gradient_accumulation_window*",
        ),
        Known(CALLS, r"(?i)assert_called|call_count|Expected 'step'|has not been called|mock", "*"),
        Known(
            "an exact list of hooks: zero_grad of the optimizer is the job's",
            r"on_before_zero_grad",
            "*hooks*",
        ),
    ),
    "transformers": (
        Known(REFUSED, r"StrettoTrainer does not work with"),
        Known("a loss that is not finite ends the run", r"NonFinite", "*nan*"),
        Known(
            "the state of the optimizer is in the folder stretto",
            r"optimizer\.pt|scheduler\.pt|is_file|isfile",
        ),
        Known("the state of the optimizer is in the folder stretto", test="*save*checkpoint*"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Of one test."""

    passed: bool
    skipped: bool
    message: str


def library_of(checkout: Path) -> str:
    """Return which library's tests a checkout holds."""
    for library, folder in TESTS.items():
        if (checkout / folder).is_dir():
            return library
    sys.exit(f"{checkout}: expected one of {sorted(TESTS.values())} in it")


def run(checkout: Path, kind: str, words: Sequence[str], seconds: float) -> dict[str, Outcome]:
    """Run the tests with the class of this kind ("stock" or "ours"); return what became of each, by name."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        paths = [str(Path(__file__).parent), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PEER_KIND": kind,
            "PEER_LIBRARY": library_of(checkout),
            "PEER_RESULTS": str(results),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", *PYTEST, *words]
        try:
            ended = subprocess.run(
                command,
                cwd=checkout,
                env=environment,
                timeout=seconds,
                capture_output=True,
                text=True,
                check=False,
            )
            said = ended.stdout[-2000:] + ended.stderr[-2000:]
        except subprocess.TimeoutExpired:
            said = f"cut after {seconds:.0f} s"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        if not lines:
            sys.exit(f"no test ran with {kind}: {said}")
    return {name: Outcome(**outcome) for name, outcome in map(json.loads, lines)}


def reason(library: str, name: str, message: str) -> str | None:
    """Return why a difference is known, or None."""
    for known in KNOWN[library]:
        if fnmatch.fnmatch(name, known.test) and re.search(known.message, message):
            return known.reason
    return None


def compare(library: str, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> int:
    """Print the differences; return how many are not known."""
    both = [name for name in stock if name in ours]
    counts = {
        kind: sum(found[name].passed for name in both) for kind, found in (("stock", stock), ("ours", ours))
    }
    skipped = sum(stock[name].skipped for name in both)
    differ = [name for name in both if stock[name].passed and not ours[name].passed]
    print(f"{library}: {len(both)} tests with a result on both sides, {skipped} of them skipped")
    print(f"passed: stock {counts['stock']}, ours {counts['ours']}; differ: {len(differ)}")
    reasons = {name: reason(library, name, ours[name].message) for name in differ}
    for why, number in Counter(reasons.values()).most_common():
        print(f"\n{number} x {why or 'NOT KNOWN'}")
        for name in differ:
            if reasons[name] == why:
                print(
                    f"  {name}: {ours[name].message.strip().splitlines()[0][:160] if ours[name].message else ''}"
                )
    return sum(why is None for why in reasons.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--tests", nargs="*", help="files or folders in it; all of its trainer's if left out")
    parser.add_argument("-k", dest="chosen", help="as for pytest")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of each of both runs")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    library = library_of(checkout)
    words = [*(given.tests or [TESTS[library]]), *(["-k", given.chosen] if given.chosen else [])]
    stock, ours = (run(checkout, kind, words, given.seconds) for kind in ("stock", "ours"))
    sys.exit(1 if compare(library, stock, ours) else 0)


if __name__ == "__main__":
    main()
