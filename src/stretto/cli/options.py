"""What the environment says about ranks: those of torchrun and its like, or none.

Typed configurations from words of the command line: every field is an option, its docstring the help.
"""

import ast
import dataclasses
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from stretto.engine import Clock
from stretto.errors import ConfigError, MissingExtra, UnknownName
from stretto.faults import Fault, faults_text, parse_faults
from stretto.recipes import RECIPES, recipe
from stretto.train.arms import parse_clock, parse_learning_rates, split_list
from stretto.train.launch import JoinedRank, LocalRanks, Ranks
from stretto.train.workers import Seat
from stretto.virtual import parse_slowness


def find_ranks(workers: int) -> Ranks:
    """Return the rank that a launcher has made of this process, or else `workers` local ones.

    Raises:
        ConfigError: A launcher's variables are incomplete.
    """
    if is_joined():
        # torchrun's agent may host the store itself; otherwise rank 0 does.
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        seat = _seat(os.environ)
        return JoinedRank(seat, hosts_store=seat.rank == 0 and not agent_hosts)
    # Gloo otherwise looks the machine's own name up, which many machines cannot.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return LocalRanks(workers)


def is_joined() -> bool:
    """Whether a launcher has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _seat(variables: Mapping[str, str]) -> Seat:
    try:
        return Seat(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
            host=variables["MASTER_ADDR"],
            port=int(variables["MASTER_PORT"]),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK and WORLD_SIZE say that a launcher started this process, but its other variables do not fit "
            f"({error}): expected MASTER_ADDR and MASTER_PORT too"
        ) from error


if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, StructConstructorSpec, StructTypeInfo

ConfigT = TypeVar("ConfigT")


def parse_options(
    command: str, words: Sequence[str], configure: Callable[[Any], ConfigT]
) -> tuple[str, ConfigT]:
    """Read "RECIPE [OPTIONS]".

    Args:
        command: Its name, for help and messages.
        words: What follows it.
        configure: Makes the configuration of the command from that of a recipe; its fields are the options.

    Returns:
        The recipe's name and the configuration.

    Raises:
        UnknownName: No recipe, or no option, is called so.
        ConfigError: A value cannot be.
        MissingExtra: tyro is not installed.
        SystemExit: The help was asked for (0), or a value cannot be read (2); both are printed.
    """
    if not words or words[0].startswith("-"):
        raise UnknownName(f"{command} needs a recipe first: {', '.join(RECIPES)}")
    name, *options = words
    return name, _parse(f"stretto {command} {name}", options, configure(recipe(name)))


def parse_alone(command: str, words: Sequence[str], default: ConfigT) -> ConfigT:
    """Read the options of a command without a recipe; the errors are those of `parse_options`."""
    return _parse(f"stretto {command}", words, default)


def _parse(program: str, options: Sequence[str], default: ConfigT) -> ConfigT:
    try:
        import tyro
    except ImportError as error:
        raise MissingExtra("tyro", "cli", "the command line") from error
    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(_fields_rule)
    specs = _word_specs()
    registry.primitive_rule(lambda info: specs.get(info.type))
    configuration, unknown = tyro.cli(
        type(default),
        prog=program,
        description=inspect.getdoc(type(default)),
        args=list(options),
        default=default,
        registry=registry,
        return_unknown_args=True,
    )
    if unknown:
        raise UnknownName(f"{program} has no option {unknown[0]!r}; `{program} --help` lists them")
    return configuration


def _fields_rule(info: "StructTypeInfo") -> "StructConstructorSpec | None":
    """Let every field of a dataclass be an option; a field of a type variable's type takes its default's type."""
    from tyro.constructors import StructConstructorSpec, StructFieldSpec

    if not dataclasses.is_dataclass(info.default) or isinstance(info.default, type):
        return None
    kind = type(info.default)
    hints, docs = get_type_hints(kind), field_docs(kind)
    fields = []
    for field in dataclasses.fields(kind):
        value = getattr(info.default, field.name)
        hint = hints[field.name]
        field_type = type(value) if isinstance(hint, TypeVar) else hint
        fields.append(StructFieldSpec(field.name, field_type, value, helptext=docs[field.name]))
    return StructConstructorSpec(instantiate=kind, fields=tuple(fields))


def field_docs(kind: type) -> dict[str, str]:
    """Return the string under each field of a dataclass and of those it inherits from, as one line each."""
    docs: dict[str, str] = {}
    for parent in reversed([parent for parent in kind.__mro__ if dataclasses.is_dataclass(parent)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
                docs[statement.target.id] = " ".join(str(text).split())
    return docs


def _word_specs() -> dict[Any, "PrimitiveConstructorSpec[Any]"]:
    """Return how to read and show the types that are one word on this command line."""
    return {
        Clock | None: _word(
            "MIN,MAX",
            parse_clock,
            lambda clock: "none" if clock is None else f"{clock.minimum},{clock.maximum}",
        ),
        tuple[str, ...]: _word("A,B,...", split_list, ",".join),
        dict[str, float]: _word(
            "ARM=RATE,...",
            parse_learning_rates,
            lambda rates: ",".join(f"{arm}={rate:g}" for arm, rate in rates.items()) or "none",
        ),
        tuple[Fault, ...]: _word("SITE:rank=R:...,...", parse_faults, faults_text),
        dict[int, float]: _word(
            "RANK=FACTOR,...",
            parse_slowness,
            lambda factors: ",".join(f"{rank}={factor:g}" for rank, factor in factors.items()) or "none",
        ),
    }


def _word(
    metavar: str, read: Callable[[str], Any], show: Callable[[Any], str]
) -> "PrimitiveConstructorSpec[Any]":
    from tyro.constructors import PrimitiveConstructorSpec

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [show(value)],
    )
