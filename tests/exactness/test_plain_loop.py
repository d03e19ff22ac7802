"""Synchronous strategies equal the loop that one would write by hand, on one process."""

import dataclasses

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.exactness.checks import expected_counts
from tests.exactness.jobs import (
    Case,
    State,
    build_model,
    build_optimizer,
    mean_loss,
    parameters_of,
    rate,
    stream,
)
from tests.exactness.matrix import GROUPS, RUNS, describe_run, observed
from tests.exactness.reference import Counts

UNIT_ROUNDOFF = 2.0**-24
SYNCHRONOUS = [
    (name, index)
    for name, index in RUNS
    if name in ("alone", "two", "four") and GROUPS[name][1][index].strategy.name in ("ddp", "zero1")
]


def plain_loop(case: Case, world_size: int, counts: list[Counts], *, rounding: float) -> list[State]:
    """Train on all ranks' micro-batches, rank after rank, and return the parameters after every update.

    Args:
        case: Model, optimizer and data.
        world_size: How many streams there are.
        counts: Micro-batches by update, round and rank.
        rounding: Disturb every mean gradient, in random directions, by this many times the largest difference
            that the order of its additions, and of those in its norm, can make.
    """
    generator = torch.Generator().manual_seed(5)
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    schedule = LambdaLR(optimizer, rate)
    streams = [iter(stream(case, rank)) for rank in range(world_size)]
    trained = [p for p in model.parameters() if p.requires_grad]
    states = []
    for (by_rank,) in counts:
        batches = [next(streams[rank]) for rank in range(world_size) for _ in range(by_rank[rank])]
        weight = sum(batch[2] for batch in batches)
        sizes = [torch.zeros_like(p) for p in trained]
        optimizer.zero_grad()
        for batch in batches:
            gradients = torch.autograd.grad(mean_loss(model, batch) * batch[2], trained)
            for parameter, size, gradient in zip(trained, sizes, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                size += gradient.abs()
        for parameter, size in zip(trained, sizes, strict=True):
            parameter.grad /= weight
            # A sum of m terms is off by at most (m-1) u Σ|g| in any order, so two orders differ by twice that.
            bound = 2 * (len(batches) - 1) * UNIT_ROUNDOFF * size / weight
            parameter.grad += rounding * bound * signs(bound.shape, generator)
        if case.options.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(trained, case.options.clip_norm)
            if norm > case.options.clip_norm:
                # A sum of n squares is off by at most n u, its root by half of that, in either order.
                error = sum(p.numel() for p in trained) * UNIT_ROUNDOFF
                for parameter in trained:
                    parameter.grad *= 1 + rounding * error * signs((), generator)
        optimizer.step()
        schedule.step()
        states.append(parameters_of(model))
    return states


def signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("run", SYNCHRONOUS, ids=describe_run)
def test_synchronous_update_equals_plain_loop(run: tuple[str, int]) -> None:
    name, index = run
    world_size, cases = GROUPS[name]
    case = cases[index]
    counts = expected_counts(case, world_size)
    plain = plain_loop(case, world_size, counts, rounding=0.0)
    disturbed = plain_loop(case, world_size, counts, rounding=1.0)
    found = observed(name)[0][index].committed
    for step, (ours, theirs, other) in enumerate(zip(found, plain, disturbed, strict=True), start=1):
        # How far the bound on a gradient's rounding carries into the parameters is what the disturbed loop
        # shows; twice, because its random directions need not be the worst.
        tolerance = 2 * distance(other, theirs)
        assert tolerance < 2e-4  # an update moves parameters by about 1e-2: the comparison says something
        assert distance(ours, theirs) <= tolerance, f"step {step}"


def distance(left: State, right: State) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


def test_plain_loop_and_library_part_when_a_weight_is_wrong() -> None:
    index, case = next((i, case) for i, case in enumerate(GROUPS["alone"][1]) if case.tokens)
    counts = expected_counts(case, 1)
    equal_weights = plain_loop(dataclasses.replace(case, tokens=False), 1, counts, rounding=0.0)
    assert distance(observed("alone")[0][index].committed[0], equal_weights[0]) > 1e-3
