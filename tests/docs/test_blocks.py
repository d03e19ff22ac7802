"""The blocks of pages run as they stand, one after the other, and end as the page says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.strategies import Strategy
from tests.docs.pages import DOCS, code_blocks

Names = dict[str, Any]


def of_a_loop() -> Names:
    """What a page has its reader bring: a model, and what trains it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(16)],
        "loss_function": nn.functional.mse_loss,
    }


PAGES: dict[str, tuple[Names, int, Callable[[Names], object]]] = {
    "adding-a-strategy.md": (
        {"__name__": "example"},
        4,
        lambda names: issubclass(names.get("PipeSGD", Strategy), Strategy),
    ),
    "averaging.md": (of_a_loop(), 1, lambda names: names["parallel"].steps == 8),
    "diloco.md": (of_a_loop(), 1, lambda names: names["parallel"].steps == 8),
    "nodes.md": ({}, 2, lambda names: names["parallel"].finish() is not None),
    "testing.md": ({}, 2, lambda names: True),  # its own assertions hold
    "virtual-cluster.md": ({}, 1, lambda names: names["results"].values[0] > 0),
}
"""What is there before, how many blocks there are, and what is true behind each of them."""


def test_the_blocks_of_a_page_run_and_end_as_it_says() -> None:
    for page, (names, count, ends) in PAGES.items():
        blocks = code_blocks(DOCS / page, "tests/docs/test_blocks.py")
        assert len(blocks) == count, page
        for block in blocks:
            exec(compile(block, page, "exec"), names)
            assert ends(names), page
