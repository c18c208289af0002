"""What errors say: the cause in the first line, both ends of a traceback."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from w5xde_async.compute.batch import flatten
from w5xde_async.compute.engine import LeafError
from w5xde_async.errors import (
    _PACKAGE,
    JobError,
    LeafFailed,
    UpdateFailed,
    W5xdeError,
    _frames,
    causes,
    headline,
    in_one_line,
    shortened,
    users_frames,
)
from w5xde_async.telemetry.wording import clean


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return LeafFailed.shown(caught.value)


def chained() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        raise KeyError("labels") from error


def test_what_an_error_came_of_is_told_once() -> None:
    ring, last, hidden = ValueError("ring"), OSError("last"), OSError("hidden")
    ring.__cause__ = ring
    assert [*causes(ring)] == [ring]
    first, second = KeyError("first"), KeyError("second")
    first.__context__, second.__cause__, last.__cause__ = second, last, first
    assert [*causes(first)] == [first, second, last]
    hidden.__context__, hidden.__suppress_context__ = first, True
    assert [*causes(hidden)] == [hidden]


def deep(depth: int) -> None:
    if depth % 2:
        return deep(depth - 1)
    if not depth:
        raise OverflowError("at the bottom")
    return deep(depth - 1)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (chained, r"KeyError: 'labels' \(test_errors.py:\d+\)"),
        (lambda: json.loads("{"), r"json.decoder.JSONDecodeError: Expecting .* \(test_errors.py:\d+\)"),
        (lambda: nn.Linear(2, 2)(torch.ones(1, 3)), r"RuntimeError: mat1 and mat2 .* \(test_errors.py:\d+\)"),
        (lambda: deep(400), r"OverflowError: at the bottom \(test_errors.py:\d+\)"),
        (lambda: deep(10_000), r"RecursionError: .* \(test_errors.py:\d+\)"),
    ],
    ids=["chained", "library", "torch", "deep", "endless"],
)
def test_a_headline_names_what_was_raised_and_the_callers_own_line(call: Callable[[], object], line: str) -> None:
    assert re.fullmatch(line, headline(raised(call)))


@pytest.mark.parametrize("call", [lambda: nn.Linear(2, 2)(torch.ones(1, 3)), chained])
def test_an_error_that_was_caught_is_told_alike(call: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    assert in_one_line(caught.value) == headline(raised(call))


def test_no_place_is_named_where_this_package_raised_it() -> None:
    """A line of its own, or of the thread that called it, is nobody's to mend."""
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(flatten, {"x": object()}).exception()
    assert error is not None
    assert in_one_line(error) == f"TypeError: {error}"
    assert headline(LeafFailed.shown(error)) == f"TypeError: {error}"


def test_bytes_that_are_no_text_are_in_no_text_of_an_error() -> None:
    """As in the name of a file from an old archive."""

    def read() -> None:
        raise ValueError(f"cannot read {os.fsdecode(bytes([0x63, 0xE9]))}.txt: é")

    told = raised(read)
    with pytest.raises(ValueError, match="cannot read") as caught:
        read()
    texts = [
        told, in_one_line(caught.value), str(W5xdeError(str(caught.value))), str(JobError("a", str(caught.value))),
        str(LeafFailed(1, 2, [3], 1, f"{told}{caught.value}")), str(UpdateFailed(1, caught.value, told)),
        LeafError(0, caught.value).error,
    ]  # fmt: skip
    for text in texts:
        assert "cannot read c?.txt: é" in text
        text.encode()


def test_the_headline_of_a_failed_leaf() -> None:
    def decode() -> None:
        raise ValueError("corrupt JPEG")

    number = decode.__code__.co_firstlineno + 1
    told = raised(decode)
    line = f"step 8, leaf 3: ValueError: corrupt JPEG (test_errors.py:{number}), "
    assert str(LeafFailed(8, 3, [57], 1, told)).splitlines()[0] == line + "sample 57"
    assert str(LeafFailed(8, 3, [4, 57], 1, told, sample=57)).splitlines()[0] == line + "sample 57"
    many = str(LeafFailed(8, 3, list(range(100)), 3, told)).splitlines()[0]
    assert many == line + "samples 0, 1, 2, 3, 4, 5, 6, 7, ... (100 in all)"
    update = str(UpdateFailed(8, ValueError("no"), told)).splitlines()[0]
    assert update == f"the update after step 8 raised ValueError: no (test_errors.py:{number})"


def test_an_error_of_this_package_is_not_told_as_the_jobs() -> None:
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(flatten, {"x": object()}).exception()
    assert isinstance(error, TypeError)
    told = str(UpdateFailed(8, error, LeafFailed.shown(error))).splitlines()[0]
    words = "in w5xde-async itself, not in the job's code"
    assert re.fullmatch(
        rf"the update after step 8 raised TypeError: {re.escape(str(error))} {words} \(\w+[/\\]\w+\.py:\d+\)", told
    )


def test_a_long_traceback_loses_its_middle() -> None:
    told = raised(lambda: exec("x = 0\n" * 300 + "raise ValueError('y' * 20_000 + ' the end')"))
    assert len(told) < 9000
    assert told.startswith("Traceback (most recent call last):\n")
    assert told.endswith(" the end\n")
    assert "characters left out)" in told
    assert headline(told).startswith("ValueError: yyy")


@pytest.mark.parametrize("length", [99, 100, 101, 5000])
def test_what_is_cut_keeps_both_ends(length: int) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(length))
    kept = clean(text, limit=100)
    assert kept[:50] == text[:50]
    assert kept[-50:] == text[-50:]
    assert ("…" in kept) == (length > 100)
    short = shortened(text, 100)
    assert (short == text) == (length <= 100)
    assert short.endswith(text[-60:])


def test_the_users_frames_alone_are_shown() -> None:
    """Those of torch, of Python's threads and of this package say nothing to whoever wrote the job."""
    told = UpdateFailed(3, ValueError("mine"), _UPDATE).args[0]
    shown = users_frames(told)
    assert shown.splitlines() == [
        "the update after step 3 raised ValueError: mine (train.py:25)",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 25, in step',
        '    raise ValueError("mine")',
        "ValueError: mine",
    ]
    nobody = users_frames(told.replace("/home/me/", "/x/lib/python3.11/site-packages/"))
    assert [path.rpartition("/")[2] for path, _ in _frames(nobody.splitlines())] == [
        "thread.py",
        "optimizer.py",
        "train.py",
    ]
    chain = raised(chained)
    assert users_frames(chain).count("Traceback (most recent call last)") == 2
    assert "json/decoder.py" in chain
    assert "json/decoder.py" not in users_frames(chain)


_UPDATE = f"""\
Traceback (most recent call last):
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58, in run
    result = self.fn(*self.args, **self.kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{_PACKAGE}updates/sync.py", line 159, in apply
    self.optimizer.step()
  File "/x/site-packages/torch/optim/optimizer.py", line 530, in wrapper
    out = func(*args, **kwargs)
  [Previous line repeated 2 more times]
  File "/home/me/train.py", line 25, in step
    raise ValueError("mine")
ValueError: mine
"""
