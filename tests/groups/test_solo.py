import pytest
import torch
import torch.distributed as dist

from stretto.errors import CommunicationError
from stretto.groups.collective_group import SoloGroup


def values() -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(0))


def test_a_lone_rank_needs_no_launcher() -> None:
    assert not dist.is_initialized()
    group = SoloGroup()
    assert (group.rank(), group.size()) == (0, 1)
    assert group.barrier().wait()
    group.get_group_store().set("key", "value")
    assert group.get_group_store().get("key") == b"value"


def test_siblings_share_nothing() -> None:
    group = SoloGroup()
    group.get_group_store().set("key", "value")
    assert not group.private().get_group_store().check(["key"])


@pytest.mark.parametrize("output", [torch.empty(5), torch.empty(6, dtype=torch.bfloat16)])
def test_an_output_that_does_not_fit_is_refused(output: torch.Tensor) -> None:
    for collective in (SoloGroup().all_gather_single, SoloGroup().reduce_scatter_single):
        with pytest.raises(CommunicationError, match=r"the input 6 of torch\.float32"):
            collective(output, values())


def test_splits_that_are_not_the_whole_are_refused() -> None:
    with pytest.raises(CommunicationError, match=r"splits \[3, 3\] for a tensor of 6 rows"):
        SoloGroup().all_to_all_single(torch.empty(6), values(), [6], [3, 3])
