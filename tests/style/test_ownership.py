"""No attribute of a live object is set from outside: the file that defines the object's class does it."""

import ast
from collections.abc import Iterator

from tests.style.source import LIBRARY, parsed, place

OF_OTHERS = {
    "grad": ("", "PyTorch's place for a parameter's gradient"),
    "grad_dtype": ("", "PyTorch's place for the dtype that gradients accumulate in"),
    "training": ("", "PyTorch's mode of a module, which an evaluation gives back"),
    "param_groups": ("optimizer", "an optimizer's settings, which PyTorch has users write"),
    "state": ("optimizer", "an optimizer's state, as above"),
    "_opt_called": ("engine", "PyTorch's mark that an optimizer has been stepped"),
    "rootRank": ("exchange", "PyTorch's options of a collective, which have no constructor"),
    "reduceOp": ("", "as above"),
    "timeout": ("groups", "as above"),
    "bound_device_id": (
        "groups",
        "the default group's device, which is no group's of some ranks while one is made",
    ),
    "excepthook": ("groups", "what Python calls last, which torch wraps once more with every default group"),
    "_devices": ("groups", "as above"),
    "_timeout": ("groups", "as above"),
    "_starting_state_dict": ("echo", "a stream of Hugging Face has no other way back to its beginning"),
    "is_checkpoint_requested": ("integrations", "Trainer's manager of checkpoints just in time"),
    "should_save": ("integrations", "Trainer's flags, which callbacks set"),
    "should_training_stop": ("integrations", "as above"),
    "callbacks": ("integrations", "Trainer's list of callbacks"),
    "prepare_model": ("integrations", "a method of Accelerate, which Trainer calls"),
    "prepare_optimizer": ("integrations", "a method of Accelerate, which Trainer calls"),
    "backward": ("integrations", "as above"),
    "frequency": ("integrations", "Lightning's record of a scheduler"),
    "should_stop": ("integrations", "Lightning's flag, which callbacks set"),
}
"""Attributes that are set although their classes are not ours: in which folder of the library, and why."""
BY_NAME = {
    "src/stretto/integrations/asked_by_any.py": "what callbacks ask of the Trainer, in its own record of flags",
    "src/stretto/engine/statistics.py": "a buffer of the user's model, which is replaced by one of another kind",
    "src/stretto/optimizer/private.py": "attributes of the user's optimizer, copied into one that was just built",
}
"""Files that set attributes whose names they do not know, with the reason."""


def stored(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement sets."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For | ast.Delete):
        targets = getattr(node, "targets", None) or [node.target]  # type: ignore[union-attr]  # one or the other
        for target in targets:
            yield from (
                found
                for found in ast.walk(target)
                if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store | ast.Del)
            )
    elif isinstance(node, ast.With):
        for item in node.items:
            if isinstance(item.optional_vars, ast.Attribute):
                yield item.optional_vars


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def attributes_of_classes(tree: ast.Module) -> set[str]:
    """Return the attributes of all classes that a file defines."""
    names = set()
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef):
            names |= {
                one.target.id
                for one in kind.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            names |= {found.attr for node in ast.walk(kind) for found in stored(node) if is_self(found.value)}
    return names


def foreign_stores(tree: ast.Module, folder: str = "") -> list[ast.Attribute]:
    """Return what a file sets of objects whose classes it does not define."""
    own = attributes_of_classes(tree) | {
        name for name, (there, _) in OF_OTHERS.items() if there in ("", folder)
    }
    found = [target for node in ast.walk(tree) for target in stored(node)]
    return [target for target in found if not is_self(target.value) and target.attr not in own]


def foreign_names(tree: ast.Module) -> list[ast.Call]:
    """Return where a file sets an attribute by its name of an object that is not a class of its own."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("setattr", "delattr")
        and not (isinstance(node.args[0], ast.Name) and node.args[0].id in classes)
    ]


def test_attributes_are_set_by_the_file_that_defines_them() -> None:
    assert [
        f"{place(file, target)}: {ast.unparse(target)}"
        for file in sorted(LIBRARY.rglob("*.py"))
        for target in foreign_stores(parsed(file), file.relative_to(LIBRARY).parts[0])
    ] == []


def test_attributes_are_set_by_name_only_where_others_own_the_object() -> None:
    assert [
        f"{place(file, call)}: {ast.unparse(call)}"
        for file in sorted(LIBRARY.rglob("*.py"))
        for call in foreign_names(parsed(file))
        if place(file) not in BY_NAME
    ] == []
