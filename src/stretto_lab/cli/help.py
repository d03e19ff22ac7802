"""What `--help` prints: one screen with the options that most people need; `--help-all` explains all of them."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from stretto.fields import field_types
from stretto_lab.patience import COLUMNS

if TYPE_CHECKING:  # the overview is printed before what the options are made of is there
    from stretto_lab.cli.options import Option

_LEFT = 24
"""Width of the column of options."""
HELP = ("-h", "--help")
HELP_ALL = "--help-all"

Takes = Literal["RECIPE", "FOLDER", "FOLDER...", "[RECORD...]", ""]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What is said about one command before anything of it is imported."""

    summary: str
    """What it does, for one line."""
    takes: Takes
    """The word that comes before the options."""
    basic: Sequence[str]
    """Options that most people need, in the order of the help."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": Command(
            summary="train a recipe on local workers, or as a rank of torchrun",
            takes="RECIPE",
            basic=(
                "strategy", "workers", "updates", "to-loss", "micro-batches", "wire", "link", "echo",
                "guards", "run-dir", "resume",
            ),
        ),
        "resume": Command(
            summary="go on with a run of train, from its last good checkpoint",
            takes="FOLDER",
            basic=("updates", "seconds", "to-loss", "workers", "link"),
        ),
        "compare": Command(
            summary="run strategies in turns on the same link",
            takes="RECIPE",
            basic=(
                "strategies", "workers", "updates", "to-loss", "repeats", "learning-rates", "micro-batches", "link",
                "seed", "out",
            ),
        ),
        "simulate": Command(
            summary="train a recipe on a virtual cluster of many ranks",
            takes="RECIPE",
            basic=(
                "ranks", "network", "strategy", "updates", "micro-batches", "micro-batch-ms", "slow", "jitter",
                "seed", "run-dir",
            ),
        ),
        "report": Command(
            summary="make a page that shows runs: loss, time, both lanes, damage",
            takes="FOLDER...",
            basic=("out",),
        ),
        "diagnose": Command(
            summary="measure whether a recipe waits for its data",
            takes="RECIPE",
            basic=("workers", "strategy", "batches", "micro-batches", "link", "slow-loader"),
        ),
        "plan": Command(
            summary="measure a recipe, and say which strategy and wire to use",
            takes="RECIPE",
            basic=("workers", "ranks", "network", "allow-loss", "micro-batches", "link", "batches", "seed"),
        ),
        "estimate": Command(
            summary="say at once what an exchange would cost, from a few figures",
            takes="",
            basic=("parameters", "update-seconds", "ranks", "network", "micro-batches", "allow-loss"),
        ),
        "meet": Command(
            summary="host the store of jobs that survive the loss of ranks",
            takes="",
            basic=("host", "port"),
        ),
    }
)  # fmt: skip


def overview() -> str:
    """Return the help of the program."""
    return "\n".join(
        [
            "usage: stretto COMMAND [RECIPE] [OPTIONS]",
            "",
            "Data-parallel training with PyTorch that keeps devices busy behind slow networks",
            "and slow data, and notices damaged values.",
            "",
            "commands:",
            *(f"  {name:10} {command.summary}" for name, command in COMMANDS.items()),
            "",
            "  stretto train stdlib-gpt      a first run: a small language model, two workers",
            "  stretto COMMAND --help        recipes, and the options most people need",
            "  stretto --version",
            "",
        ]
    )


def command_help(
    name: str, recipes: Mapping[str, str], options: Iterable["Option"], recipe: str | None, *, whole: bool
) -> str:
    """Return the help of a command.

    Args:
        name: Of the command.
        recipes: What each recipe is, by name.
        options: All options of the command, and of a recipe.
        recipe: The one that the user named; without it the options of recipes are left out.
        whole: Whether all options are explained, or only those that most people need, in their first clause.
    """
    command = COMMANDS[name]
    takes = recipe if recipe is not None and "RECIPE" in command.takes else command.takes
    usage = " ".join(word for word in ("usage: stretto", name, takes, "[OPTIONS]") if word)
    lines = [usage, "", f"{command.summary[0].upper()}{command.summary[1:]}."]
    if recipe is None and "RECIPE" in command.takes:
        lines += ["", f"recipes (`stretto {name} RECIPE --help` adds the options of one):"]
        lines += [line for key, text in recipes.items() for line in _row(key, text, 16)]
    own = [option for option in options if not option.name.startswith("--task.")]
    tasks = [option for option in options if option.name.startswith("--task.")]
    if whole:
        shown, of_recipe = own, tasks
    else:
        by_name = {option.name: option for option in own}
        shown = [by_name[f"--{word}"] for word in command.basic]
        of_recipe = [option for option in tasks if option.name.count(".") == 1]
    shows_defaults = command.takes != "FOLDER"
    heading = (
        "options, with their defaults in brackets:"
        if shows_defaults
        else "options that replace those of the run:"
    )
    lines += ["", heading, *_rows(shown, whole=whole, shows_defaults=shows_defaults)]
    if recipe is not None and of_recipe:
        lines += ["", f"options of {recipe}:", *_rows(of_recipe, whole=whole)]
    if not whole:
        count = len(own) + (0 if recipe is None else len(tasks))
        lines += ["", f"--help-all explains all {count} options."]
    return "\n".join([*lines, ""])


def plain_help(name: str, record: Any, *, whole: bool) -> str:
    """Return the help of a command whose options are plain fields of one record; nothing is imported for it."""
    texts, kinds = _explained(record.__class__), field_types(record.__class__)
    summary = COMMANDS[name].summary
    lines = [f"usage: stretto {name} [OPTIONS]", "", f"{summary[0].upper()}{summary[1:]}.", ""]
    lines += ["options, with their defaults in brackets:"]
    for field, kind in kinds.items():
        text = " ".join(texts.get(field, "").split())
        metavar = "TEXT" if kind is str else kind.__name__.upper()
        shown = f"{text if whole else first_clause(text)} [{getattr(record, field)}]"
        lines += _row(f"--{field.replace('_', '-')} {metavar}", shown, _LEFT)
    if not whole:
        lines += ["", f"--help-all explains all {len(kinds)} options."]
    return "\n".join([*lines, ""])


def _rows(options: Iterable["Option"], *, whole: bool, shows_defaults: bool = True) -> list[str]:
    texts: dict[type, Mapping[str, str]] = {}
    lines: list[str] = []
    for option in options:
        if option.record not in texts:
            texts[option.record] = _explained(option.record)
        text = " ".join(texts[option.record].get(option.field, "").split())
        name = f"{option.name} {option.metavar}".rstrip()
        if whole:
            name += f", {option.off}" if option.is_switch else ""
        else:
            text, name = first_clause(text), name.removesuffix("|None")
        default = option.shown_default
        if shows_defaults and default not in ("None", "none", "off"):
            text += f" [{default}]"
        lines += _row(name, text, _LEFT)
    return lines


def first_clause(text: str) -> str:
    """Return a text up to its first semicolon or full stop."""
    return " ".join(text.split()).partition("; ")[0].partition(". ")[0].rstrip(".")


def _row(name: str, text: str, left: int) -> list[str]:
    """Return a name and its explanation side by side; a name that is too long has a line of its own."""
    folded = textwrap.wrap(text, COLUMNS - left - 4, break_on_hyphens=False) or [""]
    if len(name) > left:
        return [f"  {name}", *(f"  {'':{left}}  {line}" for line in folded)]
    first, *others = folded
    return [f"  {name:{left}}  {first}", *(f"  {'':{left}}  {line}" for line in others)]


def _explained(record: type) -> dict[str, str]:
    """Return the docstring of every field of a record, by name; of a function's options, what its docstring says.

    Raises:
        MissingExtra: docstring_parser is not installed.
    """
    try:
        import docstring_parser
    except ImportError as error:
        from stretto.errors import MissingExtra

        raise MissingExtra("docstring_parser", "cli", "the help") from error
    texts: dict[str, str] = {}
    for kind in reversed(record.__mro__):
        parsed: Any = docstring_parser.parse_from_object(kind) if dataclasses.is_dataclass(kind) else None
        texts.update({one.arg_name: one.description or "" for one in parsed.params} if parsed else {})
    return texts
