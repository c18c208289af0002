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
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


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


def name_of(value: object) -> str:
    if isinstance(value, Example):
        return f"{value.document.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def in_folder(example: Example, folder: Path, *command: str) -> None:
    for other in EXAMPLES:
        if other.document == example.document and other.file:
            (folder / other.file).write_text(other.code, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("W5XDE_")}
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment | {"PYTHONPATH": str(folder)}, timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_python_blocks_compile(example: Example) -> None:
    ast.parse("\n" * (example.line - 1) + example.code, str(example.document))


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.runs], ids=name_of)
def test_programs_run(example: Example, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example.code, encoding="utf-8")
    in_folder(example, tmp_path, "example.py")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_readmes_job_trains_with_the_readmes_command(tmp_path: Path) -> None:
    text = DOCUMENTS[0].read_text(encoding="utf-8")
    command = "-m w5xde_async.coordinator train.py:job --workers 2"
    assert f"python {command}\n" in text
    example = next(example for example in EXAMPLES if example.document == DOCUMENTS[0] and example.file)
    in_folder(example, tmp_path, *command.split(), "--port", "0")
    files = {path.name for path in (tmp_path / "runs" / "train").iterdir()}
    assert {"checkpoints", "metrics.jsonl", "model.safetensors", "config.toml"} <= files


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_to_files_resolve(document: Path) -> None:
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    targets = [target.partition("#")[0] for target in _LINK.findall(text) if "://" not in target]
    missing = [target for target in targets if target and not (document.parent / target).exists()]
    assert not missing


def test_every_document_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in _LINK.findall(index.read_text(encoding="utf-8"))}
    assert {path for path in DOCUMENTS if path not in (index, *linked)} == set()


def test_every_promise_names_a_test_that_exists() -> None:
    table = DOCUMENTS[0].read_text(encoding="utf-8").partition("## What is promised")[2].partition("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert promises
    for promise in promises:
        paths = re.findall(r"\]\((tests/[\w/]+\.py)\)", promise)
        assert paths, promise
        assert all((ROOT / path).is_file() for path in paths), promise


def test_paths_of_code_and_tests_exist() -> None:
    for document in DOCUMENTS:
        for path in re.findall(r"`((?:tests|bench|src|examples)/[\w./-]+)`", document.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_path_of_one_machine(document: Path) -> None:
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        assert not re.search(r"(?<![\w.~])/(?:work|root|home|tmp|Users)\b", line), f"{document.name}:{number}: {line}"
