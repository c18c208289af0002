"""README and docs hold: examples compile and run, links and test paths resolve, no path of one machine stands there.

A block ```` ```python ```` must compile. One marked ``file=NAME`` is also written beside the programs of its document;
one marked ``run`` is such a program: it is run in a process of its own.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support import forking

import w5xde_async
from w5xde_async import errors

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Pages that only include a file which the index names itself.
INCLUDED = {"start.md", "security.md", "changelog.md", "contributing.md", "benches.md"}


class Example(NamedTuple):
    """One python block. ``file`` is where it is written to, ``runs`` whether it is a program."""

    document: Path
    line: int
    file: str
    runs: bool
    code: str


def _examples() -> list[Example]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            marks = block[1].split()
            file = next((mark.removeprefix("file=") for mark in marks if mark.startswith("file=")), "")
            line = text.count("\n", 0, block.start()) + 2
            found.append(Example(document, line, file, "run" in marks, block[2]))
    return found


EXAMPLES = _examples()
#: README.md's are run by tests/newcomer.py.
PROGRAMS = [example for example in EXAMPLES if example.runs and example.document != DOCUMENTS[0]]


def name_of(value: object) -> str:
    if isinstance(value, Example):
        return f"{value.document.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
    places = [str(Path(forking.PYTHON).parent), kept.get("PATH", "")]
    if forking.running is not None:
        places.insert(0, str(forking.running.commands))
    return kept | {"PATH": os.pathsep.join(places)}


def write_files(document: Path, folder: Path) -> None:
    """What stands in the document's ``file=`` blocks."""
    for example in EXAMPLES:
        if example.document == document and example.file:
            (folder / example.file).write_text(example.code, encoding="utf-8")


def test_python_blocks_compile() -> None:
    for example in EXAMPLES:
        ast.parse("\n" * (example.line - 1) + example.code, str(example.document))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("example", PROGRAMS, ids=name_of)
def test_programs_run(example: Example, tmp_path: Path) -> None:
    write_files(example.document, tmp_path)
    (tmp_path / "example.py").write_text(example.code, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert "Traceback" not in ended.stdout  # of a subscriber, say, which ends no run


def test_documents_have_programs() -> None:
    assert len(PROGRAMS) > 5


def test_links_to_files_resolve() -> None:
    for document in DOCUMENTS:
        text = _FENCED.sub("", document.read_text(encoding="utf-8"))
        targets = [target.partition("#")[0] for target in _LINK.findall(text) if "://" not in target]
        missing = [target for target in targets if target and not (document.parent / target).exists()]
        assert not missing, name_of(document)


def test_every_document_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in _LINK.findall(index.read_text(encoding="utf-8"))}
    missing = {path.name for path in DOCUMENTS if path not in (index, *linked)}
    assert missing - INCLUDED == set()


def test_every_page_is_in_a_table_of_contents() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    entries = {line for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
               for line in block.splitlines() if not line.startswith(":")}  # fmt: skip
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - entries == {"index"}


def test_the_exit_codes_and_exceptions_are_the_codes() -> None:
    first, second = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8").split("In Python", 1)
    assert re.findall(r"^\| (\d+) \|", first, re.MULTILINE) == [str(int(code)) for code in errors.ExitCode]
    named = {name for row in re.findall(r"^\| (`.*?) \|", second, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 5
    assert named <= set(vars(errors))


def test_the_public_names_are_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. auto(?:class|exception):: (\w+)$", text, re.MULTILINE))
    assert shown == set(w5xde_async.__all__) - {"__version__"}


def test_what_the_documents_import_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. auto(?:class|function):: (w5xde_async\.[\w.]+)$", text, re.MULTILINE))
    shown |= {f"w5xde_async.{name}" for name in w5xde_async.__all__}
    modules = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", text, re.MULTILINE))
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert module == "w5xde_async.hf" or hasattr(import_module(module), attribute), name
    for example in EXAMPLES:
        for node in ast.walk(ast.parse(example.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("w5xde_async"):
                missing = {f"{node.module}.{alias.name}" for alias in node.names} - shown
                assert not missing or node.module in modules, f"{name_of(example)}: {missing}"


def test_every_promise_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    table = page.partition("## What is promised")[2].partition("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert promises
    for promise in promises:
        paths = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", promise)
        assert paths, promise
        assert all((ROOT / path).is_file() for path in paths), promise


def test_paths_of_code_and_tests_exist() -> None:
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:tests|bench|src|examples)/[\w./-]+)`", document.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_no_path_of_one_machine() -> None:
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
            assert not re.search(r"(?<![\w.~])/(?:work|root|home|tmp|Users)\b", line), f"{document}:{number}: {line}"
