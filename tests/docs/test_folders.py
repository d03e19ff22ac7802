"""The folder table of docs/architecture.md is the import contract, in its order."""

import re
import tomllib

from tests.docs.pages import DOCS, ROOT, table


def test_the_folder_table_lists_the_layers_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts for layer in contract.get("layers", [])]
    places = [name.strip() for layer in layers for name in layer.split("|")]
    rows = table(DOCS / "architecture.md", "tests/docs/test_folders.py")
    assert [row["place"].strip("`") for row in rows] == places


def test_every_part_of_the_package_has_a_row() -> None:
    packages = (ROOT / "src" / "stretto", ROOT / "src" / "stretto_lab")
    paths = [path for package in packages for path in package.iterdir()]
    parts = {path.stem for path in paths if path.suffix in ("", ".py") and path.name[0] != "_"}
    rows = table(DOCS / "architecture.md", "tests/docs/test_folders.py")
    assert parts <= {row["place"].strip("`") for row in rows}


def test_every_file_that_the_page_sends_a_reader_to_is_there_once() -> None:
    named = re.findall(
        r"`([\w/]+\.py)`", str(table(DOCS / "architecture.md", "tests/docs/test_folders.py, files"))
    )
    found = {name: list((ROOT / "src").glob(f"*/{name}")) for name in named}
    assert len(named) >= 20
    assert {name: len(files) for name, files in found.items()} == dict.fromkeys(named, 1)
