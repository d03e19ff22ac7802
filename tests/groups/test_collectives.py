"""The table of collectives: it has all of torch's, and every method leads to `perform`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import ConfigError
from stretto.groups.collective_group import CollectiveGroup, CompletedWork, SoloGroup
from stretto.groups.collectives import METHODS, Call, Method, method_of

NOT_COLLECTIVE = {"send", "recv", "recv_anysource", "_end_coalescing"}
"""They return works too."""
NOT_YET = {"gather_single", "gather_into_tensor", "reconfigure"}
"""Of PyTorch 2.14: a group written in Python does not have them, and torch itself calls none of them."""
WORLD_SIZE = 2


class Recording(CollectiveGroup):
    """Keeps the calls and performs nothing."""

    def __init__(self) -> None:
        super().__init__(0, WORLD_SIZE)
        self.calls: list[Call] = []

    def perform(self, call: Call) -> dist.Work:
        self.calls.append(call)
        return CompletedWork(call.outputs)


def values(numel: int = 4) -> Tensor:
    return torch.arange(numel, dtype=torch.float32)


def example(method: Method) -> tuple[tuple[Any, ...], list[Tensor], list[Tensor]]:
    """Return a call's arguments as torch nests them, with its inputs and its outputs."""
    one, other, parts = values(), values(), [values(), values()]
    if method.is_in_place:
        return ([one],), [one], [one]
    if not method.arguments:
        return (), [], []
    if method.name in ("allgather", "gather"):
        return ([parts], [one]), [one], parts
    if method.name == "allgather_coalesced":
        return ([[part] for part in parts], [one]), [one], parts
    if method.name in ("reduce_scatter", "scatter"):
        return ([one], [parts]), parts, [one]
    if method.name == "alltoall":
        outputs = [values(), values()]
        return (outputs, parts), parts, outputs
    if method.name.endswith("_coalesced"):
        return ([one], [other]), [other], [one]
    return (one, other, [], [])[: len(method.arguments)], [other], [one]


def test_the_table_has_every_collective_of_torch() -> None:
    of_torch = {
        name
        for name in dir(dist.ProcessGroup)
        if "c10d::Work" in str(getattr(dist.ProcessGroup, name).__doc__)
    }
    in_table = {name for method in METHODS for name in (method.name, *method.aliases)}
    assert of_torch - NOT_COLLECTIVE - NOT_YET <= in_table
    unknown = {method.name for method in METHODS if not of_torch & {method.name, *method.aliases}}
    assert unknown == set()  # a version has a method by one of its names


def test_a_method_is_found_by_the_name_that_this_torch_has_for_it() -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert [method for method in METHODS if not callable(method_of(group, method.name))] == []


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_name_leads_to_perform_with_the_tensors_in_order(method: Method) -> None:
    arguments, inputs, outputs = example(method)
    for name in (method.name, *method.aliases):
        group = Recording()
        getattr(group, name)(*arguments)
        (call,) = group.calls
        assert call.method is method
        assert [id(tensor) for tensor in call.inputs] == [id(tensor) for tensor in inputs]
        assert [id(tensor) for tensor in call.outputs] == [id(tensor) for tensor in outputs]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_same_call_goes_on_to_another_group(method: Method) -> None:
    group, other = Recording(), Recording()
    options = dist.BarrierOptions()
    if method.name == "barrier":
        group.barrier(opts=options)  # as `dist.barrier` does
    else:
        getattr(group, method.name)(*example(method)[0], options)
    group.calls[0].on(other)
    assert other.calls == group.calls


def test_an_older_name_reaches_what_a_subclass_has_made_of_the_newer_one() -> None:
    class Deaf(Recording):
        def all_gather_single(self, *arguments: Any) -> dist.Work:
            return CompletedWork([])

    group = Deaf()
    assert group._allgather_base(values(8), values()).result() == []
    assert group.calls == []


def test_root_and_reduction_are_fields_of_options_or_arguments_of_short_forms() -> None:
    group, options = Recording(), dist.ReduceOptions()
    options.rootRank, options.reduceOp = 1, dist.ReduceOp.MAX
    group.reduce([values()], options)
    group.reduce(values(), 1, dist.ReduceOp.MAX)
    group.allreduce([values()], op=dist.ReduceOp.MAX)
    group.allreduce([values()])
    assert [call.root for call in group.calls[:2]] == [1, 1]
    assert [call for call in group.calls[:3] if call.reduction != dist.ReduceOp.MAX] == []
    assert group.calls[3].reduction == dist.ReduceOp.SUM


@pytest.mark.parametrize(
    "method", [method for method in METHODS if method.arguments], ids=lambda method: method.name
)
def test_on_one_rank_every_collective_gives_its_input(method: Method) -> None:
    if method.is_in_place:
        arguments: tuple[Any, ...] = ([output := values()],)
    else:
        output, input = torch.zeros(4), values()
        outputs = (
            [[output]] if method.single == "inputs" or method.name == "allgather_coalesced" else [output]
        )
        inputs = [[input]] if method.single == "outputs" else [input]
        is_plain = method.name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
        arguments = ((output, input, [], []) if is_plain else (outputs, inputs))[: len(method.arguments)]
    assert getattr(SoloGroup(), method.name)(*arguments).wait()
    assert torch.equal(output, values())


def test_sending_to_one_rank_is_refused_by_the_groups_name() -> None:
    for call in (SoloGroup().send, SoloGroup().recv):
        with pytest.raises(ConfigError, match="a solo group performs collectives, not send and recv"):
            call([values()], 0, 0)
