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
from typing import Any, TypeGuard

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


def tensor() -> torch.Tensor:
    return torch.ones(1, requires_grad=True)


def has(owner: Callable[[], object], names: str) -> dict[str, Callable[[], bool]]:
    """Checks that an object has these attributes."""
    return {name: lambda name=name: hasattr(owner(), name) for name in names.split()}


def says(owner: Callable[[], Any], names: str) -> dict[str, Callable[[], bool]]:
    """Checks that the source of a class or module, which gives its instances these attributes, still names them."""
    return {name: lambda name=name: name in inspect.getsource(owner()) for name in names.split()}


SCHEDULES, DISTRIBUTED, GLOO = torch.optim.lr_scheduler, dist.distributed_c10d, dist.ProcessGroupGloo
NAMES: dict[str, dict[str, Callable[[], bool]]] = {
    "torch": {
        **has(
            lambda: torch,
            "_foreach_add_ _foreach_copy_ _foreach_mul_ _foreach_neg_ _foreach_sub _foreach_sub_ _foreach_zero_ "
            "_disable_dynamo",
        ),
        **has(lambda: tensor().sum().grad_fn, "_input_metadata"),
        **has(lambda: (tensor() * torch.ones(())).grad_fn, "_saved_self _saved_other"),  # of a product
        "_version": lambda: torch.ones(1)._version == 0 and torch.ones(1).add_(1)._version == 1,
        **has(lambda: torch.Tensor, "_make_wrapper_subclass"),
        **has(lambda: torch.ones(1).untyped_storage(), "_cdata"),
        **has(
            nn.Module,
            "_parameters _backward_hooks _backward_pre_hooks _state_dict_pre_hooks _load_from_state_dict",
        ),
        **has(lambda: nn.modules.module, "_global_backward_hooks _global_backward_pre_hooks"),
        **says(lambda: SCHEDULES, "_wrapped_by_lr_sched _opt_called"),
        **says(lambda: SCHEDULES.SequentialLR, "_schedulers"),
        **has(lambda: iter(DataLoader([0])), "_persistent_workers"),
        **says(
            lambda: torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
            "_shutdown _shutdown_workers _worker_result_queue",
        ),
        **has(lambda: GLOO, "_Options"),
        **has(lambda: GLOO._Options(), "_devices _timeout"),
        "_get_backend": lambda: gloo()._get_backend(torch.device("cpu")).name() == "gloo",
        **has(
            lambda: dist.ProcessGroup,
            "_register_backend _set_default_backend _set_group_name _set_group_desc _allgather_base "
            "_reduce_scatter_base",
        ),
        **has(lambda: dist.Backend, "_plugins"),
        **has(lambda: FSDPModule, "_get_fsdp_state"),
        **says(lambda: FSDPState, "_fsdp_param_group"),
        "_fsdp_param_groups": lambda: True,  # of newer ones, where the name above is gone
        **has(lambda: DISTRIBUTED, "_get_default_group _new_process_group_helper _get_default_store"),
        "_world": lambda: hasattr(DISTRIBUTED._world, "pg_group_ranks"),
    },
    "numpy": {name: lambda: callable(np._core.multiarray._reconstruct) for name in ("_core", "_reconstruct")},
    "lightning": {
        **says(lambda: lightning.pytorch.strategies.Strategy, "_forward_redirection"),
        **has(lightning.pytorch.callbacks.ModelCheckpoint, "_train_time_interval"),
        **has(lambda: lightning.pytorch.strategies.DDPStrategy, "_setup_model _register_ddp_hooks"),
    },
    "transformers": has(
        lambda: transformers.Trainer,
        "_clip_grad_norm _finalize_training _get_grad_norm _get_learning_rate _inner_training_loop "
        "_load_optimizer_and_scheduler _maybe_log_save_evaluate _prepare_for_training _run_epoch _save_checkpoint "
        "_save_optimizer_and_scheduler _track_num_input_tokens",
    ),
    "datasets": {
        "_lock": lambda: hasattr(datasets.utils.tqdm, "set_lock"),
        **has(lambda: datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(), "_starting_state_dict"),
    },
    "python": {
        **has(lambda: sys, "_current_frames"),
        **has(lambda: os, "_exit"),
        **has(lambda: multiprocessing.forkserver, "_forkserver"),
        **has(lambda: multiprocessing.forkserver._forkserver, "_forkserver_pid"),
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
