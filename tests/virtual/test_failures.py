"""A run that cannot go on ends at once, on every rank, and says what each rank does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from stretto import ACCO, DataParallel, ZeRO1
from stretto.errors import CollectivesDisagree, CommunicationError, Deadlock, NoWayOn, PeerFailed
from stretto.groups import Link
from stretto.groups.collectives import method_of
from stretto.strategies import Strategy
from stretto_lab import virtual
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup

WORLD_SIZE = 4
THIS_FILE = __file__


def errors_of(program: Callable[[int, VirtualGroup], object]) -> tuple[list[Exception | None], Exception]:
    """Return what every rank raised, and what the run raised."""
    errors: list[Exception | None] = [None] * WORLD_SIZE

    def watched(rank: int, group: VirtualGroup) -> None:
        try:
            program(rank, group)
        except Exception as error:
            errors[rank] = error
            raise

    with pytest.raises(Exception, match=r".") as caught:
        VirtualCluster(WORLD_SIZE, seed=9).run(watched)
    return errors, caught.value


def all_reduce(group: dist.ProcessGroup, numel: int = 8, dtype: torch.dtype = torch.float32) -> None:
    group.allreduce([torch.ones(numel, dtype=dtype)]).wait()  # all ranks wait here


def line_of(text: str) -> int:
    """The number of the line that ends with a comment."""
    lines = Path(THIS_FILE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def otherwise(rank: int, group: VirtualGroup, deviate: Callable[[], object]) -> None:
    all_reduce(group)
    group.charge_ns(1_000 * (rank + 1))
    if rank == 2:
        deviate()
    else:
        all_reduce(group)


DEVIATIONS: dict[str, tuple[Callable[[VirtualGroup], object], str]] = {
    "operation": (lambda group: group.barrier().wait(), "barrier"),
    "elements": (lambda group: all_reduce(group, 9), "all_reduce of 9 elements"),
    "dtype": (lambda group: all_reduce(group, dtype=torch.float64), "in float64"),
    "reduction": (lambda group: group.allreduce([torch.ones(8)], dist.ReduceOp.MAX).wait(), "by maximum"),
    "number of tensors": (lambda group: group.allreduce([torch.ones(8)] * 2).wait(), "of 8, 8 elements"),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_mismatch_names_the_rank_that_differs(deviation: str) -> None:
    deviate, description = DEVIATIONS[deviation]
    errors, raised = errors_of(lambda rank, group: otherwise(rank, group, lambda: deviate(group)))
    assert isinstance(raised, CollectivesDisagree)
    assert [str(error) for error in errors] == [str(raised)] * WORLD_SIZE
    rows = [str(row) for row in raised.rows]
    assert [row.partition(":")[0] for row in rows] == [f"rank {rank}" for rank in range(WORLD_SIZE)]
    # Ranks 0 and 1 had come, rank 2 came otherwise, rank 3 was still busy.
    assert description in rows[2]
    for rank in (0, 1):
        assert "came with all_reduce of 8 elements in float32 by sum" in rows[rank]
    assert "has not come" in rows[3]
    assert "collective 1 of the group" in str(raised)


def broadcast_from_two(rank: int, group: VirtualGroup) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = rank // 3
    group.broadcast([torch.ones(8)], options).wait()


def send_to_unequal(rank: int, group: VirtualGroup) -> None:
    splits = [1, 1, 1, 1] if rank else [1, 2, 1, 0]
    method_of(group, "all_to_all_single")(torch.empty(4), torch.ones(4), [1, 1, 1, 1], splits).wait()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (broadcast_from_two, "came with broadcast of 8 elements in float32 with root 1"),
        (send_to_unequal, "rank 0: came with all_to_all in float32, sending [1, 2, 1, 0] rows"),
    ],
)
def test_a_root_that_differs_and_splits_that_do_not_fit_are_a_mismatch(
    program: Callable[[int, VirtualGroup], None], words: str
) -> None:
    _, raised = errors_of(program)
    assert isinstance(raised, CollectivesDisagree)
    assert words in str(raised)


def test_a_deadlock_says_who_waits_for_what_since_when_and_where() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        group.charge_ns(1_500 * (rank + 1))
        if rank != 1:
            all_reduce(group, 100)

    errors, raised = errors_of(program)
    assert isinstance(raised, Deadlock)
    assert errors[1] is None
    assert [str(errors[rank]) for rank in (0, 2, 3)] == [str(raised)] * 3
    assert [row.doing for row in raised.rows] == [
        "waits for all_reduce of 100 elements in float32 by sum, collective 0 of the group",
        "has returned",
        *["waits for all_reduce of 100 elements in float32 by sum, collective 0 of the group"] * 2,
    ]
    assert [row.since_ns for row in raised.rows if row.line] == [1_500, 4_500, 6_000]
    here = f"{THIS_FILE}:{line_of('all ranks wait here')} in all_reduce"
    assert [row.line for row in raised.rows] == [here, "", here, here]


def test_two_groups_entered_in_different_orders_are_a_deadlock() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        groups = [group.private(), group.private()]
        for one in groups if rank else reversed(groups):
            all_reduce(one)

    _, raised = errors_of(program)
    assert isinstance(raised, Deadlock)
    assert "rank 0: waits for all_reduce of 8 elements in float32 by sum, collective 0 of the group.1" in str(
        raised
    )
    assert "rank 1: waits for all_reduce of 8 elements in float32 by sum, collective 0 of the group.0" in str(
        raised
    )


class Broken(RuntimeError):
    pass


def train(group: dist.ProcessGroup, strategy: Strategy, fails_at: int | None) -> None:
    """Train to the end, or until this rank raises."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DataParallel(model, optimizer, strategy, micro_batches=2, group=group) as parallel:
        for index in range(20):
            if index == fails_at:
                raise Broken("out of luck")
            parallel.backward(model(torch.ones(1, 3)).sum())
        parallel.finish()


@pytest.mark.parametrize("strategy", [ZeRO1(), ACCO()], ids=lambda strategy: strategy.name)
def test_a_rank_that_raises_ends_the_run_everywhere_with_the_cause(strategy: Strategy) -> None:
    errors, raised = errors_of(lambda rank, group: train(group, strategy, 7 if rank == 2 else None))
    assert isinstance(raised, Broken)
    assert errors[2] is raised
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], PeerFailed)
        assert "rank 2" in str(errors[rank])


def test_a_rank_that_skips_finish_is_named_with_its_lane() -> None:
    def program(rank: int, group: VirtualGroup) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = DataParallel(model, optimizer, ACCO(), micro_batches=2, group=group)
        for _ in range(4):
            parallel.backward(model(torch.ones(1, 3)).sum())
        if rank != 1:
            parallel.finish()  # the others drain

    _, raised = errors_of(program)
    assert isinstance(raised, Deadlock)
    assert raised.rows[1].doing == "has returned"
    for rank in (0, 2, 3):
        assert raised.rows[rank].doing.startswith("its communication lane waits for all_to_all")
        assert raised.rows[rank].line == f"{THIS_FILE}:{line_of('the others drain')} in program"


def test_an_error_that_is_caught_lets_the_others_go() -> None:
    def program(rank: int, group: VirtualGroup) -> str:
        try:
            train(group, ZeRO1(), 2 if rank == 2 else None)
        except (Broken, CommunicationError) as error:
            return type(error).__name__
        return "nothing"

    values = VirtualCluster(3).run(program).values
    assert values == ("PeerFailed", "PeerFailed", "Broken")


def failing(rank: int, group: VirtualGroup) -> None:
    if rank == 1:
        raise Broken("out of luck")
    all_reduce(group)


def test_a_failure_says_in_one_line_how_to_run_it_again() -> None:
    cluster = VirtualCluster(2, compute=Compute(jitter=0.5), seed=41)
    with pytest.raises(Broken) as caught:
        cluster.run(failing)
    (note,) = caught.value.__notes__
    assert note.startswith("replay: VirtualCluster(world_size=2, ")
    assert "seed=41" in note
    assert note.endswith(f".run({__name__}.failing)")
    assert "\n" not in note
    names = {**vars(virtual), "Link": Link}
    assert eval(note.removeprefix("replay: ").partition(".run(")[0], names) == cluster


def test_one_error_class_catches_both() -> None:
    assert issubclass(Deadlock, NoWayOn)
    assert issubclass(CollectivesDisagree, NoWayOn)
    assert issubclass(NoWayOn, CommunicationError)
