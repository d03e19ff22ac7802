"""Private names of other libraries that the project leans on: here is the whole list, and whether they are still there.

A name that a newer version has dropped fails its test, by name, before anything else looks strange.
"""

import ast
import inspect
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable

import datasets
import lightning.pytorch.callbacks
import lightning.pytorch.strategies
import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.data import DataLoader

from stretto.groups.wrapped import gloo_group
from tests.style.source import package_files, parsed, place


def gloo() -> dist.ProcessGroup:
    """A Gloo group of one rank."""
    return gloo_group(dist.HashStore(), 0, 1, dist.default_pg_timeout, None)


def worker_iterator() -> type:
    """The class of a loader's iterator over workers."""
    return torch.utils.data.dataloader._MultiProcessingDataLoaderIter


def has(owner: Callable[[], object], *names: str) -> Callable[[], bool]:
    """A check that an object has these attributes."""
    return lambda: all(hasattr(owner(), name) for name in names)


def assigns(owner: Callable[[], type], *names: str) -> Callable[[], bool]:
    """A check that the source of a class gives its instances these attributes."""
    return lambda: all(f"self.{name}" in inspect.getsource(owner()) for name in names)


NAMES: dict[str, Callable[[], bool]] = {
    "_foreach_add_": has(lambda: torch, "_foreach_add_"),
    "_foreach_copy_": has(lambda: torch, "_foreach_copy_"),
    "_foreach_mul_": has(lambda: torch, "_foreach_mul_"),
    "_foreach_neg_": has(lambda: torch, "_foreach_neg_"),
    "_foreach_sub": has(lambda: torch, "_foreach_sub"),
    "_foreach_sub_": has(lambda: torch, "_foreach_sub_"),
    "_foreach_zero_": has(lambda: torch, "_foreach_zero_"),
    "_version": lambda: torch.ones(1)._version == 0 and torch.ones(1).add_(1)._version == 1,
    "_make_wrapper_subclass": has(lambda: torch.Tensor, "_make_wrapper_subclass"),
    "_cdata": has(lambda: torch.ones(1).untyped_storage(), "_cdata"),
    "_parameters": has(nn.Module, "_parameters"),
    "_backward_hooks": has(nn.Module, "_backward_hooks"),
    "_backward_pre_hooks": has(nn.Module, "_backward_pre_hooks"),
    "_global_backward_hooks": has(lambda: nn.modules.module, "_global_backward_hooks"),
    "_global_backward_pre_hooks": has(lambda: nn.modules.module, "_global_backward_pre_hooks"),
    "_opt_called": lambda: "_opt_called" in inspect.getsource(torch.optim.lr_scheduler),
    "_forward_redirection": assigns(lambda: lightning.pytorch.strategies.Strategy, "_forward_redirection"),
    "_persistent_workers": has(lambda: iter(DataLoader([0])), "_persistent_workers"),
    "_shutdown": assigns(worker_iterator, "_shutdown"),
    "_shutdown_workers": has(worker_iterator, "_shutdown_workers"),
    "_worker_result_queue": assigns(worker_iterator, "_worker_result_queue"),
    "_Options": has(lambda: dist.ProcessGroupGloo, "_Options"),
    "_devices": has(lambda: dist.ProcessGroupGloo._Options(), "_devices"),
    "_timeout": has(lambda: dist.ProcessGroupGloo._Options(), "_timeout"),
    "_get_backend": lambda: gloo()._get_backend(torch.device("cpu")).name() == "gloo",
    "_register_backend": has(lambda: dist.ProcessGroup, "_register_backend"),
    "_set_default_backend": has(lambda: dist.ProcessGroup, "_set_default_backend"),
    "_plugins": has(lambda: dist.Backend, "_plugins"),
    "_get_fsdp_state": has(lambda: FSDPModule, "_get_fsdp_state"),
    "_fsdp_param_group": lambda: "_fsdp_param_group" in inspect.getsource(FSDPState),
    "_get_default_group": has(lambda: dist.distributed_c10d, "_get_default_group"),
    "_new_process_group_helper": has(lambda: dist.distributed_c10d, "_new_process_group_helper"),
    "_world": has(lambda: dist.distributed_c10d._world, "pg_group_ranks"),
    "_get_default_store": has(lambda: dist.distributed_c10d, "_get_default_store"),
    "_core": lambda: callable(np._core.multiarray._reconstruct),
    "_reconstruct": lambda: callable(np._core.multiarray._reconstruct),
    "_starting_state_dict": has(
        lambda: datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(), "_starting_state_dict"
    ),
    "_train_time_interval": has(lightning.pytorch.callbacks.ModelCheckpoint, "_train_time_interval"),
    "_current_frames": has(lambda: sys, "_current_frames"),
    "_getframe": has(lambda: sys, "_getframe"),
    "_exit": has(lambda: os, "_exit"),
    "_forkserver": has(lambda: multiprocessing.forkserver, "_forkserver"),
}
PUBLIC = {"_asdict", "_fields", "_replace"}
"""Of named tuples."""


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_still_there(name: str) -> None:
    assert NAMES[name]()


def own_names() -> set[str]:
    """Every private name that our own sources define."""
    found = set()
    for file in package_files():
        for node in ast.walk(parsed(file)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


def test_the_list_is_whole() -> None:
    used = {
        node.attr: place(file, node)
        for file in package_files()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" and not node.attr.endswith("__")
    }
    known = own_names() | PUBLIC
    unknown = {name: where for name, where in used.items() if name not in known}
    assert {name: where for name, where in unknown.items() if name not in NAMES} == {}
    assert sorted(set(NAMES) - set(used)) == []  # what is no longer used is no longer listed
