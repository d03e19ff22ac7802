"""What docs/faq.md answers in code and in numbers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import stretto
from stretto_lab.estimate import EstimateConfig, estimate
from stretto_lab.testing import differing
from tests.docs.pages import DOCS, code_blocks, table

PAGE, MARKER = DOCS / "faq.md", "tests/docs/test_faq.py"


def test_the_memory_of_the_page_is_that_of_the_estimate() -> None:
    rows = table(PAGE, MARKER)
    for row in rows:
        found, _ = estimate(EstimateConfig(parameters=row["parameters"], ranks=4).work)
        memory = {(one.strategy, one.wire): f"{one.time.memory_bytes / 1e9:.3g} GB" for one in found}
        arms = [name.strip("`").partition(":wire=") for name in list(row)[1:]]
        printed = [memory[strategy, wire or "fp32"] for strategy, _, wire in arms]
        assert list(row.values()) == [row["parameters"], *printed]
    assert len(rows) == 3


def test_a_model_of_hugging_face_is_saved_as_the_page_says_while_an_estimate_is_shown() -> None:
    (source,) = code_blocks(PAGE, MARKER)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8))
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = stretto.DataParallel(model, optimizer, stretto.ACCO(), micro_batches=2)
    for _ in range(4):
        tokens = torch.randint(16, (2, 8))
        parallel.backward(model(input_ids=tokens, labels=tokens).loss)
    exec(source, {"parallel": parallel, "model": model})
    with parallel.settled():
        committed = {name: value.clone() for name, value in model.named_parameters()}
    parallel.finish()
    assert Path("trained").is_dir()
    saved = AutoModelForCausalLM.from_pretrained("trained")
    assert differing(committed, dict(saved.named_parameters())) == []
