"""What does not work with shards is refused before training, with the reason and the way out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from stretto import ACCO, Audit, DataParallel, DiLoCo, Noise, Options, PAFTDyn
from stretto.errors import ConfigError, UsageError
from stretto.groups.collective_group import CollectiveGroup
from tests.processes import run_ranks
from tests.sharded.jobs import adamw, loss_of, mesh_of, network, shard


def as_it_should_be(model: Any) -> None:
    shard(model, mesh_of(1, 1)["shard"])


def wrapped(cut: Callable[[Any], object] = as_it_should_be, **settings: Any) -> tuple[Any, DataParallel]:
    model = network()
    cut(model)
    return model, DataParallel(model, adamw(model), **{"mesh": mesh_of(1, 1)["node"], **settings})


def train(model: nn.Module, parallel: DataParallel) -> None:
    parallel.backward(loss_of(model, torch.ones(2, 6, dtype=torch.long)))


def parted_inside(model: Any) -> None:
    parallelize_module(model.few, mesh_of(1, 1)["node"], ColwiseParallel())
    as_it_should_be(model)


def cut_by_columns(model: Any) -> None:
    mesh = mesh_of(1, 1)["shard"]
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))


def shard_too_late() -> None:
    model, parallel = wrapped(lambda model: None, mesh=None)
    as_it_should_be(model)
    train(model, parallel)


def set_otherwise(setting: str, value: object, *, inside: bool, before: bool) -> Callable[[], None]:
    """Change how FSDP2 sums gradients, of the whole model or of a layer, before it is wrapped or after that."""

    def hand() -> None:
        def set_it(model: Any) -> None:
            getattr(model.mix[0] if inside else model, setting)(value)

        def cut(model: Any) -> None:
            as_it_should_be(model)
            if before:
                set_it(model)

        model, parallel = wrapped(cut)
        set_it(model)
        train(model, parallel)

    return hand


CASES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no mesh": (lambda: wrapped(mesh=None), ("DTensor", "mesh=mesh['node']")),
    "the whole mesh": (lambda: wrapped(mesh=mesh_of(1, 1)), ("2 dimensions", "mesh['node']")),
    "not sharded": (lambda: wrapped(lambda model: None), ("ordinary parameters", "fully_shard(model")),
    "tensor parallelism": (
        lambda: wrapped(
            lambda model: parallelize_module(model.few, mesh_of(1, 1)["shard"], ColwiseParallel())
        ),
        ("tensor parallelism", "fully_shard(model"),
    ),
    "tensor parallelism inside": (lambda: wrapped(parted_inside), ("placements", "tensor parallelism")),
    "HSDP": (
        lambda: wrapped(lambda model: fully_shard(model, mesh=mesh_of(1, 1))),
        ("HSDP", "mesh=mesh['shard']"),
    ),
    "a part of the model": (
        lambda: wrapped(lambda model: fully_shard(model.mix[0], mesh=mesh_of(1, 1)["shard"])),
        ("not sharded", "on the whole model"),
    ),
    "columns": (lambda: wrapped(cut_by_columns), ("dimension 1", "shard_placement_fn")),
    "ranks too": (lambda: wrapped(ranks=[0]), ("omit ranks",)),
    "a group of others": (
        lambda: wrapped(group=CollectiveGroup(1, 3)),
        ("a group of 3, whose rank 1", "term.meshes()"),
    ),
    "audit": (lambda: wrapped(guards=[Audit(rate=0.5)], strategy=ACCO()), ("Audit", "repeats")),
    "noise": (lambda: wrapped(options=Options(noise=Noise(0.1))), ("noise",)),
    "ranks per node": (lambda: wrapped(options=Options(ranks_per_node=1)), ("ranks_per_node", "FSDP2")),
    "averages": (lambda: wrapped(strategy=PAFTDyn()), ("paft-dyn",)),
    "node workers": (
        lambda: wrapped(strategy=DiLoCo(worker="node"), options=Options(ranks_per_node=1)),
        ("worker='node'",),
    ),
    "sharded after wrapping": (shard_too_late, ("after fully_shard",)),
    **{
        f"{setting}, {inside=}, {before=}": (
            set_otherwise(setting, value, inside=inside, before=before),
            (setting,),
        )
        for setting, value in (("set_gradient_divide_factor", 3.0), ("set_requires_gradient_sync", False))
        for inside in (False, True)
        for before in (False, True)
    },
}


def refused(rank: int) -> dict[str, str]:
    found = {}
    for name, (hand, _) in CASES.items():
        try:
            hand()
            found[name] = "nothing was raised"
        except (ConfigError, UsageError) as error:
            found[name] = str(error)
    model = network()
    as_it_should_be(model)
    optimizer = adamw(model)
    with torch.no_grad():
        loss_of(model, torch.ones(2, 6, dtype=torch.long))  # leaves the root gathered
    train(model, DataParallel(model, optimizer, mesh=mesh_of(1, 1)["node"]))
    return found


def test_what_does_not_work_with_shards_is_refused_with_the_way_out_and_an_evaluation_before_is_none() -> (
    None
):
    (found,) = run_ranks(1, refused)
    for name, (_, words) in CASES.items():
        assert [word for word in words if word not in found[name]] == [], (name, found[name])
