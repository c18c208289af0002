"""Sphinx's settings: ``make docs`` builds docs/ with warnings as errors.

The Markdown files are written for a reader of the repository, with links to tests and to files beside docs/. Two small
rewritings make the same files a site: links that leave docs/ name a page or a file of the site, and docstrings whose
fields stand in aligned columns become definition lists.
"""

from __future__ import annotations

import re
from pathlib import Path

from pygments.lexers.special import TextLexer

import w5xde_async

ROOT = Path(__file__).resolve().parents[1]

project = "w5xde_async"
author = "the authors of w5xde_async"
release = version = w5xde_async.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
smartquotes = False  # -- stands for itself: flags
add_module_names = False

html_theme = "furo"
html_title = f"w5xde_async {version}"
html_static_path: list[str] = []
html_show_sourcelink = False
html_copy_source = False

nb_execution_mode = "off"  # docs/notebooks/make.py runs the notebook; the site shows what it printed
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

_PAGES = {
    "README.md": "start.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "benches.md",
}
_COLUMN = re.compile(r"^(?!\.\.\.|>>>)(\S+(?:,? \S+)*)\s{2,}(\S.*)$")


def inside(text: str) -> str:
    """Links of a file in docs/, for the site."""
    for outside, page in _PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)+{re.escape(outside)}", f"](/{page}", text)
    return text


def from_root(text: str, folder: str = "") -> str:
    """Links of a file that stands beside docs/, or in a folder there, and is included by a page, for the site."""
    if folder:
        text = re.sub(r"\]\((?!\.\./|\w+://|#)", f"]({folder}/", text).replace("](../", "](")
    for outside, page in _PAGES.items():
        text = text.replace(f"]({outside}", f"]({page}")
    text = text.replace("](docs/", "](")
    return re.sub(r"\]\((tests|bench|examples|src|LICENSE)", r"](../\1", text)


def definitions(lines: list[str]) -> list[str]:
    """Aligned columns of names and meanings as a definition list; the rest as it is."""
    out: list[str] = []
    column = 0
    for line in lines:
        # The longest name of a table may have a single space behind it: what it means begins at the same column.
        found = _COLUMN.match(line) or (column and re.match(rf"^(?=.{{{column - 1}}} \S)(\S+) (\S.*)$", line))
        if found:
            column = found.start(2)
            if not out or not out[-1].startswith("   "):
                out.append("")
            out += [f"``{found[1]}``", f"   {found[2]}"]
        elif column and line.startswith(" " * column):
            out.append(f"   {line.strip()}")
        else:
            if column and line.strip():
                out.append("")
            column = 0
            out.append(line)
    return out


def setup(app: object) -> None:
    def source_read(_app: object, _name: str, content: list[str]) -> None:
        content[0] = inside(content[0])

    def include_read(_app: object, path: Path, _parent: str, content: list[str]) -> None:
        folder = (ROOT / "docs" / path).resolve().parent
        if folder in (ROOT, ROOT / "bench"):
            content[0] = from_root(content[0], "" if folder == ROOT else folder.name)

    def docstring(_app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
        lines[:] = definitions(lines)

    app.add_lexer("hex", TextLexer)  # type: ignore[attr-defined]  # protocol.md's bytes
    app.connect("source-read", source_read)  # type: ignore[attr-defined]
    app.connect("include-read", include_read)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", docstring)  # type: ignore[attr-defined]
