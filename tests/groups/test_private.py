import random
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stretto import DDP, DataParallel
from stretto.errors import ConfigError
from stretto.groups import LeavableGroup
from stretto.groups.collective_group import SoloGroup
from stretto.groups.private import part_of, private_group, ranks_of, release, retire
from stretto.groups.throttled import ThrottledGroup, register_throttled
from stretto.groups.wrapped import WrappedGroup, register_over_gloo
from stretto.link import Link
from tests.draws import part
from tests.processes import run_ranks


def test_a_process_alone_and_a_group_unknown_to_torch_give_a_group_of_its_own() -> None:
    solo = SoloGroup()
    for given in (None, solo):
        group = private_group(given)
        assert isinstance(group, SoloGroup)
        assert group is not solo
        release(group)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: private_group(dist.ProcessGroup(0, 1)), r"private\(\)"),
        (lambda: private_group(ranks=[0, 1]), "call init_process_group first"),
        (lambda: private_group(SoloGroup(), ranks=[0]), "not both"),
        (lambda: part_of(dist.ProcessGroup(0, 2), [0]), r"part\(members\)"),
    ],
)
def test_what_cannot_be_made_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


class SplitGroup(WrappedGroup):
    """A group that is made as NCCL's: beside a default group with a device, all ranks of that have to call.

    Source: `_new_process_group_helper` of PyTorch, which then has NCCL split the default group's communicator.
    """

    may_wait_again = True

    def __init__(self, gloo: dist.ProcessGroup, store: dist.Store) -> None:
        super().__init__(gloo, store, "splits")
        if dist.is_initialized() and (world := dist.group.WORLD).bound_device_id:
            everyone = world.get_group_store()
            number = everyone.add(f"splits of {world.rank()}", 1)
            everyone.set(f"split {number} of {world.rank()}", "")
            everyone.wait([f"split {number} of {rank}" for rank in range(world.size())], timedelta(seconds=5))

    def _get_backend(self, device: torch.device) -> "SplitGroup":
        return self

    supports_splitting = False


def register_splits() -> None:
    register_over_gloo("splits", SplitGroup)


def over_a_part_beside_a_device(rank: int) -> list[float]:
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    found = []
    for ranks in ([0, 2], [0, 1, 2], [0, 1], [1, 2], [2], [0, 1, 2]):
        if rank in ranks:
            tensor = torch.full((4,), float(rank))
            private_group(ranks=ranks, timeout_seconds=20).allreduce([tensor]).wait()
            found.append(tensor.mean().item())
    assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
    return found


def test_a_part_of_a_default_group_with_a_device_needs_only_its_ranks() -> None:
    found = run_ranks(3, over_a_part_beside_a_device, backend="splits", prepare=register_splits)
    assert found == [[2.0, 3.0, 1.0, 3.0], [3.0, 1.0, 3.0, 3.0], [2.0, 3.0, 3.0, 2.0, 3.0]]


WRONG: list[dict[str, list[int]]] = [{"ranks": ranks} for ranks in ([0, 1, 2, 3, 4], [0, 0, 1], [-1, 0, 1])]
SAID = (
    "ranks [4] do not exist; the job has ranks 0 to 3",
    "name a rank twice",
    "ranks [-1] do not exist",
    "not in the given group",
)


def of_a_given_group(rank: int) -> tuple[list[tuple[float, bool, list[int]]], list[str]]:
    """Sums over a private group, a half of it and a part of that; and what is said of ranks that cannot be."""
    register_throttled(Link.parse("1gbit"))
    given, outsiders = dist.new_group([0, 1, 2, 3], backend="throttled"), dist.new_group([0])
    whole = private_group(given)
    half = part_of(whole, range(2) if rank < 2 else range(2, 4), timeout_seconds=20)
    found, said = [], []
    for group in (whole, half, part_of(half, [half.rank()])):
        assert group is not given
        tensor = torch.full((4,), float(rank))
        group.allreduce([tensor]).wait()
        found.append(
            (tensor.mean().item(), isinstance(group, ThrottledGroup), dist.get_process_group_ranks(group))
        )
    for wrong in [*WRONG, *([{"group": outsiders}] if rank else [])]:
        with pytest.raises(ConfigError) as caught:
            private_group(**wrong)
        said.append(str(caught.value))
    return found, said


def test_a_private_group_and_a_part_of_it_have_the_backend_of_the_given_one_and_need_only_their_ranks() -> (
    None
):
    sums = ((1.0, [0, 1]), (1.0, [0, 1]), (5.0, [2, 3]), (5.0, [2, 3]))
    for rank, (found, said) in enumerate(run_ranks(4, of_a_given_group)):
        total, ranks = sums[rank]
        assert found == [(6.0, True, [0, 1, 2, 3]), (total, True, ranks), (float(rank), True, [rank])]
        for text, words in zip(said, SAID[: 3 + bool(rank)], strict=True):
            assert words in text


RANKS = 4


def groups_in_turns(rank: int, seed: int) -> list[str]:
    """Make groups over random ranks, with groups of torch between; give them back in an order of this rank's own."""
    draws, own = random.Random(seed), random.Random(100 * seed + rank)
    wrong: list[str] = []
    kept: list[dist.ProcessGroup] = []
    for turn in range(40):
        ranks = draws.sample(range(RANKS), draws.choice([1, 2, 3, RANKS, RANKS]))
        if draws.random() < 0.2:
            dist.new_group()
        if draws.random() < 0.2:
            dist.new_group(ranks)
        asked = draws.choice([{}, {"group": dist.group.WORLD}]) if len(ranks) == RANKS else {"ranks": ranks}
        if rank not in ranks:
            with pytest.raises(ConfigError, match=rf"rank {rank} is not among ranks"):
                private_group(**asked)
            continue
        group = private_group(**asked, timeout_seconds=20)
        tensor = torch.tensor([2.0**rank])
        group.allreduce([tensor]).wait()
        if tensor.item() != sum(2.0**member for member in ranks) or ranks_of(group) != sorted(ranks):
            wrong.append(f"turn {turn}, ranks {ranks}: {tensor.item()} over {ranks_of(group)}")
        kept.append(group)
        while len(kept) > own.randrange(1, 6):
            own.choice([release, retire])(kept.pop(own.randrange(len(kept) - 1)))
    return wrong


@pytest.mark.parametrize("seed", part(range(3)))
def test_groups_over_any_ranks_follow_each_other_and_end_in_any_order(seed: int) -> None:
    assert run_ranks(RANKS, groups_in_turns, seed) == [[]] * RANKS


def jobs_in_turns(rank: int, seed: int) -> list[float]:
    draws, found = random.Random(seed), []
    for _ in range(16):
        ranks = draws.choice([None, None, [0, 2], [1, 2], [1]])
        if ranks is not None and rank not in ranks:
            continue
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        job = DataParallel(
            model, torch.optim.SGD(model.parameters(), lr=1.0), DDP(), ranks=ranks, micro_batches=1
        )
        job.backward(model(torch.tensor([[2.0**rank]])).mean())
        job.finish()
        found.append(
            model.weight.item() + sum(2.0**member for member in ranks or range(3)) / len(ranks or range(3))
        )
    return found


@pytest.mark.parametrize("seed", part(range(2)))
def test_jobs_over_all_ranks_and_over_a_part_of_them_take_turns(seed: int) -> None:
    for found in run_ranks(3, jobs_in_turns, seed):
        assert found
        assert found == pytest.approx(
            [0.0] * len(found), abs=1e-6
        )  # the mean of three powers of two, rounded


def test_a_group_over_one_whose_ranks_have_names_has_those() -> None:
    named = LeavableGroup(dist.PrefixStore("named", dist.HashStore()), [7], 0)
    assert list(ranks_of(WrappedGroup(named, None, "over"))) == [7]
    named.leave()
