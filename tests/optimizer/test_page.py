"""What the page about optimizers shows runs, and its numbers are those of the layout."""

import copy
import math

import torch
from torch import nn

from stretto import ACCO, DataParallel
from stretto.flat.whole import place_whole
from tests.docs.pages import DOCS, code_blocks, table

PAGE, MARKER = DOCS / "optimizers.md", "tests/optimizer/test_page.py"
WIDTH, LAYERS, POSITIONS, TOKENS = 768, 12, 1024, 50257
BUCKET = 2**20 // 4
"""Elements."""


def test_the_job_of_the_page_trains_with_both_optimizers_and_both_schedules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    block, _ = code_blocks(PAGE, MARKER)
    found = {"torch": torch, "DataParallel": DataParallel, "ACCO": ACCO, "model": model}
    exec(compile(block, PAGE.name, "exec"), found)
    with found["parallel"] as parallel:
        updates = []
        for _ in parallel.feed(range(12), on_update=updates.append):
            parallel.backward(model(torch.ones(2, 5)).square().mean())
    assert [update.learning_rates for update in updates] == [
        (0.02 * 0.99**k, 3e-4 * 0.99**k) for k in range(3)
    ]
    assert {slot.name: slot.is_whole for slot in parallel.job.layout.slots} == {
        "0.weight": True,
        "2.weight": True,
        "0.bias": False,
        "2.bias": False,
    }


def test_a_run_of_plain_pytorch_moves_in_as_the_page_says_to_the_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x = torch.randn(4, 5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = {"torch": torch, "copy": copy, "DataParallel": DataParallel, "model": copy.deepcopy(model)}
    optimizer_of = torch.optim.AdamW(found["model"].parameters(), lr=3e-4)
    optimizer_of.load_state_dict(optimizer.state_dict())
    found |= {"optimizer": optimizer_of, "steps": 3}
    exec(compile(code_blocks(PAGE, MARKER)[1], PAGE.name, "exec"), found)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found["parallel"].backward(found["model"](x).square().mean())
    found["parallel"].finish()
    for one, other in zip(model.parameters(), found["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def sizes(*, hidden_only: bool) -> list[int]:
    """Return the elements of a GPT's tensors in the order in which gradients arrive."""
    square = WIDTH * WIDTH
    matrices = [4 * square, 4 * square, square, 3 * square]
    vectors = [WIDTH, 4 * WIDTH, WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, WIDTH]
    if hidden_only:
        return matrices * LAYERS
    return [WIDTH, WIDTH, *(matrices + vectors) * LAYERS, POSITIONS * WIDTH, TOKENS * WIDTH]


def test_padding_is_what_the_table_says() -> None:
    for row in table(PAGE, MARKER):
        ranks, *columns = row.items()
        for (title, cell), hidden_only in zip(columns, (True, False), strict=True):
            content = sizes(hidden_only=hidden_only)
            assert f"({math.floor(sum(content) / 1e6 + 0.5)} million)" in title
            _, cuts = place_whole(content, BUCKET, int(ranks[1]), 1)
            share = sum(numel for _, numel in cuts) / sum(content) - 1
            assert cell == f"{100 * share:.0f} %, {len(cuts)} bucket{'s' * (len(cuts) > 1)}"
