"""The language model on the standard library's sources."""

from dataclasses import replace

import pytest
import torch

from stretto_lab.recipes.corpus import Text, read_corpus
from stretto_lab.recipes.gpt import SHAPES, Architecture, Shape, causal_lm, shape_of
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from stretto_lab.recipes.task import Task
from stretto_lab.recipes.text import IGNORED, Bytes, Windows, sampled

SMALL = StdlibGPT(
    size="0.1m", context=32, batch=4, evaluation_windows=16, data=Text(megabytes=0.2), sample=12
)


def built(options: StdlibGPT = SMALL, rank: int = 0, world_size: int = 1, seed: int = 0) -> Task:
    return options.build(rank, world_size, seed, updates=None)


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_size_is_within_a_tenth_of_its_name(architecture: Architecture, size: str) -> None:
    with torch.device("meta"):  # counted without memory
        model = causal_lm(
            architecture, SHAPES[size], vocabulary=256, context=128, dtype=torch.float32, seed=0
        )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(1e6 * float(size.removesuffix("m")), rel=0.1)


def test_the_default_has_two_million_parameters_and_reads_8_times_128_bytes() -> None:
    task = built(StdlibGPT(data=Text(megabytes=0.2)))
    assert sum(parameter.numel() for parameter in task.model.parameters()) == pytest.approx(2e6, rel=0.01)
    assert next(iter(task.loader)).inputs.shape == (8, 128)


def test_the_loss_is_the_mean_cross_entropy_of_the_next_token() -> None:
    task = built()
    window = next(iter(task.loader))
    loss = task.loss(task.model, window)
    logits = task.model(window.inputs).logits.double()
    chosen = logits.log_softmax(-1).gather(-1, window.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = -chosen[window.targets != IGNORED].mean()
    # A mean of about 5.5 rounds to 5e-7 in float32; the sum behind it loses a few more bits.
    assert loss.value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert (loss.weight, loss.samples, loss.value.ndim) == (1.0, 4, 0)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_no_prediction_sees_its_own_future(architecture: Architecture) -> None:
    model = causal_lm(architecture, Shape(2, 32, 2), vocabulary=256, context=32, dtype=torch.float32, seed=0)
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    difference = (model(tokens).logits - model(changed).logits).abs().amax(-1)[0]
    assert difference[:20].max() == 0
    assert difference[20:].min() > 0


def test_training_reads_one_side_of_the_text_and_evaluation_the_other() -> None:
    task = built(replace(SMALL, batch=16))
    corpus = read_corpus(SMALL.data)
    assert torch.equal(task.loader.samples.stream, Bytes().stream(corpus.train.values()))
    heldout = Windows(Bytes().stream(corpus.heldout.values()), 32)
    expected = task.loss(task.model, heldout.batch(heldout.spread(16)))
    assert task.evaluate(task.model) == expected.value.item()


def test_evaluation_weighs_every_token_equally() -> None:
    task = built(replace(SMALL, batch=4, evaluation_windows=6))
    whole = built(replace(SMALL, batch=8, evaluation_windows=6))
    # 6 windows in batches of 4 and 2, or at once: the same mean up to the rounding of float32.
    assert task.evaluate(task.model) == pytest.approx(whole.evaluate(task.model), abs=1e-5)


def test_a_sample_continues_the_prompt_and_equal_models_write_equal_texts() -> None:
    task = built()
    text = task.sample(task.model)
    assert text.startswith("def ")
    assert text == built().sample(task.model)
    assert task.model.training


def test_a_sample_has_no_control_characters_but_line_breaks_and_tabs() -> None:
    text = sampled(built().model, prompt="a\x1b[31m\rb\n\tc\x00\u0085", length=0, tokens=Bytes(), context=32)
    assert text == "a[31mb\n\tc"


def test_a_sample_goes_on_beyond_the_context() -> None:
    assert len(sampled(built().model, prompt="x" * 40, length=2, tokens=Bytes(), context=32)) > 40


def test_a_size_is_a_name_or_its_three_dimensions() -> None:
    assert shape_of("0.1m") == Shape(3, 48, 3)
    assert shape_of("1x32x4") == Shape(1, 32, 4)
    assert len(built(replace(SMALL, size="1x32x4")).model.transformer.h) == 1


def test_a_bf16_model_takes_its_loss_in_float32_and_keeps_its_rotary_frequencies() -> None:
    task = built(replace(SMALL, dtype="bf16"))
    assert {parameter.dtype for parameter in task.model.parameters()} == {torch.bfloat16}
    assert task.loss(task.model, next(iter(task.loader))).value.dtype == torch.float32
    rotary = causal_lm("llama", Shape(1, 32, 2), vocabulary=9, context=8, dtype=torch.bfloat16, seed=0)
    assert {parameter.dtype for parameter in rotary.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in rotary.buffers()} == {torch.float32}
