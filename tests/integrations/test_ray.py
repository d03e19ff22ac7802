"""The loop of docs/integrations.md under Ray Train, one of whose workers fails, gives the numbers of PyTorch's DDP."""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.docs.pages import DOCS, code_blocks
from tests.processes import run_ranks

(PAGE,) = code_blocks(DOCS / "integrations.md", "tests/integrations/test_ray.py")

SETTING = """
import sys
from pathlib import Path

import torch
from torch import nn

FOLDER = sys.argv[1]


def make_model():
    from tests.integrations.test_ray import model
    return model()


def make_loader():
    from tests.integrations.test_ray import loader
    return loader()


def loss_function(outputs, targets):
    from tests.integrations.test_ray import fail_once
    fail_once(FOLDER)
    return nn.functional.mse_loss(outputs, targets)
"""

END = """
print("updates:", result.return_value)
"""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> TensorDataset:
    points = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.norm(dim=1, keepdim=True))


def loader() -> DataLoader[tuple[Tensor, ...]]:
    """Sixteen micro-batches for each of two ranks: four updates."""
    return DataLoader(data(), batch_size=4)


def fail_once(folder: str) -> None:
    """Raise on rank 1 in the third update, behind the checkpoint of the second, unless that has happened before."""
    failed = Path(folder, "failed")
    if os.environ["RANK"] == "1" and [*Path(folder).glob("*-step-2")] and not failed.exists():
        failed.touch()
        raise RuntimeError("this worker fails")


def stock(rank: int, begins: list[int]) -> dict[str, Tensor]:
    """Train with DDP, an epoch of so many updates after the other."""
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for updates in begins:
        batches = iter(DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), shuffle=False)))
        for _ in range(updates):
            for index in range(4):
                inputs, targets = next(batches)
                with wrapped.no_sync() if index < 3 else nullcontext():
                    (nn.functional.mse_loss(wrapped(inputs), targets) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in wrapped.module.state_dict().items()}


@pytest.mark.long
def test_a_loop_under_ray_train_goes_on_after_a_failure_with_the_numbers_of_ddp() -> None:
    folder, program, root = Path("checkpoints"), Path("program.py"), DOCS.parent
    folder.mkdir()
    with tempfile.TemporaryDirectory() as short:  # the names of Ray's sockets have a limit
        begin = f"ray.init(num_cpus=3, include_dashboard=False, _temp_dir={short!r})\n"
        program.write_text("import ray\n" + SETTING + begin + PAGE + END)
        variables = {
            "PYTHONPATH": f"{root}:{root / 'src'}",
            "HOME": ".",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = [sys.executable, str(program), str(folder)]
        ended = subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)
    assert "updates: 6\n" in ended.stdout, ended.stderr[-4000:]
    assert (folder / "failed").exists()
    trained = torch.load(folder / "model.pt")
    expected, _ = run_ranks(2, stock, [2, 4])  # its second half begins with the data again
    assert trained.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(trained[name], expected[name])] == []
