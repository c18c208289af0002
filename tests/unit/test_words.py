"""What a worker process says of itself, from one end of its pipe to the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from w5xde_async.cluster.words import WordReader, WordWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its numbers belong to nothing else until the test is over."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_what_is_told_is_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    ids = list[str]()
    words, read = WordWriter(writer), WordReader(ids.append)
    words.tell_id("ab12")
    words.tell_why("a leaf has failed: \ud800\nits traceback ends in " + 5000 * "x")
    words.tell_end()
    for byte in os.read(reader, 1 << 16):
        assert not read.is_own_end(1.0)
        read.feed(bytes([byte]), 1.0)
    assert ids == ["ab12"]
    assert read.why.startswith("a leaf has failed: ? its traceback ends in xxx")
    assert read.is_own_end(1.0)


def test_whatever_else_comes_out_of_the_pipe_is_no_word() -> None:
    """A library may print before the descriptor is taken."""
    read = WordReader()
    read.feed(b"\xff ends\n\nidentity\n" + b"x" * 100_000, 1.0)
    assert not read.is_own_end(1.0)
    assert len(read._rest) < 10_000


def test_another_file_that_has_the_number_is_not_written_to(pipe: tuple[int, int], tmp_path: Path) -> None:
    """The job has closed what it has not opened, and opened what it needs."""
    words = WordWriter(pipe[1])
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, pipe[1])
    os.close(file)
    words.tell_why("over")
    words.tell_end()
    assert not (tmp_path / "log").read_bytes()


def test_nothing_is_raised_where_the_descriptor_is_closed_or_nobody_reads() -> None:
    reader, writer = os.pipe()
    words = WordWriter(writer)
    os.close(reader)
    words.tell_end()
    os.close(writer)
    words.tell_end()


def test_processes_that_the_job_starts_have_no_such_pipe(pipe: tuple[int, int]) -> None:
    """However they are started: one that lives longer would hold it, and no end would come."""
    os.set_inheritable(pipe[1], True)  # as it is where it has come from a parent
    WordWriter(pipe[1])
    asking = f"import os; os.fstat({pipe[1]})"
    found = subprocess.run([sys.executable, "-c", asking], close_fds=False, capture_output=True, text=True)
    assert "Bad file descriptor" in found.stderr


@pytest.mark.parametrize(("closed_at", "own"), [(1.0, True), (9.5, False), (None, False)])
def test_a_process_that_could_not_say_that_it_ends_is_taken_at_its_exit_code(
    closed_at: float | None, own: bool
) -> None:
    """Its own end closes the pipe too, a moment before it is known."""
    read = WordReader()
    if closed_at is not None:
        read.feed(b"", closed_at)
        read.feed(b"", 9.9)
    assert read.is_own_end(10.0) is own


def test_how_long_a_process_lasted_begins_when_it_has_loaded() -> None:
    read = WordReader()
    assert read.lasted_s(30.0) == 0.0
    read.feed(b"id a\n", 30.0)
    read.feed(b"id b\n", 50.0)  # an island's, started again
    assert read.lasted_s(60.0) == 30.0
    mute = WordReader()
    mute.feed(b"", 5.0)
    assert mute.lasted_s(60.0) == 55.0
