"""What differs between ranks, or is not finite on one of them, raises the same error on all of them."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto.errors import RanksDisagree, StrettoError
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import draws
from tests.errors.tiny import BOTH_KINDS, STRATEGIES, TinyJob, tiny_model
from tests.processes import run_ranks

WORLD_SIZE = 2


class OnePath(nn.Module):
    """Two layers of which one is used."""

    def __init__(self, path: int) -> None:
        super().__init__()
        self.path = path
        self.layers = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        """Apply the layer."""
        output: Tensor = self.layers[self.path](batch)
        return output


def turned_otherwise(rank: int, strategy: str) -> None:
    """After the first update, one rank's schedule goes its own way."""
    job = TinyJob(strategy, learning_rate=0.1)
    job.until_update()
    job.optimizer.param_groups[0]["lr"] = [0.05, 0.02][rank]
    for _ in range(3):
        job.until_update()


def trained_on(rank: int, strategy: str) -> None:
    """Train; the third micro-batch of rank 1 has a finite loss, at a root of zero."""
    job = TinyJob(strategy)
    for number in range(12):
        loss = job.loss()
        if (rank, number) == (1, 2):
            loss = loss + (job.model.get_parameter("0.weight") * 0).sum().sqrt()
        job.parallel.backward(loss)


class Kept:
    """Something that users keep in their optimizer's groups; its text is where it is in memory."""


OBJECTS: dict[str, Callable[[], Any]] = {
    "an object": Kept,
    "a class": lambda: type("Made", (), {}),
    "a function": lambda: lambda step: step,
    "a method": lambda: Kept().__init__,
    "a partial": lambda: functools.partial(Kept),
    "a list": lambda: [Kept(), 1],
    "a dictionary": lambda: {"of": (Kept(),)},
}


def kept_in_groups(rank: int, cases: int) -> list[Any]:
    """Train with objects in the groups, other ones in every process, before the start and from the second update."""
    draw, found = random.Random(5), []
    elsewhere = [Kept() for _ in range(500 * rank)]
    for _ in range(cases):
        model, strategy = tiny_model(), STRATEGIES[draw.choice([*STRATEGIES])]
        optimizer = torch.optim.AdamW(model.parameters())
        names = draw.choice([*OBJECTS]), draw.choice([*OBJECTS])
        optimizer.param_groups[0]["note"] = OBJECTS[names[0]]()
        try:
            parallel = st.DataParallel(model, optimizer, strategy, micro_batches=2)
            for batch in parallel.feed(torch.ones(12, 2, 4)):
                parallel.backward(model(batch).square().mean())
                if parallel.steps == 2:
                    optimizer.param_groups[0]["note"] = OBJECTS[names[1]]()
            found.append((names, parallel.steps > 2))
        except StrettoError as error:
            found.append((names, str(error)))
    del elsewhere
    return found


def started_from_other_values(rank: int) -> list[Any]:
    """Wrap a model whose values, trained and frozen and of odd kinds, are the rank's number; return them."""
    model = nn.Linear(2, 2).requires_grad_(True)
    model.frozen = nn.Parameter(torch.empty(2, 3).t(), requires_grad=False)
    model.register_buffer("sixteen_bits", torch.empty(3, dtype=torch.bfloat16))
    model.register_buffer("mask", torch.empty(3, dtype=torch.bool))
    model.register_buffer("count", torch.empty((), dtype=torch.int64))
    model.register_buffer("nothing", torch.empty(0))
    values = [*model.parameters(), *model.buffers()]
    for value in values:
        value.detach().fill_(rank)
    TinyJob(model=model)
    return [value.tolist() for value in values]


DIFFERENCES: dict[str, tuple[Callable[[int], Any], tuple[str, ...]]] = {
    "strategy": (
        lambda rank: TinyJob([st.ACCO(), st.WeightPrediction()][rank]),
        ("strategy", "'ACCO(first=None)' as on rank 0", "'WeightPrediction()' on rank 1"),
    ),
    "strategy's option": (
        lambda rank: TinyJob(st.ACCO(first=1 + rank), micro_batches=4),
        ("strategy", "'ACCO(first=1)'", "'ACCO(first=2)'"),
    ),
    "count": (
        lambda rank: TinyJob(micro_batches=2 + rank),
        ("micro_batches", "expected '2'", "found '3'"),
    ),
    "clock": (
        lambda rank: TinyJob(micro_batches=st.Clock(maximum=8 + rank)),
        ("micro_batches", "maximum=8", "maximum=9"),
    ),
    "option": (
        lambda rank: TinyJob(options=st.Options(clip_norm=[1.0, None][rank])),
        ("options", "expected 'clip_norm=1.0'", "found 'clip_norm=None'"),
    ),
    "what ranks compare it over": (
        lambda rank: TinyJob(guards=["standard", ()][rank]),
        ("options", "expected 'verified=True'", "found 'verified=False'"),
    ),
    "hyperparameter": (
        lambda rank: TinyJob(learning_rate=[0.1, 0.2][rank]),
        ("optimizer settings", "expected 'group 0: lr=0.1'", "found 'group 0: lr=0.2'"),
    ),
    "optimizer": (
        lambda rank: TinyJob(optimizer=[torch.optim.Adam, torch.optim.NAdam][rank]),
        ("optimizer: ", "expected 'Adam'", "found 'NAdam'"),
    ),
    "width": (
        lambda rank: TinyJob(model=nn.Linear(4, 1 + rank)),
        ("model", "parameter bias: (1,)", "parameter bias: (2,)"),
    ),
    "depth": (
        lambda rank: TinyJob(model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))),
        ("model", "parameter 0.bias", "parameter 1.bias"),
    ),
    "dtype": (
        lambda rank: TinyJob(model=nn.Linear(4, 1, dtype=[torch.float32, torch.bfloat16][rank])),
        ("model", "torch.float32", "torch.bfloat16"),
    ),
    "buffers": (
        lambda rank: TinyJob(
            model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=rank == 0))
        ),
        ("buffers", "expected '1.running_mean: (4,) torch.float32'", "found 'nothing'"),
    ),
}
SCENARIOS: dict[str, Callable[[int], Any]] = {
    **{f"other {name}": scenario for name, (scenario, _) in DIFFERENCES.items()},
    **{f"turned {name}": lambda rank, name=name: turned_otherwise(rank, name) for name in BOTH_KINDS},
    **{f"infinite slope {name}": lambda rank, name=name: trained_on(rank, name) for name in STRATEGIES},
    "nothing to train on one rank": lambda rank: TinyJob(model=tiny_model().requires_grad_(rank == 0)),
    "objects": lambda rank: kept_in_groups(rank, len(draws(40))),
    "other values": started_from_other_values,
    **{
        f"unused on all {name}": lambda rank, name=name: TinyJob(name, model=OnePath(0)).until_update()
        for name in STRATEGIES
    },
    "unused on one": lambda rank: TinyJob(model=OnePath(rank)).until_update().step,
}


def run_all(rank: int) -> dict[str, Any]:
    """Run the scenarios one after the other: ranks whose job has failed are able to start another."""
    results: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        try:
            found = scenario(rank)
            results[name] = "a job" if isinstance(found, TinyJob) else found
        except StrettoError as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Rank by rank, what became of every scenario."""
    return run_ranks(WORLD_SIZE, run_all)


def check_told(results: list[dict[str, Any]], name: str, *parts: str) -> None:
    """Every rank has raised an error that starts with its class and names itself and holds all parts."""
    for rank, result in enumerate(results):
        for part in (f"rank {rank}, ", *parts):
            assert part in str(result[name])


def test_ranks_that_are_wrapped_differently_are_told_in_what(results: list[dict[str, Any]]) -> None:
    for name, (_, parts) in DIFFERENCES.items():
        words = "RanksDisagree: ", "before step 1", "differ in", *parts, "the same"
        check_told(results, f"other {name}", *words)


def test_a_schedule_that_one_rank_turns_differently_is_told_with_both_rates(
    results: list[dict[str, Any]],
) -> None:
    words = "expected 'group 0: lr=0.05' as on rank 0, found 'group 0: lr=0.02' on rank 1"
    for strategy in BOTH_KINDS:
        check_told(results, f"turned {strategy}", "RanksDisagree: ", "after step", words)


def test_a_gradient_that_is_not_finite_raises_everywhere_and_names_the_rank(
    results: list[dict[str, Any]],
) -> None:
    for strategy in STRATEGIES:
        told = "NonFinite: ", "step 2", "the gradient is not finite on ranks [1]"
        check_told(results, f"infinite slope {strategy}", *told)


def test_what_only_one_rank_cannot_train_is_told_to_the_others(results: list[dict[str, Any]]) -> None:
    cause = "no trainable parameter"
    assert results[1]["nothing to train on one rank"].startswith("UnsupportedModel: ")
    told = results[0]["nothing to train on one rank"]
    assert told.startswith("PeerFailed: rank 0, after step 0, waiting for the round report: rank 1, ")
    assert cause in told
    assert cause in results[1]["nothing to train on one rank"]


def test_objects_in_the_optimizers_groups_may_lie_elsewhere_in_each_process(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert [case for case in result["objects"] if case[1] is not True] == []


def test_ranks_that_start_from_other_values_take_those_of_rank_0(results: list[dict[str, Any]]) -> None:
    zero, one = (result["other values"] for result in results)
    assert zero == one == [[[0, 0], [0, 0]], [0, 0], [[0, 0]] * 3, [0] * 3, [False] * 3, 0, []]


def test_only_a_parameter_that_no_rank_uses_is_an_error(results: list[dict[str, Any]]) -> None:
    words = "1 parameters", "'layers.1.weight'", "on any rank", "Options(allow_unused=True)"
    for name in STRATEGIES:
        check_told(results, f"unused on all {name}", "UnusedParameters: ", "after step 1", *words)
    assert [result["unused on one"] for result in results] == [1, 1]


def test_of_several_ranks_that_differ_the_first_one_is_shown_with_its_own_value() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=[0.125, 0.125, 0.25, 0.5][rank])
        st.DataParallel(model, optimizer, group=group)

    with pytest.raises(
        RanksDisagree, match=r"found '[^']*0\.25[^']*' on rank 2 \(differing ranks: \[2, 3\]\)"
    ):
        VirtualCluster(4).run(program)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_one_rank_freezes_alone_are_named_and_those_that_all_freeze_train_on(
    strategy: str,
) -> None:
    def program(rank: int, group: VirtualGroup, freezing: list[int]) -> None:
        job = TinyJob(strategy, rank=rank, group=group, options=st.Options(allow_unused=True))
        for number in range(12):
            if number == 6 and rank in freezing:
                job.model[0].requires_grad_(False)
            job.micro_batch()
        job.parallel.finish()

    VirtualCluster(2).run(functools.partial(program, freezing=[0, 1]))
    with pytest.raises(RanksDisagree, match=r"found 'frozen: .*' on rank 1"):
        VirtualCluster(2).run(functools.partial(program, freezing=[1]))
