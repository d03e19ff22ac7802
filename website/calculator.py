"""The calculator of the site, which answers as `stretto estimate` does: a hook of mkdocs.

Its formulas are those of `stretto_lab.estimate.formulas`, written again in JavaScript from the functions themselves.
What strategies ask for and cost is data. `calculator.js` reads a reader's figures and shows the rows.
"""

import ast
import inspect
import json
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from stretto.errors import ConfigError
from stretto.link import MESSAGE_BYTES
from stretto_lab.estimate import ARMS, ELEMENT_BYTES, EstimateConfig, bill_of, formulas
from stretto_lab.evidence import ALIKE, AVERAGES, of_wire_too

PAGE = "javascripts/formulas.js"
"""Beside `javascripts/calculator.js`."""
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches per rank and update that a reader may choose."""
_MOST_RANKS = 10**6
"""Above what a reader would type."""
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the formulas and the data."""
    files.append(File.generated(config, PAGE, content=script()))
    return files


def script() -> str:
    """Return the formulas as functions, and the data as a constant."""
    functions = [
        node for node in ast.parse(inspect.getsource(formulas)).body if isinstance(node, ast.FunctionDef)
    ]
    return "\n".join(
        [
            "// Made from src/stretto_lab/estimate by website/calculator.py.",
            *map(_in_javascript, functions),
            f"const ESTIMATE = {json.dumps(data(), allow_nan=False)};",
            "",
        ]
    )


def data() -> dict[str, Any]:
    """Return what the rows are made of, in the order of `stretto estimate`."""
    return {
        "alike": ALIKE,
        "bucketBytes": EstimateConfig().work.bucket_bytes,
        "messageBytes": MESSAGE_BYTES,
        "counts": COUNTS,
        "rows": [
            {
                "strategy": text,
                "wire": wire,
                "element": ELEMENT_BYTES[wire],
                "bills": {count: bill for count in COUNTS if (bill := _bill(strategy, wire, count))},
                "nats": _nats(strategy, wire),
            }
            for text, (strategy, wires) in ARMS.items()
            for wire in wires
        ],
    }


def _bill(strategy: Any, wire: str, count: int) -> dict[str, Any] | None:
    try:
        bill = bill_of(strategy, wire, count)
    except ConfigError:  # not enough micro-batches
        return None
    parts = [[one.share, one.hidden, one.times, one.in_buckets] for one in bill.parts]
    core = [bill.core_whole, bill.core_shared]
    return {
        "bytes": bill.bytes_each,
        "whole": bill.whole,
        "shared": bill.shared,
        "core": core,
        "parts": parts,
    }


def _nats(strategy: Any, wire: str) -> list[tuple[int, float]]:
    """Return pairs: the most ranks, and what it costs up to there."""
    bounds = sorted({count for _, nats in AVERAGES.values() for count in nats} | {_MOST_RANKS})
    found = [(count, of_wire_too(strategy, wire, count).nats) for count in bounds]
    return [(count, nats) for count, nats in found if nats is not None]


def _in_javascript(function: ast.FunctionDef) -> str:
    returned = function.body[-1]
    if not isinstance(returned, ast.Return) or returned.value is None:
        raise TypeError(f"{function.name}: expected one expression, found {ast.unparse(function)}")
    names = ", ".join(one.arg for one in function.args.args)
    return f"const {function.name} = ({names}) => {_expression(returned.value)};"


def _expression(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _SIGNS:
            return f"({_expression(left)} {_SIGNS[type(op)]} {_expression(right)})"
        case ast.Call(ast.Name("max" | "min" | "ceil" | "floor" as name), arguments):
            return f"Math.{name}({', '.join(map(_expression, arguments))})"
        case ast.Name(name):
            return name
        case ast.Constant(int() | float() as value):
            return repr(value)
    raise TypeError(f"a formula of the calculator has {ast.unparse(node)}: expected what JavaScript has too")
