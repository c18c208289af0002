"""No error and no warning of this package leaves a facade with a flag of the command line in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.support.events import FINISHED

import w5xde_async
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.errors import LeafFailed, PortInUse, RefusalCode, Refused, StoreError, UsageError
from w5xde_async.facade.guava.config import WORDS as GUAVA
from w5xde_async.facade.w5xde import _WORDS as W5XDE
from w5xde_async.facade.words import ADVICE, Words
from w5xde_async.telemetry.events import RunFinished, Warned

SOURCE = Path(w5xde_async.__file__).parent
#: Programs, which have flags, and declarations of flags.
_PROGRAMS = ("settings", "doctor", "status.py", "process.py", "__main__.py", "facade", "wording.py")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
BOTH = pytest.mark.parametrize("words", [W5XDE, GUAVA], ids=["w5xde", "guava"])


@cache
def texts() -> tuple[str, ...]:
    """Every string of the rooms below that a person may read, its holes filled with a name."""
    rooms = [path for path in sorted(SOURCE.rglob("*.py")) if not set(path.relative_to(SOURCE).parts) & set(_PROGRAMS)]
    return tuple(text for path in rooms for text in _texts_of(path))


def _texts_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "64" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in inside | documents:
                yield node.value


@pytest.mark.slow
def test_there_are_flags_in_what_the_rooms_say() -> None:
    assert sum(bool(_FLAG.search(text)) for text in texts()) > 40


@pytest.mark.slow
@BOTH
def test_no_flag_is_left(words: Words) -> None:
    left = [text for text in map(words, texts()) if _FLAG.search(text)]
    assert not left


@pytest.mark.parametrize(
    ("words", "theirs", "ours"),
    [
        (W5XDE, "another model; --resume never starts afresh", 'another model; resume="never" starts afresh'),
        (W5XDE, "choose another --run-dir", "choose another checkpoint_dir"),
        (GUAVA, "raise --max-steps or --epochs", "raise num_epochs"),
        (GUAVA, "--silence 3s is not longer than --heartbeat 5s",
         'ack_timeout=3s is not longer than resend_probe_interval=5s'),
        (W5XDE, "prefetch_leaves is 0; give a whole number >= 1", "queue_size is 0; give a whole number >= 1"),
        (GUAVA, "job Job: epochs is 0; give a whole number >= 1", "job Job: num_epochs is 0; give a whole number >= 1"),
        (W5XDE, "raise --memory-limit", "raise memory_limit_bytes of w5xde_async.WorkerConfig"),
        (GUAVA, "workers need --job: the step cannot be made a program: x",
         'NetworkWorkers cannot compute it, mode="local" can: the step cannot be made a program: x'),
        (W5XDE, "workers need --job: x", "workers without the model's code cannot compute it: x"),
        (GUAVA, "use --durability checkpoint", "use durability of w5xde_async.CoordinatorConfig (checkpoint)"),
        (W5XDE, "(--host 0.0.0.0 lets others in)", '(ip="0.0.0.0" lets others in)'),
        (W5XDE, "a well-known a---b", "a well-known a---b"),
    ],
)  # fmt: skip
def test_in_whose_words(words: Words, theirs: str, ours: str) -> None:
    assert words(theirs) == ours


def test_errors_keep_their_type_and_fields() -> None:
    with pytest.raises(PortInUse, match=r"another port \(0") as taken, W5XDE.said():
        raise PortInUse("here", 5555)
    assert (taken.value.host, taken.value.port) == ("here", 5555)
    with pytest.raises(StoreError) as full, GUAVA.said():
        raise StoreError("there", "the disk is full; choose another --run-dir")
    assert full.value.reason == "the disk is full; choose another checkpoint_dir"
    with pytest.raises(Refused) as refused, GUAVA.said():
        raise Refused(RefusalCode.AUTHENTICATION, "no token", "set it in W5XDE_TOKEN or --token-file")
    assert refused.value.hint == "set it in token= or W5XDE_TOKEN"
    assert str(refused.value).endswith(refused.value.hint)
    with pytest.raises(LeafFailed, match="my --resume never"), GUAVA.said():
        raise LeafFailed(1, 2, [3], 4, "ValueError: my --resume never")
    with pytest.raises(ValueError, match="--resume never"), GUAVA.said():
        raise ValueError("--resume never")


def test_of_a_traceback_what_this_package_advises_is_said_in_these_words_and_no_more() -> None:
    told = f"ValueError: my --resume never, too; leaf 0 has 1 sample: {ADVICE}"
    for words, advice in ((W5XDE, "choose another batch_size"), (GUAVA, "give the DataLoader drop_last=True")):
        with pytest.raises(LeafFailed, match="my --resume never") as failed, words.said():
            raise LeafFailed(1, 2, [3], 4, told)
        for text in (str(failed.value), failed.value.traceback):
            assert f"1 sample: {advice}" in text
            assert "microbatch_size" not in text
        shown = words.of_event(replace(FINISHED, outcome="failed", reason=told))
        assert isinstance(shown, RunFinished)
        assert "my --resume never" in shown.reason
        assert f"1 sample: {advice}" in shown.reason


def test_events_and_results_too() -> None:
    event = GUAVA.of_event(Warned(text="start with --resume never"))
    assert isinstance(event, Warned)
    assert event.text == 'start with resume="never"'
    ended = GUAVA.of_result(RunResult(outcome="finished", reason="raise --epochs", step=1, loss=None))
    assert ended.reason == "raise num_epochs"


def test_the_caller_gets_usage_errors_as_they_are_caught() -> None:
    @W5XDE.said()
    def call(value: int) -> int:
        if value:
            raise UsageError("host is 5; give a host name")
        return value

    assert call(0) == 0
    with pytest.raises(UsageError, match=r"^ip is 5; give a host name$"):
        call(1)
