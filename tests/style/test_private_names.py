"""Private names of other libraries that the project leans on: here is the whole list, and whether they are still there.

A name that a newer version has dropped fails its test, by name, before anything else looks strange.
"""

import ast
import importlib
import inspect
import itertools
import multiprocessing.forkserver
import os
import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from typing import TypeGuard

import datasets
import lightning.pytorch.callbacks
import lightning.pytorch.strategies
import numpy as np
import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.data import DataLoader

from stretto.groups.wrapped import gloo_group
from tests.style.source import ROOT, package_files, parsed, place


def gloo() -> dist.ProcessGroup:
    """A Gloo group of one rank."""
    return gloo_group(dist.HashStore(), 0, 1, dist.default_pg_timeout, None)


def worker_iterator() -> type:
    """The class of a loader's iterator over workers."""
    return torch.utils.data.dataloader._MultiProcessingDataLoaderIter


def product() -> object:
    """What autograd keeps of a product with a number."""
    return (torch.ones(1, requires_grad=True) * torch.ones(())).grad_fn


def has(owner: Callable[[], object], *names: str) -> Callable[[], bool]:
    """A check that an object has these attributes."""
    return lambda: all(hasattr(owner(), name) for name in names)


def assigns(owner: Callable[[], type], *names: str) -> Callable[[], bool]:
    """A check that the source of a class gives its instances these attributes."""
    return lambda: all(f"self.{name}" in inspect.getsource(owner()) for name in names)


NAMES: dict[str, dict[str, Callable[[], bool]]] = {
    "torch": {
        "_foreach_add_": has(lambda: torch, "_foreach_add_"),
        "_foreach_copy_": has(lambda: torch, "_foreach_copy_"),
        "_foreach_mul_": has(lambda: torch, "_foreach_mul_"),
        "_foreach_neg_": has(lambda: torch, "_foreach_neg_"),
        "_foreach_sub": has(lambda: torch, "_foreach_sub"),
        "_foreach_sub_": has(lambda: torch, "_foreach_sub_"),
        "_foreach_zero_": has(lambda: torch, "_foreach_zero_"),
        "_input_metadata": has(lambda: torch.ones(1, requires_grad=True).sum().grad_fn, "_input_metadata"),
        "_saved_self": has(product, "_saved_self"),
        "_saved_other": has(product, "_saved_other"),
        "_version": lambda: torch.ones(1)._version == 0 and torch.ones(1).add_(1)._version == 1,
        "_make_wrapper_subclass": has(lambda: torch.Tensor, "_make_wrapper_subclass"),
        "_cdata": has(lambda: torch.ones(1).untyped_storage(), "_cdata"),
        "_parameters": has(nn.Module, "_parameters"),
        "_backward_hooks": has(nn.Module, "_backward_hooks"),
        "_backward_pre_hooks": has(nn.Module, "_backward_pre_hooks"),
        "_global_backward_hooks": has(lambda: nn.modules.module, "_global_backward_hooks"),
        "_global_backward_pre_hooks": has(lambda: nn.modules.module, "_global_backward_pre_hooks"),
        "_wrapped_by_lr_sched": lambda: "_wrapped_by_lr_sched" in inspect.getsource(torch.optim.lr_scheduler),
        "_schedulers": assigns(lambda: torch.optim.lr_scheduler.SequentialLR, "_schedulers"),
        "_opt_called": lambda: "_opt_called" in inspect.getsource(torch.optim.lr_scheduler),
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
        "_fsdp_param_groups": lambda: "_fsdp_param_group" in inspect.getsource(FSDPState),  # of newer ones
        "_disable_dynamo": has(lambda: torch, "_disable_dynamo"),
        "_load_from_state_dict": has(lambda: nn.Module, "_load_from_state_dict"),
        "_get_default_group": has(lambda: dist.distributed_c10d, "_get_default_group"),
        "_new_process_group_helper": has(lambda: dist.distributed_c10d, "_new_process_group_helper"),
        "_world": has(lambda: dist.distributed_c10d._world, "pg_group_ranks"),
        "_get_default_store": has(lambda: dist.distributed_c10d, "_get_default_store"),
        "_set_group_name": has(lambda: dist.ProcessGroup, "_set_group_name"),
        "_set_group_desc": has(lambda: dist.ProcessGroup, "_set_group_desc"),
        "_allgather_base": has(lambda: dist.ProcessGroup, "_allgather_base"),
        "_reduce_scatter_base": has(lambda: dist.ProcessGroup, "_reduce_scatter_base"),
    },
    "numpy": {
        "_core": lambda: callable(np._core.multiarray._reconstruct),
        "_reconstruct": lambda: callable(np._core.multiarray._reconstruct),
    },
    "lightning": {
        "_forward_redirection": assigns(
            lambda: lightning.pytorch.strategies.Strategy, "_forward_redirection"
        ),
        "_train_time_interval": has(lightning.pytorch.callbacks.ModelCheckpoint, "_train_time_interval"),
        "_setup_model": has(lambda: lightning.pytorch.strategies.DDPStrategy, "_setup_model"),
        "_register_ddp_hooks": has(lambda: lightning.pytorch.strategies.DDPStrategy, "_register_ddp_hooks"),
    },
    "transformers": {
        "_clip_grad_norm": has(lambda: transformers.Trainer, "_clip_grad_norm"),
        "_finalize_training": has(lambda: transformers.Trainer, "_finalize_training"),
        "_get_grad_norm": has(lambda: transformers.Trainer, "_get_grad_norm"),
        "_get_learning_rate": has(lambda: transformers.Trainer, "_get_learning_rate"),
        "_inner_training_loop": has(lambda: transformers.Trainer, "_inner_training_loop"),
        "_load_optimizer_and_scheduler": has(lambda: transformers.Trainer, "_load_optimizer_and_scheduler"),
        "_maybe_log_save_evaluate": has(lambda: transformers.Trainer, "_maybe_log_save_evaluate"),
        "_prepare_for_training": has(lambda: transformers.Trainer, "_prepare_for_training"),
        "_run_epoch": has(lambda: transformers.Trainer, "_run_epoch"),
        "_save_checkpoint": has(lambda: transformers.Trainer, "_save_checkpoint"),
        "_save_optimizer_and_scheduler": has(lambda: transformers.Trainer, "_save_optimizer_and_scheduler"),
        "_track_num_input_tokens": has(lambda: transformers.Trainer, "_track_num_input_tokens"),
    },
    "datasets": {
        "_lock": has(lambda: datasets.utils.tqdm, "set_lock"),
        "_starting_state_dict": has(
            lambda: datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(), "_starting_state_dict"
        ),
    },
    "python": {
        "_current_frames": has(lambda: sys, "_current_frames"),
        "_exit": has(lambda: os, "_exit"),
        "_forkserver": has(lambda: multiprocessing.forkserver, "_forkserver"),
        "_forkserver_pid": has(lambda: multiprocessing.forkserver._forkserver, "_forkserver_pid"),
    },
}
"""By package. Methods that a class of ours overrides are among them: they are called from there."""
PUBLIC = {"_asdict", "_fields", "_replace"}
"""Of named tuples."""


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in NAMES for name in NAMES[package]]
)
def test_a_private_name_is_still_there(package: str, name: str) -> None:
    assert NAMES[package][name]()


def is_private(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


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


def used_names() -> dict[str, str]:
    """Every private name that our sources ask something for, in so many words or as a string, and where."""
    used = {}
    for file in package_files():
        for node in ast.walk(parsed(file)):
            match node:
                case ast.Attribute(attr=name):
                    names: list[object] = [name]
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]
                ):
                    names = [name]
                case ast.Call(func=ast.Attribute(attr="attrgetter" | "methodcaller"), args=args):
                    names = [each.value for each in args if isinstance(each, ast.Constant)]
                case _:
                    continue
            used |= {name: place(file, node) for name in names if is_private(name)}
    return used


@cache
def overridden() -> dict[str, str]:
    """Every private method of another package that a class of ours overrides, and the package that it belongs to."""
    found = {}
    for file in package_files():
        if file.name in ("__main__.py", "kernels.py"):  # one would run, the other needs a GPU
            continue
        words = file.relative_to(ROOT / "src").with_suffix("").parts
        module = importlib.import_module(".".join(words).removesuffix(".__init__"))
        for ours in vars(module).values():
            if not inspect.isclass(ours) or ours.__module__ != module.__name__:
                continue
            for name, base in itertools.product(filter(is_private, vars(ours)), ours.__mro__[1:]):
                package = base.__module__.partition(".")[0]
                if inspect.isfunction(vars(ours)[name]) and name in vars(base) and package in requirements():
                    found[name] = package
    return found


def imported() -> set[str]:
    """The packages of whose modules our sources import private ones."""
    modules = {
        node.module
        for file in package_files()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    return {module.partition(".")[0] for module in modules if "._" in module}


@cache
def requirements() -> dict[str, str]:
    """What the wheel asks for in any of its extras, by package, without the tools of developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *extras["cli"],
        *extras["recipes"],
        *extras["lightning"],
    ]
    return {re.split(r"[<>=\[]", line)[0]: line for line in lines}


def test_the_list_is_whole() -> None:
    used = used_names()
    listed = {name for names in NAMES.values() for name in names}
    known = own_names() | PUBLIC
    unknown = {name: where for name, where in used.items() if name not in known}
    assert {name: where for name, where in unknown.items() if name not in listed} == {}
    assert {name: package for name, package in overridden().items() if name not in NAMES[package]} == {}
    assert sorted(listed - used.keys() - overridden().keys()) == []  # what is no longer used is not listed


def test_a_package_whose_private_names_are_used_has_a_newest_version() -> None:
    packages = (NAMES.keys() | imported()) - {"python"}
    assert packages <= requirements().keys()
    assert [requirements()[name] for name in sorted(packages) if ",<" not in requirements()[name]] == []
