"""What does not work with shards is refused before training, with the reason and the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from stretto import ACCO, Audit, DataParallel, DiLoCo, Noise, Options, PAFTDyn
from stretto.errors import ConfigError, ParametersTouched, UsageError
from stretto.groups.collective_group import CollectiveGroup
from tests.processes import run_ranks
from tests.sharded.jobs import adamw, loss_of, mesh_of, network, shard

Made = tuple[nn.Module, dict[str, Any]]


def over(**settings: Any) -> Callable[[], Made]:
    """A model that is sharded as it should be, and what else is asked for."""

    def make() -> Made:
        model = network()
        shard(model, mesh_of(1, 1)["shard"])
        return model, {"mesh": mesh_of(1, 1)["node"], **settings}

    return make


def sharded_by(cut: Callable[[nn.Module], object], **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = network()
        cut(model)
        return model, {"mesh": mesh_of(1, 1)["node"], **settings}

    return make


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


CASES: dict[str, tuple[Callable[[], Made], tuple[str, ...]]] = {
    "no mesh": (over(mesh=None), ("DTensor", "mesh=mesh['node']")),
    "the whole mesh": (lambda: (over()()[0], {"mesh": mesh_of(1, 1)}), ("2 dimensions", "mesh['node']")),
    "not sharded": (sharded_by(lambda model: None), ("ordinary parameters", "fully_shard(model")),
    "tensor parallelism": (
        sharded_by(lambda model: parallelize_module(model.few, mesh_of(1, 1)["shard"], ColwiseParallel())),
        ("tensor parallelism", "fully_shard(model"),
    ),
    "tensor parallelism inside": (
        sharded_by(
            lambda model: (
                parallelize_module(model.few, mesh_of(1, 1)["node"], ColwiseParallel()),
                fully_shard(model, mesh=mesh_of(1, 1)["shard"]),
            )
        ),
        ("placements", "tensor parallelism"),
    ),
    "HSDP": (
        sharded_by(lambda model: fully_shard(model, mesh=mesh_of(1, 1))),
        ("HSDP", "mesh=mesh['shard']"),
    ),
    "a part of the model": (
        sharded_by(lambda model: fully_shard(model.mix[0], mesh=mesh_of(1, 1)["shard"])),
        ("not sharded", "on the whole model"),
    ),
    "columns": (
        sharded_by(
            lambda model: fully_shard(model, mesh=mesh_of(1, 1)["shard"], shard_placement_fn=by_columns)
        ),
        ("dimension 1", "shard_placement_fn"),
    ),
    "ranks too": (over(ranks=[0]), ("leave out ranks",)),
    "a group of others": (over(group=CollectiveGroup(1, 3)), ("a group of 3, whose rank 1", "term.meshes()")),
    "audit": (over(guards=[Audit(rate=0.5)], strategy=ACCO()), ("Audit", "again by itself")),
    "noise": (over(options=Options(noise=Noise(0.1))), ("noise",)),
    "ranks per node": (over(options=Options(ranks_per_node=1)), ("ranks_per_node", "FSDP2")),
    "averages": (over(strategy=PAFTDyn()), ("paft-dyn",)),
    "node workers": (
        over(strategy=DiLoCo(worker="node"), options=Options(ranks_per_node=1)),
        ("worker='node'",),
    ),
}


def refused(rank: int) -> dict[str, str]:
    found = {}
    for name, (make, _) in CASES.items():
        model, settings = make()
        try:
            DataParallel(model, adamw(model), **settings)
            found[name] = "nothing was raised"
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_what_does_not_work_with_shards_is_refused_with_the_way_out() -> None:
    (found,) = run_ranks(1, refused)
    for name, (_, words) in CASES.items():
        for word in words:
            assert word in found[name], (name, found[name])


def set_apart(rank: int) -> list[str]:
    messages = []
    for settings in (
        lambda model: model.set_gradient_divide_factor(3.0),
        lambda model: model.mix[0].set_gradient_divide_factor(3.0),
        lambda model: model.set_requires_gradient_sync(False),
        lambda model: model.mix[0].set_requires_gradient_sync(False),
    ):
        for before in (True, False):
            model, chosen = over()()
            if before:
                settings(model)
            try:
                parallel = DataParallel(model, adamw(model), **chosen)
                settings(model)
                parallel.backward(loss_of(model, torch.ones(2, 6, dtype=torch.long)))
                messages.append("nothing was raised")
            except UsageError as error:
                messages.append(str(error))
    return messages


def test_settings_of_fsdp2_that_would_change_sums_are_errors_that_name_them() -> None:
    (messages,) = run_ranks(1, set_apart)
    for message, name in zip(
        messages, ["set_gradient_divide_factor"] * 4 + ["set_requires_gradient_sync"] * 4, strict=True
    ):
        assert name in message


def evaluated_before(rank: int) -> int:
    model, chosen = over()()
    optimizer = adamw(model)
    with torch.no_grad():
        loss_of(model, torch.ones(2, 6, dtype=torch.long))  # leaves the root gathered
    parallel = DataParallel(model, optimizer, micro_batches=1, **chosen)
    parallel.backward(loss_of(model, torch.ones(2, 6, dtype=torch.long)))
    parallel.finish()
    return parallel.steps


def test_a_model_that_was_evaluated_before_is_wrapped_as_any_other() -> None:
    assert run_ranks(1, evaluated_before) == [1]


def too_late(rank: int) -> str:
    model = network()
    parallel = DataParallel(model, adamw(model))
    shard(model, mesh_of(1, 1)["shard"])
    with pytest.raises(ParametersTouched) as caught:
        parallel.backward(loss_of(model, torch.ones(2, 6, dtype=torch.long)))
    return str(caught.value)


def test_sharding_after_wrapping_says_what_to_do_first() -> None:
    (message,) = run_ranks(1, too_late)
    assert "sharded (fully_shard)" in message
