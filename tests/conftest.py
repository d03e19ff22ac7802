"""The ground every test stands on: fixed threads and seeds, a clean environment, a folder of its own."""

import gc
import multiprocessing.forkserver
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCES = Path(__file__).resolve().parent.parent / "src"
LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_")

FORKED_WITH = (
    "stretto.train.rank",
    "stretto.campaign.campaign",
    "stretto.testing",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "sklearn.datasets",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "pytest",
)
"""What ranks in processes of their own would each take seconds to import."""

# Set on the process, not by a fixture, so that whatever process a test starts inherits it.
for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
    del os.environ[name]
os.environ["PYTHONPATH"] = str(SOURCES)  # `python -m stretto` works from any folder, installed or not
# Bit-identity holds for one thread count, whichever it is: STRETTO_TEST_THREADS=2 runs the suite with two.
os.environ["OMP_NUM_THREADS"] = os.environ.get("STRETTO_TEST_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download something is a mistake
# What a script starts in its background ignores Ctrl-C, and so does what that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Also fills fresh memory with NaN, which makes every read of an unwritten element visible.
torch.use_deterministic_algorithms(True)


def pytest_collection_finish() -> None:
    """Tell the garbage collector that modules and collected tests stay: it would walk through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks() -> None:
    """Start the process that all ranks of all tests are forked from; it imports while the first tests run."""
    multiprocessing.forkserver.set_forkserver_preload(list(FORKED_WITH))
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random states, and with the same number of threads: a simulation sets one."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in an empty folder, so that nothing it writes stays in the tree."""
    monkeypatch.chdir(tmp_path)
