"""Both loops of the README run, and train the same model where the mathematics is the same."""

from typing import Any

import torch

import stretto
from tests.docs.pages import README, code_blocks

(DIFF,) = code_blocks(README, "tests/docs/test_readme.py")


def side(sign: str) -> str:
    """The program before (`-`) or after (`+`) the change."""
    return "\n".join(line[1:] for line in DIFF.splitlines() if line[:1] in ("", " ", sign))


def train(program: str) -> dict[str, Any]:
    """Run a program of the README on a small model and return its names."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(12)]
    names = {
        "model": torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)),
        "loader": batches,
        "loss_function": torch.nn.functional.mse_loss,
    }
    exec(compile(program, "README.md", "exec"), names)
    return names


def test_the_loop_with_a_synchronous_strategy_equals_the_plain_loop_to_the_bit() -> None:
    # SGD notices a wrong scale of the gradient, AdamW does not.
    plain, ours = (train(side(sign).replace("AdamW", "SGD").replace("ACCO", "ZeRO1")) for sign in "-+")
    # Dividing by 4 micro-batches is exact, before the sum as after it.
    pairs = zip(plain["model"].parameters(), ours["model"].parameters(), strict=True)
    assert all(torch.equal(ours_value, plain_value) for plain_value, ours_value in pairs)
    assert plain["scheduler"].state_dict() == ours["scheduler"].state_dict()


def test_the_loop_as_printed_commits_an_update_for_every_four_batches() -> None:
    parallel = train(side("+"))["parallel"]
    assert isinstance(parallel.strategy, stretto.ACCO)
    assert parallel.steps == 12 // 4
