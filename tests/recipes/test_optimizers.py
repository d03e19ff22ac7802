"""Recipes train with optimizers of whole tensors, on any number of ranks, and go on to the bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.optimizer import members_of
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes.corpus import Text
from stretto_lab.recipes.gpt import Architecture, Shape, causal_lm
from stretto_lab.recipes.optimizers import AdamW, LanguageOptimizer, muon
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from tests.draws import part
from tests.recipes.files import expect_same_bits_after_a_kill, refusal, run_over, train_virtually

SMALL = StdlibGPT(size="1x32x2", context=16, batch=2, evaluation_windows=2, data=Text(megabytes=0.2))


def losses(folder: str) -> list[float]:
    return [record["loss"] for record in read_json_lines(Path(folder, "updates.jsonl"))]


@pytest.mark.parametrize("name", part(["muon", "adafactor"]))
def test_two_ranks_train_as_one_and_a_killed_run_goes_on_to_the_bit(
    name: LanguageOptimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_over(replace(SMALL, optimizer=name), updates=4, micro_batches=1)
    expect_same_bits_after_a_kill(run, monkeypatch, "stretto_lab.recipes.stdlib_gpt.next_token_loss", 6)
    train_virtually(replace(run, run_dir="alone", micro_batches=2), 1)
    # The same micro-batches, summed in another order of fp32: a few units in the last place per update. Muon rounds its
    # steps to bf16, to 2^-8 of a step at most, and four steps change a loss of 5.5 by less than 0.5.
    assert losses("whole") == pytest.approx(losses("alone"), rel=1e-4 if name == "adafactor" else 4e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_muon_steps_the_matrices_of_blocks_and_adamw_everything_else(architecture: Architecture) -> None:
    model = causal_lm(architecture, Shape(1, 32, 2), vocabulary=64, context=16, dtype=torch.float32, seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_matrices, adamw = members_of(muon(model, 0.1, AdamW(weight_decay=0.3)))
    assert (type(of_matrices), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    hidden = {names[id(one)] for group in of_matrices.param_groups for one in group["params"]}
    assert hidden == {name for name, one in model.named_parameters() if one.ndim == 2 and ".0." in name}
    decayed, plain = adamw.param_groups
    assert {names[id(one)] for one in decayed["params"]} == {
        name for name, one in model.named_parameters() if one.ndim == 2 and ".0." not in name
    }
    assert len(hidden) + len(decayed["params"]) + len(plain["params"]) == len(names)
    assert [group["lr"] for group in (*of_matrices.param_groups, decayed, plain)] == [0.1] * 3


def test_adapters_of_lora_are_refused_by_muon_in_one_line() -> None:
    message = refusal("language --task.optimizer muon --task.lora-rank 4")
    assert "--task.optimizer muon with --task.lora-rank 4: " in message
    assert "\n" not in message


def test_a_model_without_hidden_matrices_is_refused_by_muon() -> None:
    with pytest.raises(ConfigError, match="the model has none: expected adamw"):
        muon(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)), 0.1, AdamW())
