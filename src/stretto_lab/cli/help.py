"""The texts of `--help`: one screen with the options that most people need; `--help-all` explains all of them."""

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from stretto_lab.cli.written import Sources, Written
from stretto_lab.patience import COLUMNS

_LEFT = 24
"""Width of the column of options."""
HELP = ("-h", "--help")
HELP_ALL = "--help-all"

Takes = Literal["RECIPE", "FOLDER", "FOLDER...", "[RECORD...]", ""]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The help of one command, known before any import."""

    summary: str
    """The command in one line."""
    takes: Takes
    """The word that comes before the options."""
    record: str
    """The class whose fields are its options."""
    basic: Sequence[str]
    """Options that most people need, in the order of the help."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": Command(
            summary="train a recipe on local workers, or as a rank of torchrun",
            takes="RECIPE",
            record="RunConfig",
            basic=(
                "strategy", "workers", "updates", "to-loss", "micro-batches", "wire", "link", "echo",
                "guards", "run-dir", "resume",
            ),
        ),
        "resume": Command(
            summary="continue a run of train from its last good checkpoint",
            takes="FOLDER",
            record="RunConfig",
            basic=("updates", "seconds", "to-loss", "workers", "link"),
        ),
        "compare": Command(
            summary="run strategies alternately on the same link",
            takes="RECIPE",
            record="CompareConfig",
            basic=(
                "strategies", "workers", "updates", "to-loss", "repeats", "micro-batches", "link",
                "seed", "out",
            ),
        ),
        "simulate": Command(
            summary="train a recipe on a virtual cluster of many ranks",
            takes="RECIPE",
            record="SimulateConfig",
            basic=(
                "ranks", "network", "strategy", "updates", "micro-batches", "micro-batch-ms", "slow", "jitter",
                "seed", "run-dir",
            ),
        ),
        "report": Command(
            summary="make a page that shows runs: loss, time, both lanes, damage",
            takes="FOLDER...",
            record="ReportConfig",
            basic=("out",),
        ),
        "diagnose": Command(
            summary="measure whether a recipe waits for its data",
            takes="RECIPE",
            record="DiagnoseConfig",
            basic=("workers", "strategy", "batches", "micro-batches", "link", "slow-loader"),
        ),
        "plan": Command(
            summary="measure a recipe, and say which strategy and wire to use",
            takes="RECIPE",
            record="PlanConfig",
            basic=("workers", "ranks", "network", "allow-loss", "micro-batches", "link", "batches", "seed"),
        ),
        "estimate": Command(
            summary="say at once what an exchange would cost, from a few figures",
            takes="",
            record="EstimateConfig",
            basic=("parameters", "update-seconds", "ranks", "network", "micro-batches", "allow-loss"),
        ),
        "meet": Command(
            summary="host the store of jobs that survive the loss of ranks",
            takes="",
            record="MeetConfig",
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
            "  --print-config                show all options in effect, and do nothing else",
            "  --config FILE                 take options from that, or a run's config.json",
            "  stretto --version",
            "",
        ]
    )


def command_help(name: str, named: str | None, *, whole: bool) -> str | None:
    """Return the help of a command, read from the sources of its options; None if there is no recipe of that name.

    Args:
        name: The command.
        named: The recipe that the user named; without it the options of recipes are skipped.
        whole: Whether to explain all options, instead of only the common ones by their first clause.
    """
    sources = Sources()
    recipes = sources.recipes()
    recipe = named if "RECIPE" in COMMANDS[name].takes else None
    kind = None if recipe is None else recipes.get(recipe) or sources.find_own(recipe)
    if recipe is not None and kind is None:
        return None
    command = COMMANDS[name]
    takes = recipe if recipe is not None and "RECIPE" in command.takes else command.takes
    usage = " ".join(word for word in ("usage: stretto", name, takes, "[OPTIONS]") if word)
    lines = [usage, "", f"{command.summary[0].upper()}{command.summary[1:]}."]
    if recipe is None and "RECIPE" in command.takes:
        lines += ["", f"recipes (`stretto {name} RECIPE --help` adds the options of one):"]
        texts = {key: first_clause(sources.summary(one)) for key, one in recipes.items()}
        texts["FILE.py:FUNCTION"] = "your own, or MODULE:FUNCTION of a package (the page recipes)"
        lines += [line for key, text in texts.items() for line in _row(key, text[:1].lower() + text[1:], 16)]
    own = [*sources.options(command.record)]
    tasks = [] if kind is None else [*sources.options(kind, "--task.")]
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


def _rows(options: Iterable[Written], *, whole: bool, shows_defaults: bool = True) -> list[str]:
    lines: list[str] = []
    for option in options:
        text, name = option.text, f"{option.name} {option.metavar}".rstrip()
        if not whole:
            text, name = first_clause(text), name.removesuffix("|None")
        elif not option.metavar:
            prefix, dot, last = option.name.removeprefix("--").rpartition(".")
            name += f", --{prefix}{dot}no-{last}"
        if shows_defaults and option.default not in ("None", "none", "off"):
            text += f" [{option.default}]"
        lines += _row(name, text, _LEFT)
    return lines


def first_clause(text: str) -> str:
    """Return a text up to its first semicolon or full stop."""
    return " ".join(text.split()).partition("; ")[0].partition(". ")[0].rstrip(".")


def _row(name: str, text: str, left: int) -> list[str]:
    """Return a name and its explanation side by side; a name that is too long gets a line for itself."""
    folded = textwrap.wrap(text, COLUMNS - left - 4, break_on_hyphens=False) or [""]
    if len(name) > left:
        return [f"  {name}", *(f"  {'':{left}}  {line}" for line in folded)]
    first, *others = folded
    return [f"  {name:{left}}  {first}", *(f"  {'':{left}}  {line}" for line in others)]
