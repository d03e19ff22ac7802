"""The page of the command line: what `stretto COMMAND --help-all` prints, for every command. A hook of mkdocs."""

import contextlib
import io

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from stretto_lab.cli import main
from stretto_lab.cli.help import COMMANDS, HELP_ALL


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    parts = ["# Command line\n\n" + block()]
    parts += [f"## stretto {name}\n\n{block(name)}" for name in COMMANDS]
    files.append(File.generated(config, "reference/command-line.md", content="\n".join(parts)))
    return files


def block(*command: str) -> str:
    """Return what a command says of all its options, as a code block."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([*command, HELP_ALL])
    return f"```text\n{printed.getvalue()}```\n"
