"""Damage that no exception reports, and the guards that find, name and repair it.

    python examples/guards.py

The job is run three times: undisturbed, with one bit of its optimizer's memory flipped, and with the same flip under
guards. Only `stretto_lab.faults` makes this a rehearsal; in a real job the guards are all that is needed.
"""

import torch
from torch import Tensor, nn

import stretto
from stretto_lab.faults import Fault, FaultPlan, Injector, strike_memory

FLIP = Fault(site="masters", rank=0, instant=10, extent="element", pattern="flip", seed=9)
"""One bit of one parameter's fp32 master on rank 0, before the eleventh update."""


def train(*, faulty: bool, guards: str | tuple[stretto.Guard, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = stretto.DataParallel(model, optimizer, guards=guards)
    if faulty:
        strike_memory(parallel, Injector(FaultPlan((FLIP,)), parallel.rank))

    points = torch.randn(40, 64, 8)
    for batch in parallel.feed(points):
        loss = nn.functional.mse_loss(model(batch), batch.norm(dim=1, keepdim=True))
        update = parallel.backward(loss)
        for incident in update.incidents if update else ():
            print(f"  {incident}")
    parallel.finish()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    undisturbed = train(faulty=False, guards=())
    for guards in ((), "standard"):
        print(f"one bit flipped, {guards=}:")
        pairs = zip(undisturbed, train(faulty=True, guards=guards), strict=True)
        difference = max((one - other).abs().max().item() for one, other in pairs)
        print(f"  largest difference to the undisturbed run's parameters: {difference:.3g}")


if __name__ == "__main__":
    main()
