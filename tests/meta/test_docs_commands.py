"""Every command in the documents is one that works: it is run, or read by the very parser that would read it.

Blocks ```` ```sh run ```` are run by bash, in order, one folder for each document (README.md's: tests/newcomer.py).
In all other ```` ```sh ```` blocks, which tests/process/test_documents.py and test_facades.py play as processes, and in
commands within text (`` `pytest ...` ``), programs of this package are parsed with their arguments, scripts and tests
must exist and know their flags, make must know its targets. Flags that are named in text must exist somewhere.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.meta.test_docs import DOCUMENTS, ROOT, environment, name_of, write_files

from w5xde_async import memory, status
from w5xde_async.errors import UsageError
from w5xde_async.facade.guava.workers import network_worker as guava
from w5xde_async.launch import program as launch
from w5xde_async.settings import PROGRAMS as KINDS
from w5xde_async.settings import Answer, flag_names, read
from w5xde_async.settings.programs import DoctorSettings, PredictionSettings, TuningSettings

_BLOCK = re.compile(r"^```(?:sh|bash|console)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
README = DOCUMENTS[0]
PROGRAMS = {program.table: program for program in KINDS} | {
    "doctor": DoctorSettings, "predict": PredictionSettings, "tune": TuningSettings,
}  # fmt: skip
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FLAGS = {flag for program in PROGRAMS.values() for flag in flag_names(program)}
FLAGS |= {flag for one in (status, memory, launch) for flag in one.parser("")._option_string_actions}
#: Commands that are not ours: nothing about them is checked but that somebody put them here on purpose.
FOREIGN = {
    ".",
    "scp",
    "chmod",
    "kill",
    "cd",
    "git",
    "uvicorn",
    "kubectl",
    "ray",
    "pip",
    "wait",
    "until",
    "done",
    "cat",
    "source",
    "export",
}
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("bench", "tests", "docs", "src")
    for path in (ROOT / folder).rglob("*.py")
)


class Block(NamedTuple):
    """One shell block. ``runs``: bash is to run it."""

    document: Path
    line: int
    runs: bool
    text: str


BLOCKS = [
    Block(document, text.count("\n", 0, found.start()) + 1, "run" in found[1].split() and document != README, found[2])
    for document in DOCUMENTS
    for text in [document.read_text(encoding="utf-8")]
    for found in _BLOCK.finditer(text)
]


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell text, as words."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        command: list[str] = []
        for word in [*words, ";"]:
            if word.rstrip(";") in ("&", "&&", "||", "|", "") or word.endswith(";"):
                command += [word.rstrip(";&|")] if word.rstrip(";&|") else []
                if command:
                    found.append(command)
                command = []
            else:
                command.append(word)
    return found


def check(words: list[str]) -> None:
    """Raises AssertionError, or UsageError, where a command could not work."""
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*|flock|-x|time", words[0]):
        words = words[1:]
    first, rest = words[0], words[1:]
    if first == "python" and rest[:1] == ["-m"]:
        module, rest = rest[1], rest[2:]
        if module.startswith("w5xde_async."):
            parse(module.removeprefix("w5xde_async."), rest)
        elif module == "pytest":
            check(["pytest", *rest])
        elif module.startswith("tests."):
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
        else:
            assert module in ("venv", "pip"), f"python -m {module}"
    elif first == "python" and rest[0].endswith(".py"):
        script = ROOT / rest[0]
        assert script.is_file(), rest[0]
        known = (
            SOURCES if script.parent.name == "bench" else script.read_text(encoding="utf-8")
        )  # bench/report.py's too
        for flag in (word.partition("=")[0] for word in rest[1:] if word.startswith("--")):
            assert f'"{flag}"' in known, f"{rest[0]} has no {flag}"
    elif first == "w5xde":
        parse(rest[0], rest[1:])
    elif first == "make":
        for word in rest:
            assert word in TARGETS or re.match(r"[A-Z_]+=", word), f"make {word}"
    elif first == "pytest":
        for word in rest:
            assert not word.startswith("tests/") or (ROOT / word.partition("::")[0]).exists(), word
    else:
        assert first in FOREIGN, f"{first!r} is neither ours nor known"


def parse(program: str, arguments: list[str]) -> None:
    given = [argument for argument in arguments if argument != "..."]
    if program == "launch":
        if given:  # not the program's name and no more
            launch.parse(given, program)
        return
    if program in ("status", "memory"):
        (status if program == "status" else memory).parser(program).read(given)
        return
    if program in ("facade.guava", "facade.guava.workers.network_worker"):
        guava.parser().parse_args(given)
        return
    assert program in PROGRAMS, program
    if not given:  # the program's name and no more
        return
    try:
        read(PROGRAMS[program], given, prog=program)
    except Answer:
        pass


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("W5XDE_")]:
        monkeypatch.delenv(name)


def test_commands_are_such_as_work() -> None:
    wrong = []
    for document in DOCUMENTS:
        text = _FENCED.sub("", document.read_text(encoding="utf-8"))
        inline = [found for found in _INLINE.findall(text) if re.match(r"(python|pytest|make|w5xde) ", found)]
        blocks = [block.text for block in BLOCKS if block.document == document and not block.runs]
        for command in (words for part in [*blocks, *inline] for words in commands(part)):
            try:
                check(command)
            except (AssertionError, UsageError) as error:
                wrong.append(f"{name_of(document)}: {shlex.join(command)}: {error}")
    assert not wrong


def test_flags_named_in_text_exist() -> None:
    refused = {"--token", "--compensation"}  # said to be missing: refused with the reason, and gone
    for document in DOCUMENTS:
        text = _FENCED.sub("", document.read_text(encoding="utf-8"))
        named = {flag for code in _INLINE.findall(text) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", code)}
        unknown = {flag for flag in named if flag not in FLAGS | refused and f'"{flag}"' not in SOURCES}
        assert not unknown, name_of(document)


def test_the_readme_is_followed_in_continuous_integration() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make newcomer" in script
    follow = runpy.run_path(str(ROOT / "tests" / "newcomer.py"))["script"]
    text = README.read_text(encoding="utf-8")
    followed = follow(text)
    for block in _BLOCK.finditer(text):
        if block[1].split() == ["ci"]:  # what continuous integration runs anyhow
            assert re.search(rf"^make .*\b{block[2].split()[-1]}\b", script, re.MULTILINE)
            continue
        assert "run" in block[1].split(), f"not run: {block[2]}"
        assert block[2].strip() in followed
    with pytest.raises(ValueError, match="no block"):
        follow("nothing to do")


PAGE = """\
```python file=said.txt
one 'quoted' $HOME
```
```sh run
cp said.txt kept.txt
NAME=kept
```
```sh
exit 9
```
```sh run background
BESIDE
```
```sh run elsewhere copy=join
cat join > got.txt
```
"""


@pytest.mark.parametrize(("beside", "code"), [("echo there > join", 0), ("exit 3", 1), ("echo > join; false", 1)])
def test_a_page_is_followed_until_something_fails(tmp_path: Path, beside: str, code: int) -> None:
    follow = runpy.run_path(str(ROOT / "tests" / "newcomer.py"))["script"]
    clone = tmp_path / "clone"
    clone.mkdir()
    ended = subprocess.run(
        ["bash", "-c", follow(PAGE.replace("BESIDE", beside)) + 'test "$NAME" = kept\n'],
        cwd=clone, capture_output=True, text=True, check=False, timeout=15,
    )  # fmt: skip
    assert bool(ended.returncode) is bool(code), ended.stdout + ended.stderr
    assert (clone / "kept.txt").read_text() == "one 'quoted' $HOME\n"
    if not code:
        assert (tmp_path / "elsewhere" / "got.txt").read_text() == "there\n"


@pytest.mark.parametrize(
    "command",
    [
        "python -m w5xde_async.coordinator train.py:job --most-workers 2",
        "python -m w5xde_async.worker --server",
        "w5xde conductor",
        "make everything",
        "python bench/nothing.py",
        "python bench/churn.py --unheard-of",
        "pytest tests/unit/test_nothing.py",
        "wget example.org",
    ],
)
def test_the_check_sees_what_would_not_work(command: str) -> None:
    with pytest.raises((AssertionError, UsageError)):
        check(commands(command)[0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("document", sorted({block.document for block in BLOCKS if block.runs}), ids=name_of)
def test_shell_blocks_run(document: Path, tmp_path: Path) -> None:
    write_files(document, tmp_path)
    settings = {"OMP_NUM_THREADS": "1"}
    if "--join-file" not in document.read_text(encoding="utf-8"):
        settings["W5XDE_CODE_FREE"] = "false"  # making a program costs seconds, and no worker there asks for one
    script = "\n".join(block.text for block in BLOCKS if block.document == document and block.runs)
    running = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment() | settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = running.communicate(timeout=110)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        output, _ = running.communicate()
    assert running.returncode == 0, output
