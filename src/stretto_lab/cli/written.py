"""The options of commands and recipes, read from the source code of their records without importing it or PyTorch.

A field's annotation gives the option's type, the docstring below the field its explanation.
"""

import ast
import importlib.util
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

HOME = Path(__file__).parents[2]
"""The folder that contains the packages."""
FILES = (
    "stretto/engine/options.py", "stretto_lab/evidence.py", "stretto_lab/train/configuration.py",
    "stretto_lab/train/simulation.py", "stretto_lab/train/meet.py", "stretto_lab/plan/ranking.py",
    "stretto_lab/page/__init__.py", "stretto_lab/estimate/answer.py", "stretto_lab/recipes/optimizers.py",
    "stretto_lab/recipes/corpus.py", "stretto_lab/recipes/rows.py", "stretto_lab/recipes/stdlib_gpt.py",
    "stretto_lab/recipes/digits_resnet.py", "stretto_lab/recipes/language.py", "stretto_lab/recipes/__init__.py",
)  # fmt: skip
"""The files that define the records and the names to which their fields refer."""
METAVARS: Mapping[str, str] = MappingProxyType(
    {
        "None": "None",
        "str": "TEXT",
        "bool": "",
        "Clock": "MIN,MAX",
        "Noise": "VARIANCE,...",
        "tuple[str, ...]": "A,B,...",
        "tuple[int, ...]": "N,M,...",
        "tuple[float, float]": "A,B",
        "tuple[Fault, ...]": "SITE:rank=R:...,...",
        "dict[int, float]": "RANK=FACTOR,...",
    }
)
"""The placeholder that the help shows for a value of each type."""


@dataclass(frozen=True, slots=True)
class Written:
    """One option, as the help prints it."""

    name: str
    """As the user types it: --task.width."""
    metavar: str
    """Placeholder for the value; empty for a switch."""
    default: str
    """The default, as the user would type it."""
    text: str
    """The explanation."""


class Sources:
    """The names that some files define at their top level: classes, functions, constants and types."""

    def __init__(self) -> None:
        self._defined: dict[str, Any] = {}
        for file in FILES:
            self._add(HOME / file)

    def _add(self, path: Path) -> None:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                self._defined[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                self._defined[ast.unparse(target)] = node.value

    def recipes(self) -> dict[str, str]:
        """Return the class of each recipe, by its name."""
        pairs = zip(self._defined["RECIPES"].keys, self._defined["RECIPES"].values, strict=True)
        return {ast.literal_eval(name): ast.unparse(kind) for name, kind in pairs}

    def summary(self, name: str) -> str:
        """Return the docstring of a class."""
        return ast.get_docstring(self._defined[name]) or ""

    def find_own(self, place: str) -> str | None:
        """Return the name of a user's own recipe, FILE.py:NAME or MODULE:NAME; None if the file does not define it."""
        source, _, name = place.rpartition(":")
        spec = None if source.endswith(".py") or not source else importlib.util.find_spec(source)
        path = Path(source if spec is None else str(spec.origin))
        if path.is_file():
            self._add(path)
        return name if isinstance(self._defined.get(name), ast.ClassDef | ast.FunctionDef) else None

    def options(self, name: str, prefix: str = "--") -> Iterator[Written]:
        """Yield the options of a record and of the records in it, or of a function's arguments after the star."""
        node = self._defined[name]
        fields = self._fields(node) if isinstance(node, ast.ClassDef) else _arguments(node)
        for field, (kind, default, text) in fields.items():
            option = prefix + field.replace("_", "-")
            written = ast.unparse(kind)
            if written not in METAVARS and isinstance(self._defined.get(written), ast.ClassDef):
                yield from self.options(written, f"{option}.")
            elif written != "TaskT":
                yield Written(option, self._metavar(kind), self._shown(default), " ".join(text.split()))

    def _fields(self, node: ast.ClassDef) -> dict[str, Any]:
        """Return type, default and explanation of each field, in the order of a dataclass: inherited fields first."""
        found: dict[str, Any] = {}
        for base in node.bases:
            if (parent := ast.unparse(base).partition("[")[0]) in self._defined:
                found |= self._fields(self._defined[parent])
        for field, below in itertools.zip_longest(node.body, node.body[1:]):
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
                found[ast.unparse(field.target)] = field.annotation, field.value, text
        return found

    def _metavar(self, kind: ast.expr) -> str:
        if isinstance(kind, ast.BinOp):
            return f"{self._metavar(kind.left)}|{self._metavar(kind.right)}"
        written = ast.unparse(kind)
        if written.startswith("Literal["):
            return "{" + ",".join(map(str, ast.literal_eval(f"({written[8:-1]},)"))) + "}"
        known = self._defined.get(written)
        if written not in METAVARS and isinstance(known, ast.Subscript):  # a name of a Literal
            return self._metavar(known)
        return METAVARS.get(written, written.upper())

    def _shown(self, default: ast.expr | None) -> str:
        """Return a default as the user would type it."""
        known = self._defined.get(ast.unparse(default)) if isinstance(default, ast.Name) else default
        try:
            value = ast.literal_eval(known or ast.Constant(None))
        except ValueError:  # a factory of what is empty
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _arguments(node: ast.FunctionDef) -> dict[str, Any]:
    """Return type, default and explanation of the arguments after the star, which the docstring explains."""
    texts = dict(re.findall(r"^ *(\w+): (.*(?:\n {8,}.*)*)", ast.get_docstring(node) or "", re.MULTILINE))
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {
        one.arg: (one.annotation, default, texts.get(one.arg, "")) for one, default in pairs if one.annotation
    }
