"""The ground every test stands on: fixed threads and seeds, a clean environment, a folder of its own."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.draws import EVERYTHING, FIRST_SEED, sample

SOURCES = Path(__file__).resolve().parent.parent / "src"
LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")

SLOW = ("campaign", "cluster", "examples", "experiments", "train", "wheel")
"""Folders with few tests that take long."""
MOST_SECONDS = 8.0
"""Of the processor, for a test of the first tier."""
BEGAN = pytest.StashKey[float]()

# Set on the process, not by a fixture, so that whatever process a test starts inherits it.
for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
    del os.environ[name]
os.environ["PYTHONPATH"] = str(SOURCES)  # `python -m stretto` works from any folder, installed or not
# Bit-identity holds for one thread count, whichever it is: STRETTO_TEST_THREADS=2 runs the suite with two.
os.environ["OMP_NUM_THREADS"] = os.environ.get("STRETTO_TEST_THREADS", "1")
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it deterministic products on CUDA are refused
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download something is a mistake
# Torch's store looks up the name of whoever connects. Where no resolver answers, that is a second each, not five.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
# Hundreds of processes import the same modules, which each of them would compile anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# What a script starts in its background ignores Ctrl-C, or with nohup a hang-up, and so does what that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# What takes seconds to import is imported in hooks and fixtures: a process that only deals tests to others needs none.


def pytest_report_header() -> str | None:
    """Say which seeds the laws draw, so that a failure can be repeated."""
    return f"laws draw all their cases from STRETTO_FIRST_SEED={FIRST_SEED} on" if EVERYTHING else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave three quarters of a function's cases to `make test-all`, before pytest makes an item of each.

    Of a function that is marked `long(keep=N)`, N cases stay.
    """
    yield
    mark = metafunc.definition.get_closest_marker("long")
    if not EVERYTHING and len(metafunc._calls) > 1:
        indices = [case.indices for case in metafunc._calls]
        stays = sample(indices, metafunc.definition.nodeid, keep=mark and mark.kwargs.get("keep", 1))
        metafunc._calls = [metafunc._calls[number] for number in stays]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave functions that are marked `long` to `make test-all`, and run few long tests before many short ones."""
    marks = [(item, item.get_closest_marker("long")) for item in items]
    late = [item for item, mark in marks if mark and not mark.kwargs and not EVERYTHING]
    if late:
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item, mark in marks if not mark or mark.kwargs]
    items.sort(key=lambda item: item.path.relative_to(SOURCES.parent / "tests").parts[0] not in SLOW)


def pytest_collection_finish() -> None:
    """Tell the garbage collector that modules and collected tests stay: it would walk through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests have not run because they need a device that is not here."""
    missing = [one for one in terminalreporter.stats.get("skipped", []) if "gpu" in one.keywords]
    if missing:
        terminalreporter.write_line(
            f"{len(missing)} tests need a CUDA device and have not run (pytest -m gpu)"
        )


def processor_seconds() -> float:
    """Return what this process has used, and all that it has waited for, with the ranks of the server."""
    used = os.times()
    total = used.user + used.system + used.children_user + used.children_system
    server = forkserver._forkserver._forkserver_pid
    if server and sys.platform == "linux":
        ticks = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15]
        total += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return total


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Look at the clock of the processor before a test."""
    item.config.stash[BEGAN] = processor_seconds()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Let the last report of a test, and `build/tests.xml`, hold the processor's time that it took."""
    if call.when == "teardown":
        taken = processor_seconds() - item.config.stash[BEGAN]
        item.user_properties.append(("processor_seconds", round(taken, 2)))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Name the tests of the first tier that take long, and let the run fail for one above `STRETTO_LIMIT` seconds.

    The same test takes up to half as much again beside others.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if EVERYTHING or reporter is None or hasattr(session.config, "workerinput"):
        return
    for report in reporter.stats.get("", []):
        taken = dict(report.user_properties).get("processor_seconds", 0.0)
        if taken > MOST_SECONDS:
            says = f"took {taken} s of the processor, of {MOST_SECONDS}: mark it `long`, or draw less"
            reporter.write_line(f"{report.nodeid} {says}", red=True)
            if taken > float(os.environ.get("STRETTO_LIMIT", "inf")):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def cache_of_datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what `datasets` converts out of the home folder, in every process that a test starts."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks(cache_of_datasets: None) -> None:
    """Make the process that all ranks of all tests are forked from, if there may be any."""
    if "tests.processes" in sys.modules:
        sys.modules["tests.processes"].start_server_of_ranks()


@pytest.fixture(scope="session", autouse=True)
def determinism(server_of_ranks: None, request: pytest.FixtureRequest) -> None:
    """Hold torch to one result of every operation, in this process alone."""
    import torch

    # Also fills fresh memory with NaN, which makes every read of an unwritten element visible.
    torch.use_deterministic_algorithms(True)
    request.config.stash[BEGAN] = processor_seconds()  # what every process prepares is none of the first test


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random states, and with the same number of threads: a simulation sets one."""
    import numpy as np
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed(0)
    np.random.seed(0)
    # What torch.manual_seed does, without its preparations for devices that are not there: 3 ms a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that nothing it writes stays in the tree."""
    monkeypatch.chdir(tmp_path)
