"""The table of items, read; its counts, as the migration pages have them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("items.txt")
HEADING = "## Different on purpose"
_WORDS = {"differs": "differ on purpose", "gpu": "need a GPU"}


class Item(NamedTuple):
    """``what`` stands in ``line`` of a document. ``state``: works, differs or gpu; ``how`` it is shown."""

    document: str
    page: str
    line: int
    what: str
    state: str
    how: str


def items(text: str | None = None) -> list[Item]:
    """The table. Raises ValueError for a line that is none of it."""
    found: list[Item] = []
    document = page = ""
    for line in (TABLE.read_text(encoding="utf-8") if text is None else text).splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            _, document, page = (part.strip() for part in line.strip("[]").split("|"))
            continue
        number, what, how = (part.strip() for part in line.split("|"))
        state, colon, rest = how.partition(": ")
        if colon and state not in _WORDS:
            raise ValueError(f"what is {state!r}? {line}")
        found.append(Item(document, page, int(number), what, state if colon else "works", rest if colon else how))
    return found


def missing(item: Item, root: Path = ROOT) -> str:
    """Why an item is not shown as it says; empty where it is."""
    if item.state == "differs":
        return "" if item.how in rows((root / "docs" / item.page).read_text(encoding="utf-8")) else "no such row"
    if item.how.startswith("python "):
        script = root / item.how.split()[1]
        return "" if script.is_file() and '__name__ == "__main__"' in script.read_text() else "no such program"
    file, _, name = item.how.partition("::")
    path = root / "tests" / file
    if not path.is_file():
        return f"no such file: {path}"
    source, tests = _read(path)
    if not (name in tests if name else any(test.startswith("test_") for test in tests)):
        return f"no such test: {name}"
    if item.state == "gpu" and "pytest.mark.gpu" not in source:
        return "not a test of GPUs"
    return ""


@cache
def _read(path: Path) -> tuple[str, frozenset[str]]:
    """A file of tests, and the names of what it defines."""
    source = path.read_text(encoding="utf-8")
    return source, frozenset(
        node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def rows(page: str) -> list[str]:
    """What the page's table of differences names in its first column."""
    table = page.partition(HEADING + "\n")[2].partition("\n## ")[0]
    return [match[1] for match in re.finditer(r"^\| ([^|]+?) \|", table, re.MULTILINE)]


def counted(found: Sequence[Item]) -> str:
    """``141 of 232 items work, 29 differ on purpose, ...``."""
    counts = Counter(item.state for item in found)
    others = [f"{counts[state]} {words}" for state, words in _WORDS.items() if counts[state]]
    return ", ".join([f"{counts['works']} of {len(found)} items work", *others])
