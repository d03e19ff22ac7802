"""What the package may not call, because it would run what files or other ranks bring, or listen to everybody."""

import ast
from pathlib import Path

from tests.style.source import package_files, places

OWN_BYTES = "pickle.loads(pickle.dumps("
"""Laws of `stretto_lab.testing` read back what they have written in the same expression."""
UNPICKLERS = {("pickle", "loads"), ("pickle", "load"), ("pickle", "Unpickler"), ("torch", "load")}
MODULES = {"dill", "cloudpickle", "joblib", "shelve", "marshal"}


def is_door(node: ast.AST, file: Path) -> bool:
    """Whether a call reads values by pickle."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return any(name.partition(".")[0] in MODULES or name.endswith("_object") for name in names)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, owner = node.func.attr, node.func.value
    if (
        name.endswith(("_object", "_object_list")) and name != "parse_from_object"
    ) or name == "read_metadata":
        return True
    if not isinstance(owner, ast.Name) or (owner.id, name) not in UNPICKLERS:
        return False
    is_safe = any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in node.keywords
    )
    return not (owner.id == "torch" and is_safe) and not ast.unparse(node).startswith(OWN_BYTES)


def test_nothing_is_unpickled() -> None:
    assert places(is_door, package_files()) == []
