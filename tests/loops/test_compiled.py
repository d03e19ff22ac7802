"""A compiled step may call the job."""

import torch
from torch import Tensor, nn

from stretto import DataParallel, ZeRO1


def test_a_compiled_step_that_calls_backward_trains_as_one_that_is_not_compiled() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        job = DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.02), ZeRO1(), micro_batches=2)

        def step(x: Tensor, model: nn.Module = model, job: DataParallel = job) -> None:
            job.backward((model(x) - x.sum(1, keepdim=True)).square().mean())

        run = torch.compile(step, backend="eager") if compiled else step
        for index in range(6):
            run(torch.randn(3, 4, generator=torch.Generator().manual_seed(index)))
        job.finish()
        found.append(model.weight.detach())
    assert torch.equal(*found)
