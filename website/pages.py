"""Pages that lie outside `docs/`, and links between all pages: a hook of mkdocs.

The README, the results and the examples stay where a reader of the repository looks for them. Here they become pages
of the site beside those of `docs/`. A link in any page is written for the repository. It is turned into one to the
page that its target has become. Any other file that a page links to is a download of the site, below `files/`.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LISTED = {"results": "Results", "examples": "Examples"}
"""Folders of the site whose pages are all listed, with the titles of their lists."""
DECISIONS = "docs/decisions/"
"""Records for those who change the code: files that pages link to, and no pages."""
FIRST = {
    "Start": 2.0,
    "Train": 2.0,
    "Slow network": 2.0,
    "Robustness": 2.0,
    "Scale": 2.0,
    "Extend": 1.0,
    "Examples": 0.1,
    "Project": 0.01,
    "Reference": 0.01,
    "Measured": 0.001,
}
"""What the search multiplies the rank of a page with, by the nearest of these parts of the navigation above it. A word
in a title counts a thousand times, and who asks how to do something wants that before a result with such a title."""
FOLDERS = {
    "docs": "index.md",
    "examples/extend": "examples/index.md",
    "examples/cluster": "examples/index.md",
}
"""Folders of the repository that pages link to, and the page for each."""
LINK = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)|\]\(([^)\s#]+)(#[^)\s]*)?\)", re.DOTALL | re.MULTILINE)
"""Code, which is passed over; or the target of a link, and its anchor."""

CODE = re.compile(r"<code>[^<]*</code>")
LONG = 26
"""Characters from which a name is broken where its cell is narrow, tags included."""


def source_of_pages() -> dict[str, str]:
    """Return from every page of the site to its file in the repository, results with the latest first."""
    pages = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}
    for file in sorted(ROOT.glob("docs/**/*.md")):
        place = file.relative_to(ROOT).as_posix()
        if not place.startswith(DECISIONS):
            pages[place.removeprefix("docs/")] = place
    for file in sorted(ROOT.glob("benchmarks/results/*/README.md"), reverse=True):
        pages[f"results/{file.parent.name}.md"] = file.relative_to(ROOT).as_posix()
    for file in sorted(ROOT.glob("examples/**/*.py")):
        pages[file.relative_to(ROOT).with_suffix(".md").as_posix()] = file.relative_to(ROOT).as_posix()
    for file in sorted(ROOT.glob("examples/cluster/*")):
        if file.suffix != ".py":
            pages[f"examples/cluster/{file.name}.md"] = file.relative_to(ROOT).as_posix()
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of a listed folder into the navigation, where that has `folder/`."""
    pages = source_of_pages()
    for tab in config.nav:
        for entries in tab.values():
            for entry in entries:
                for title, place in entry.items():
                    if place.endswith("/"):
                        entry[title] = [
                            f"{place}index.md",
                            *(page for page in pages if page.startswith(place)),
                        ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside `docs/`, and the lists."""
    pages = source_of_pages()
    texts = {page: text_of(ROOT / place) for page, place in pages.items()}
    for page, place in pages.items():
        if not place.startswith("docs/"):
            files.append(File.generated(config, page, content=texts[page]))
    for path in downloads():
        files.append(File.generated(config, place_of_download(path), abs_src_path=str(ROOT / path)))
    for folder, title in LISTED.items():
        rows = [
            f"- [{re.search('^# (.+)$', text, re.MULTILINE)[1]}]({posixpath.relpath(page, folder)})"
            f"{about(ROOT / pages[page])}"
            for page, text in texts.items()
            if page.startswith(f"{folder}/")
        ]
        text = "\n".join([f"# {title}", "", *rows, ""])
        files.append(File.generated(config, f"{folder}/index.md", content=text))
    return files


def about(file: Path) -> str:
    """Return what a list says of a program: the first line of its docstring."""
    if file.suffix != ".py":
        return ""
    first, *_ = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()
    return f": {first.rstrip(':.')}"


def text_of(file: Path) -> str:
    """Return the Markdown of a page: the file itself, or a program below its docstring."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix != ".py":
        return f"# {file.name}\n\n```\n{text}```\n"
    docstring = ast.get_docstring(ast.parse(text))
    _, _, code = text.partition('"""\n\n')
    return f"# {file.name}\n\n{docstring}\n\n```python\n{code}```\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page from the repository's paths to the site's, and say how early the search shows it."""
    above = [section.title for section in page.ancestors if section.title in FIRST]
    page.meta["search"] = {"boost": FIRST[above[0]] if above else 1.0}
    return with_links_of_site(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a long name in a table be broken behind a colon."""
    return re.sub(r"<td[^>]*>.*?</td>", lambda cell: CODE.sub(_breakable, cell[0]), html, flags=re.DOTALL)


def _breakable(code: re.Match[str]) -> str:
    return code[0].replace(":", ":<wbr>") if len(code[0]) > LONG else code[0]


def downloads() -> list[str]:
    """Return the files of the repository that pages link to and that are no pages themselves."""
    pages = source_of_pages()
    found = set()
    for place in pages.values():
        for match in LINK.finditer((ROOT / place).read_text(encoding="utf-8")):
            if not match[1] and "://" not in match[2]:
                found.add(posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2])))
    return sorted(
        path
        for path in found - set(pages.values())
        if (not path.startswith("docs/") or path.startswith(DECISIONS)) and (ROOT / path).is_file()
    )


def place_of_download(path: str) -> str:
    """Return where a file of the repository lies in the site.

    That leaves out folders that begin with a dot, and would make a page of whatever ends with `.md`.
    """
    return f"files/{path.lstrip('.')}" + (".txt" if path.endswith(".md") else "")


def with_links_of_site(markdown: str, page: str) -> str:
    """Return the text of a page with its links as the site needs them.

    Args:
        markdown: The text, with links relative to its file in the repository.
        page: The page's place in the site.
    """
    pages = source_of_pages()
    if page not in pages:  # it was made for the site
        return markdown
    page_of = FOLDERS | {source: uri for uri, source in pages.items()}

    def on_site(match: re.Match[str]) -> str:
        code, target, anchor = match[1], match[2], match[3] or ""
        if code or "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(pages[page]), target))
        uri = page_of.get(path) or page_of.get(f"{path}/README.md")
        if uri is None and path.startswith("docs/") and not path.startswith(DECISIONS):
            uri = path.removeprefix("docs/")  # a figure; or nothing, of which mkdocs will warn
        if uri is None and (ROOT / path).is_file():
            uri = place_of_download(path)
        return match[0] if uri is None else f"]({posixpath.relpath(uri, posixpath.dirname(page))}{anchor})"

    return LINK.sub(on_site, markdown)
