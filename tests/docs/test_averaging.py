"""The examples in docs/averaging.md and docs/diloco.md run."""

import pytest
import torch
from torch import nn

from tests.docs.pages import DOCS, code_blocks


@pytest.mark.parametrize("page", ["averaging.md", "diloco.md"])
def test_the_example_runs(page: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(16)],
        "loss_function": nn.functional.mse_loss,
    }
    (source,) = code_blocks(DOCS / page, "tests/docs/test_averaging.py")
    exec(source, names)
    assert names["parallel"].steps == 8
