"""The code of docs/switching.md makes a job that trains."""

import torch

import stretto
from tests.docs.pages import DOCS, code_blocks


def test_the_plan_of_the_page_begins_with_its_first_strategy() -> None:
    (block,) = code_blocks(DOCS / "switching.md", "tests/docs/test_switching.py")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    names = {"stretto": stretto, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    exec(compile(block, "docs/switching.md", "exec"), names)
    parallel: stretto.DataParallel = names["parallel"]
    for _ in range(8):
        parallel.backward(model(torch.ones(2, 3)).square().mean())
    parallel.finish()
    assert (parallel.steps, parallel.strategy) == (2, stretto.ZeRO1())
