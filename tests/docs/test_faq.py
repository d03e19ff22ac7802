"""What docs/faq.md answers in code and in numbers."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import stretto
from stretto_lab.estimate import EstimateConfig, estimate
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
    assert [
        (name, value) for name, value in saved.named_parameters() if not torch.equal(value, committed[name])
    ] == []


class Mixture(nn.Module):
    """Each row goes to the expert that the gate prefers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(4, experts)
        self.experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(experts))

    def forward(self, rows: Tensor) -> Tensor:
        shares, chosen = self.gate(rows).softmax(-1).max(-1)
        parts = [
            share * self.experts[index](row)
            for row, share, index in zip(rows, shares, chosen.tolist(), strict=True)
        ]
        return torch.stack(parts)


def test_a_mixture_whose_experts_are_not_all_reached_trains_as_a_plain_loop_does() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 4) for _ in range(6)]
    trained = []
    for ours in (False, True):
        torch.manual_seed(1)
        model = Mixture(experts=16)  # more than there are rows in all
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if ours:
            options = stretto.Options(allow_unused=True)
            with stretto.DataParallel(model, optimizer, options=options) as parallel:
                for rows in parallel.feed(batches):
                    parallel.backward(model(rows).square().mean())
                parallel.finish()
        else:
            for rows in batches:
                model(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        after = [parameter.detach() for parameter in model.parameters()]
        assert any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        trained.append(after)
    assert [(plain, ours) for plain, ours in zip(*trained, strict=True) if not torch.equal(plain, ours)] == []
