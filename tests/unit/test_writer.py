"""Lines and bars on a stream that somebody reads, or not, or that fails for a while."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.test_progress import START, step

from w5xde_async.telemetry.progress import Progress, ProgressConfig
from w5xde_async.telemetry.writer import Writer, flush_all, left_out, writer_for


class File(io.RawIOBase):
    """What a stream stands on: it takes what it is told to, or fails, or stands still."""

    def __init__(self) -> None:
        self.took = b""
        self.fails: list[int] = []
        self.room = 1 << 30
        self.reads = threading.Event()
        self.reads.set()
        self.stands = threading.Event()  # somebody waits in it

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.reads.is_set():
            self.stands.set()
            assert self.reads.wait(10)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.took += taken
        return len(taken)


class Stream:
    """A text stream on a ``File``, and its writer."""

    def __init__(self, **kwargs: Any) -> None:
        self.file = File()
        self.text = io.TextIOWrapper(io.BufferedWriter(self.file), encoding="utf-8")
        self.writer = Writer(self.text, **kwargs)

    def lines(self) -> list[str]:
        assert self.writer.flush()
        return self.file.took.decode().splitlines()

    def stall(self) -> None:
        """Nobody reads: a first line stands in the file."""
        self.file.reads.clear()
        self.writer.write("first")
        assert self.file.stands.wait(10)


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def fill(stream: io.TextIOWrapper) -> int:
    """A pipe that takes nothing more. How much it has."""
    os.set_blocking(stream.fileno(), False)
    count = 0
    try:
        while True:
            count += os.write(stream.fileno(), b"x" * (1 << 12))
    except BlockingIOError:
        return count


def test_lines_come_in_order_and_are_there_when_the_end_has_waited() -> None:
    stream = Stream()
    for number in range(1000):
        stream.writer.write(f"line {number}")
    assert stream.lines() == [f"line {number}" for number in range(1000)]


def test_nobody_waits_for_who_does_not_read_and_what_there_is_no_room_for_is_counted() -> None:
    stream = Stream(capacity=100, patience_s=0.0)
    stream.stall()
    for number in range(50):
        stream.writer.write(f"line {number}")
    assert not stream.writer.flush()
    stream.file.reads.set()
    stream.writer._patience_s = stream.writer._most_s = 10.0
    kept = [f"line {number}" for number in range(13)]  # of 7 characters, and from the tenth on of 8, with their ends
    assert stream.lines() == ["first", *kept, "37 lines left out: standard error was not read"]
    stream.writer.write("later")
    assert stream.lines()[-1] == "later"


def test_the_end_waits_for_who_does_not_read_once_in_all() -> None:
    stream = Stream(patience_s=0.01)
    stream.stall()
    assert not stream.writer.flush()
    assert stream.writer._patience_s == 0
    stream.file.reads.set()
    while not stream.writer.flush():
        pass
    assert stream.writer._patience_s > 0  # somebody reads


def test_a_full_disk_costs_what_was_written_meanwhile() -> None:
    stream = Stream()
    stream.file.room = 5
    stream.writer.write("abc")
    assert stream.writer.flush()
    stream.writer.write("torn")
    assert stream.writer.flush()
    stream.writer.write("lost\nlost")
    assert stream.writer.flush()
    stream.file.room = 1000
    stream.writer.write("heard")
    why = "standard error could not be written (No space left on device)"
    assert stream.lines() == ["abc", "t", f"3 lines left out: {why}", "heard"]
    assert left_out(1, why) == f"1 line left out: {why}"


def test_what_a_full_disk_has_cost_is_told_at_the_end() -> None:
    stream = Stream()
    stream.file.room = 0
    stream.writer.write("the last lines")
    assert stream.writer.flush()
    assert stream.file.took == b""
    stream.file.room = 1 << 30
    said = left_out(1, "standard error could not be written (No space left on device)")
    assert stream.lines() == [said]
    assert stream.lines() == [said]


def test_who_keeps_no_writer_is_told_too_of_what_a_full_disk_has_cost() -> None:
    stream = Stream()
    stream.file.room = 0
    writer_for(stream.text).write("lost")
    assert writer_for(stream.text).flush()
    for thread in threading.enumerate():
        if thread.name == "w5xde-writer":
            thread.join(10)
    gc.collect()
    stream.file.room = 1 << 30
    writer_for(stream.text).write("next")
    assert writer_for(stream.text).flush()
    said = left_out(1, "standard error could not be written (No space left on device)")
    assert stream.file.took.decode().splitlines() == [said, "next"]


def test_another_standard_error_of_the_same_file_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job files wrap it anew, for its encoding or to have it flushed."""
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream.text)
    writer = writer_for(stream.text)
    writer.write("before")
    assert writer.flush()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(stream.text.detach(), encoding="ascii"))
    writer.write("after · it")
    assert writer.flush()
    assert stream.file.took == b"before\nafter | it\n"
    assert writer_for(sys.stderr) is writer
    sys.stderr.close()
    monkeypatch.setattr(sys, "stderr", None)
    writer.write("nowhere")  # raises nothing


def test_writers_come_and_go_while_all_are_flushed() -> None:
    """Else a program that Ctrl-C ends would not end."""
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            writer_for(io.StringIO())

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(2000):
            flush_all()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("comes", ["before", "after"])
def test_an_interrupt_of_its_thread_s_start_loses_no_line(comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, start = Stream(), threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        if comes == "after":
            start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.writer.write("one")
    stream.writer.write("two")
    assert stream.lines() == ["one", "two"]
    assert sum(thread.name == "w5xde-writer" for thread in threading.enumerate()) <= 1


def test_a_pipe_that_somebody_has_made_non_blocking_is_waited_for(pipe: tuple[int, io.TextIOWrapper]) -> None:
    reading, stream = pipe
    count = fill(stream)
    writer = Writer(stream)
    for number in range(100):
        writer.write(f"line {number}")
    while count:
        count -= len(os.read(reading, count))
    assert writer.flush()
    assert os.read(reading, 1 << 16).decode().split("\n")[:-1] == [f"line {number}" for number in range(100)]


def test_who_reads_no_more_costs_nothing(pipe: tuple[int, io.TextIOWrapper]) -> None:
    reading, stream = pipe
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, reading)  # the pipe has no reader
    os.close(nowhere)
    writer = Writer(stream)
    writer.write("lost")
    assert writer.flush()
    stream.close()
    writer.write("lost")
    assert writer.flush()


def test_a_line_has_left_before_its_writer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the process's last, and what is printed next is to come after it."""
    monkeypatch.setattr("w5xde_async.telemetry.writer._MOMENT_S", 10.0)
    stream = Stream()
    for number in range(20):
        stream.writer.write(f"line {number}")
        assert stream.file.took.endswith(b"line %d\n" % number)


def test_whoever_does_not_read_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w5xde_async.telemetry.writer._MOMENT_S", 0.0)
    stream = Stream()
    stream.stall()
    monkeypatch.setattr("w5xde_async.telemetry.writer._MOMENT_S", 1000.0)
    stream.writer.write("second")
    stream.file.reads.set()
    assert stream.lines() == ["first", "second"]
    stream.writer.write("third")  # waited for again
    assert stream.file.took.endswith(b"third\n")


def test_of_paintings_that_wait_the_last_is_made() -> None:
    stream = Stream()
    shown = Progress(
        ProgressConfig(color=False), stream=stream.text, terminal=True, columns=lambda: 80, clock=time_of()
    )
    writer = writer_for(stream.text)
    shown(START)
    assert writer.flush()
    stream.file.reads.clear()
    shown(step(1))
    assert stream.file.stands.wait(10)
    for number in range(2, 500):
        shown(step(number))
    stream.file.reads.set()
    shown.close()
    assert writer.flush()
    painted = stream.file.took.decode().rpartition("join\n")[2]
    assert painted.count("loss") <= 4
    assert "499/1,000 · loss" in painted


def time_of() -> Any:
    """A clock by which every step is painted."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    return clock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_was_forked_writes_its_own_lines_before_it_ends(pipe: tuple[int, io.TextIOWrapper]) -> None:
    reading, stream = pipe
    count = fill(stream)  # what waits in this process is not the other's to write
    os.set_blocking(stream.fileno(), True)
    writer = writer_for(stream)
    writer.write("of the parent")
    parent, child = os.pipe()
    if not (pid := os.fork()):
        os.dup2(child, stream.fileno())
        writer.write("of the child")
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(child)
    with os.fdopen(parent, "rb") as told:
        assert told.read() == b"of the child\n"
    while count:
        count -= len(os.read(reading, count))
    assert writer.flush()
    assert os.read(reading, 1 << 16) == b"of the parent\n"


def test_without_another_thread_it_writes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = Stream()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    stream.writer.write("here")
    assert stream.file.took == b"here\n"


def test_who_keeps_what_is_printed_gets_it() -> None:
    """As experiment trackers do with standard error."""
    stream, kept = Stream().text, list[str]()
    stream.write = kept.append  # type: ignore[method-assign]
    writer = Writer(stream)
    writer.write("here")
    assert kept == ["here\n"]
    del stream.write  # type: ignore[method-assign]
    writer.write("there")
    assert writer.flush()
    stream.write = kept.append  # type: ignore[method-assign]
    writer.write("here again")
    assert kept == ["here\n", "here again\n"]


def test_a_stream_of_somebodys_own_that_fails_raises_nothing() -> None:
    class Own(io.StringIO):
        encoding = "binary"

    writer = Writer(Own())
    writer.write("lost")

    class Failing(io.StringIO):
        fails = True

        def write(self, text: str) -> int:
            if self.fails:
                raise RuntimeError("mine")
            return super().write(text)

    failing = Failing()
    writer = Writer(failing)
    writer.write("lost")
    failing.fails = False
    writer.write("heard")
    assert failing.getvalue() == "1 line left out: standard error could not be written (mine)\nheard\n"


def test_a_stream_has_one_writer() -> None:
    stream, other = Stream().text, Stream().text
    writer = writer_for(stream)
    assert writer_for(stream) is writer
    assert writer_for(other) is not writer
