"""The journal gives back every durable step, drops a torn end, and refuses what no crash explains."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.simulator.disk import Disk, HostFilesystem

from w5xde_async.errors import CheckpointCorrupt, StoreError, UsageError
from w5xde_async.store import failpoints
from w5xde_async.store.failpoints import FAILPOINTS, arm, disarm, failpoint
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.journal import Entry, Gap, Journal, Position, Replay
from w5xde_async.store.state import JSON

RUN, FINGERPRINT = "0123456789abcdef", "ab" * 16


class Crash(BaseException):
    """The process dies here."""


class MortalFilesystem(Filesystem):
    """Dies before call number ``die_at``. ``power_cut`` then spoils what was not made durable, each file as told."""

    def __init__(self, die_at: int = 1 << 60) -> None:
        self.calls = 0
        self._die_at = die_at
        self._files: list[BinaryIO] = []
        self._durable: dict[int, int] = {}  # inode -> bytes that a power cut leaves
        self._names: dict[Path, list[Callable[[], None]]] = {}

    def _tick(self) -> None:
        if self.calls >= self._die_at:
            for file in self._files:
                file.close()
            raise Crash
        self.calls += 1

    def make_directory(self, path: Path) -> None:
        self._tick()
        super().make_directory(path)
        self._names.setdefault(path.parent, []).append(lambda: shutil.rmtree(path, ignore_errors=True))

    def create(self, path: Path) -> BinaryIO:
        self._tick()
        # A kill takes what is in a buffer with it; what is written stays.
        file: BinaryIO = path.open("xb", buffering=0)  # type: ignore[assignment]
        self._files.append(file)
        self._durable[os.fstat(file.fileno()).st_ino] = 0
        self._names.setdefault(path.parent, []).append(lambda: path.unlink(missing_ok=True))
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._tick()
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._tick()
        super().sync(file)
        status = os.fstat(file.fileno())
        self._durable[status.st_ino] = status.st_size

    def sync_file(self, path: Path) -> None:
        self._tick()
        super().sync_file(path)
        status = path.stat()
        self._durable[status.st_ino] = status.st_size

    def rename(self, source: Path, target: Path) -> None:
        self._tick()
        super().rename(source, target)
        self._names.setdefault(target.parent, []).append(lambda: target.exists() and os.replace(target, source))

    def sync_directory(self, path: Path) -> None:
        self._tick()
        super().sync_directory(path)
        self._names.pop(path, None)

    def remove(self, path: Path) -> None:
        self._tick()
        super().remove(path)

    def power_cut(self, directory: Path, spoil: Callable[[bytes], bytes]) -> None:
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            durable = self._durable.get(path.stat().st_ino)
            content = path.read_bytes()
            if durable is not None and durable < len(content):
                path.write_bytes(content[:durable] + spoil(content[durable:]))
        for undos in self._names.values():
            for undo in reversed(undos):
                undo()


def nothing(lost: bytes) -> bytes:
    return b""


def half(lost: bytes) -> bytes:
    return lost[: len(lost) // 2]


def zeros(lost: bytes) -> bytes:
    return bytes(len(lost))


def first_page_lost(lost: bytes) -> bytes:
    """The disk wrote later pages first: whole records behind a hole."""
    return bytes(min(20, len(lost))) + lost[20:]


SPOILS = [None, nothing, half, zeros, first_page_lost]


class FullFilesystem(Filesystem):
    """While ``fails`` is set, the named call raises ENOSPC after half of its work."""

    def __init__(self) -> None:
        self.fails = ""

    def _check(self, name: str) -> None:
        if self.fails == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def create(self, path: Path) -> BinaryIO:
        self._check("create")
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        if self.fails == "write":
            super().write(file, memoryview(data)[: len(data) // 2])
            file.flush()
        self._check("write")
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._check("sync")
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._check("rename")
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._check("sync_directory")
        super().sync_directory(path)

    def remove(self, path: Path) -> None:
        self._check("remove")
        super().remove(path)


def entry(step: int) -> Entry:
    data = struct.pack("<8I", *range(step, step + 8))
    meta: dict[str, JSON] = {"step": step, "loss": step + 0.5}
    return Entry(step=step, meta=meta, data=[memoryview(data[:12]), memoryview(data[12:])])


def journal(directory: Path, filesystem: Filesystem | None = None) -> Journal:
    return Journal(directory / "journal", run_id=RUN, fingerprint=FINGERPRINT, filesystem=filesystem)


def segment(directory: Path, sequence: int) -> Path:
    return directory / "journal" / f"segment-{sequence:09d}"


def steps(directory: Path, after: int = 0, position: Position | None = None) -> tuple[list[int], Replay]:
    """The steps that a new start reads; each one's content is checked."""
    replay, found = Replay(after), []
    for read in journal(directory).read(after, position, replay):
        expected = entry(read.step)
        assert read.meta == expected.meta
        assert b"".join(read.data) == b"".join(expected.data)
        found.append(read.step)
    assert replay.step == (found[-1] if found else after)
    return found, replay


def write(
    directory: Path, first: int, last: int, *, term: int = 1, rotate: tuple[int, ...] = ()
) -> dict[int, Position]:
    """Go on as a new start does, append steps ``first`` to ``last``; the positions by step."""
    directory.mkdir(exist_ok=True)
    made = journal(directory)
    replay = Replay(0)
    for _ in made.read(0, None, replay):
        pass
    positions = {first - 1: made.begin(first - 1, term, replay)}
    for step in range(first, last + 1):
        made.append(entry(step))
        made.sync()
        if step in rotate:
            positions[step] = made.rotate(step)
    made.close()
    return positions


def test_steps_come_back_through_terms_and_segments(tmp_path: Path) -> None:
    positions = write(tmp_path, 1, 5, rotate=(2, 4))
    positions |= {step + 100: place for step, place in write(tmp_path, 6, 7, term=2).items()}
    assert steps(tmp_path) == ([1, 2, 3, 4, 5, 6, 7], Replay(7))
    assert steps(tmp_path, 3) == ([4, 5, 6, 7], Replay(7))
    assert steps(tmp_path, 4, positions[4]) == ([5, 6, 7], Replay(7))
    assert steps(tmp_path, 7) == ([], Replay(7))
    assert steps(tmp_path, 9) == ([], Replay(9))  # a later checkpoint counts
    assert journal(tmp_path).newest_term == 2
    assert [positions[step].sequence for step in (0, 2, 4, 105)] == [1, 2, 3, 4]


def test_there_is_nothing_at_first(tmp_path: Path) -> None:
    made = journal(tmp_path)
    assert not made.exists
    assert made.newest_term == 0
    assert made.set_aside() is None
    assert steps(tmp_path) == ([], Replay(0))


def test_steps_follow_each_other(tmp_path: Path) -> None:
    made = journal(tmp_path)
    made.begin(0, 1)
    made.append(entry(1))
    with pytest.raises(ValueError, match="step 3 does not follow step 1"):
        made.append(entry(3))
    made.close()


def test_a_tail_cut_at_any_byte_is_dropped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    whole = segment(tmp_path, 1).stat().st_size
    shutil.rmtree(tmp_path / "journal")
    write(tmp_path, 1, 3)
    content = segment(tmp_path, 1).read_bytes()
    for length in range(whole, len(content)):
        segment(tmp_path, 1).write_bytes(content[:length])
        assert steps(tmp_path) == ([1, 2], Replay(2, torn_bytes=length - whole))
        # The run goes on behind it, and the torn bytes are in nobody's way.
        write(tmp_path, 3, 4, term=2)
        assert steps(tmp_path)[0] == [1, 2, 3, 4]
        segment(tmp_path, 2).unlink()


@pytest.mark.slow
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In the last record it is a torn end; anywhere before it a later record, or the next segment, knows better."""
    write(tmp_path, 1, 3)
    write(tmp_path, 4, 6, term=2)
    for sequence in (1, 2):
        path = segment(tmp_path, sequence)
        content = path.read_bytes()
        dropped, reasons = 0, set()
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            try:
                found, replay = steps(tmp_path)
            except CheckpointCorrupt as error:
                reasons.add(str(error))
            else:
                assert (sequence, found) == (2, [1, 2, 3, 4, 5])
                assert replay.torn_bytes
                dropped += 1
        path.write_bytes(content)
        assert reasons
        assert bool(dropped) == (sequence == 2)
    assert steps(tmp_path)[0] == [1, 2, 3, 4, 5, 6]


def test_a_whole_batch_that_was_never_durable_is_a_torn_end(tmp_path: Path) -> None:
    made = journal(tmp_path)
    made.begin(0, 1)
    made.append(entry(1))
    made.sync()
    made.append(entry(2))
    made.append(entry(3))
    made.close()
    path = segment(tmp_path, 1)
    content = bytearray(path.read_bytes())
    size = (len(content) - content.index(b"W5XJ")) // 3
    for damaged, expected in ((2, [1]), (3, [1, 2])):  # the damaged record, and what is left
        spoiled = bytearray(content)
        spoiled[len(content) - (4 - damaged) * size + 20] ^= 1
        path.write_bytes(spoiled)
        assert steps(tmp_path) == (expected, Replay(expected[-1], torn_bytes=(4 - damaged) * size))
    spoiled = bytearray(content)
    spoiled[len(content) - 3 * size + 20] ^= 1  # record 1 was durable when record 2 was written
    path.write_bytes(spoiled)
    with pytest.raises(CheckpointCorrupt, match="the record after step 0"):
        steps(tmp_path)


def test_what_a_killed_process_left_is_durable_before_it_is_built_upon(tmp_path: Path) -> None:
    """A record that was written and not synced is read after a kill; a power cut later must not take it away."""
    filesystem = MortalFilesystem()
    killed = journal(tmp_path, filesystem)
    killed.begin(0, 1)
    killed.append(entry(1))
    following, replay = journal(tmp_path, filesystem), Replay(0)
    assert [found.step for found in following.read(0, None, replay)] == [1]
    following.begin(1, 2, replay)
    filesystem.power_cut(tmp_path, nothing)
    assert steps(tmp_path)[0] == [1]
    killed.close()
    following.close()


@pytest.mark.parametrize("sequence", [1, 2, 3, 4])
def test_a_missing_segment_is_refused(tmp_path: Path, sequence: int) -> None:
    positions = write(tmp_path, 1, 6, rotate=(2, 4))
    positions |= write(tmp_path, 7, 8, term=2)
    segment(tmp_path, sequence).unlink()
    if sequence == 4:  # the last one of a term: who stored the term knows
        assert steps(tmp_path)[0] == [1, 2, 3, 4, 5, 6]
        assert journal(tmp_path).newest_term == 1
        return
    with pytest.raises(CheckpointCorrupt, match="missing"):
        steps(tmp_path)
    if sequence < 3:  # not needed from there on
        assert steps(tmp_path, 4, positions[4])[0] == [5, 6, 7, 8]
    else:
        with pytest.raises(CheckpointCorrupt, match="segment 3 is missing"):
            steps(tmp_path, 4, positions[4])


def test_segments_of_others_are_refused(tmp_path: Path) -> None:
    positions = write(tmp_path, 1, 4, rotate=(2,))
    write(tmp_path / "other", 1, 3, rotate=(1,))
    with pytest.raises(CheckpointCorrupt, match="the checkpoint's"):
        steps(tmp_path / "other", 2, positions[2])
    other = Journal(tmp_path / "journal", run_id="f" * 16, fingerprint=FINGERPRINT)
    with pytest.raises(CheckpointCorrupt, match="and this is run ffff"):
        list(other.read(0, None, Replay(0)))
    made = journal(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "journal")
    made.begin(0, 1)
    made.append(Entry(step=1, meta={"another": 1}, data=[]))
    made.rotate(1)
    made.close()
    shutil.copy(segment(tmp_path / "other", 2), segment(tmp_path, 2))
    with pytest.raises(CheckpointCorrupt):
        steps(tmp_path)
    shutil.copy(segment(tmp_path, 1), segment(tmp_path, 2))
    with pytest.raises(CheckpointCorrupt, match="under another name"):
        steps(tmp_path)


def test_a_newer_format_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("w5xde_async.store.journal.FORMAT", 2)
        write(tmp_path, 1, 2)
    with pytest.raises(StoreError, match=r"format 2 .* upgrade"):
        steps(tmp_path)


def test_segments_that_no_kept_checkpoint_needs_go(tmp_path: Path) -> None:
    positions = write(tmp_path, 1, 6, rotate=(2, 4))
    made = journal(tmp_path)
    made.prune(3)
    assert not segment(tmp_path, 1).exists()
    assert steps(tmp_path, 2, positions[2])[0] == [3, 4, 5, 6]
    made.prune(4)
    assert not segment(tmp_path, 2).exists()
    assert steps(tmp_path, 4, positions[4])[0] == [5, 6]
    made.prune(100)
    assert segment(tmp_path, 3).exists()  # the newest is being written


def life(directory: Path, filesystem: MortalFilesystem, durable: list[int]) -> None:
    """A start, steps in batches, rotations and a prune; ``durable`` gets each step when ``sync`` has returned."""
    made = journal(directory, filesystem)
    filesystem.sweep(directory / "journal")
    replay = Replay(0)
    for _ in made.read(2, None, replay):
        pass
    step = max(replay.step, 2)
    made.begin(step, 2, replay)
    for number in range(step + 1, step + 7):
        made.append(entry(number))
        if number % 2 == 0:
            made.sync()
            durable.append(number)
        if number % 4 == 0:
            made.rotate(number)
            made.prune(4)
    made.close()


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__ if spoil else "killed")
def test_a_crash_between_any_two_calls_loses_nothing_that_was_durable(
    tmp_path: Path, spoil: Callable[[bytes], bytes] | None
) -> None:
    count = MortalFilesystem()
    write(tmp_path / "count", 1, 3)
    life(tmp_path / "count", count, [])
    assert count.calls > 40
    torn = set()
    for die_at in range(count.calls):
        directory = tmp_path / "run"
        write(directory, 1, 3)
        filesystem, durable = MortalFilesystem(die_at), [3]
        with pytest.raises(Crash):
            life(directory, filesystem, durable)
        if spoil is not None:
            filesystem.power_cut(directory / "journal", spoil)
        after = 4 if max(durable) >= 4 and not segment(directory, 1).exists() else 2
        found, replay = steps(directory, after)
        assert found == list(range(after + 1, replay.step + 1))
        assert replay.step >= max(durable), f"died before call {die_at}"
        torn.add(replay.torn_bytes > 0)
        # Whatever happened, the run can go on from here, twice.
        for term in (3, 4):
            made, again = journal(directory), Replay(after)
            Filesystem().sweep(directory / "journal")
            for _ in made.read(after, None, again):
                pass
            made.begin(again.step, term, again)
            made.append(entry(again.step + 1))
            made.sync()
            made.close()
        assert steps(directory, after)[0] == [*found, replay.step + 1, replay.step + 2]
        assert not list((directory / "journal").glob(".tmp-*"))
        shutil.rmtree(directory)
    assert torn == ({False} if spoil is nothing else {False, True})


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_full_disk_leaves_a_gap_that_says_so(tmp_path: Path, call: str) -> None:
    filesystem = FullFilesystem()
    made = journal(tmp_path, filesystem)
    made.begin(0, 1)
    made.append(entry(1))
    made.sync()
    made.append(entry(2))
    filesystem.fails = call
    with pytest.raises(OSError, match="No space"):  # noqa: PT012
        made.append(entry(3))
        made.sync()
    made.close()
    for step, fails in ((7, "create"), (8, "write"), (9, "sync"), (10, "rename"), (11, "sync_directory")):
        filesystem.fails = fails
        with pytest.raises(OSError, match="No space"):
            made.rotate(step)
    filesystem.fails = ""
    position = made.rotate(12)
    made.append(entry(13))
    made.sync()
    made.close()
    assert steps(tmp_path, 12, position)[0] == [13]
    # From an older checkpoint: up to where the disk failed, and what lies behind is named.
    found, replay = steps(tmp_path)
    assert found[0] == 1
    assert replay.gap == Gap(replay.step, 12)
    again = journal(tmp_path)
    list(again.read(0, None, replay := Replay(0)))
    again.begin(replay.step, 2, replay)
    again.append(entry(replay.step + 1))
    again.sync()
    again.close()
    assert steps(tmp_path) == ([*found, replay.step + 1], Replay(replay.step + 1))
    assert (tmp_path / "journal" / "abandoned-segment-000000002").exists()
    assert again.newest_term == 2


def test_a_failure_to_prune_costs_only_space(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, 6, rotate=(2, 4))
    filesystem = FullFilesystem()
    filesystem.fails = "remove"
    with caplog.at_level(logging.WARNING):
        journal(tmp_path, filesystem).prune(4)
    assert "journal not pruned" in caplog.text
    assert steps(tmp_path)[0] == [1, 2, 3, 4, 5, 6]


def test_it_can_be_set_aside_and_removed(tmp_path: Path) -> None:
    for name in ("abandoned-journal", "abandoned-journal-1"):
        write(tmp_path, 1, 2)
        made = journal(tmp_path)
        assert made.set_aside() == tmp_path / name
        assert not made.exists
        made.begin(5, 3)
        made.append(entry(6))
        made.sync()
        made.close()
        assert steps(tmp_path, 5)[0] == [6]
        made.remove()
        assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_of_one_that_is_removed_nothing_comes_back_and_no_part_stays(tmp_path: Path, power: bool) -> None:
    class Process:
        dead = superseded = False

    whole = set()
    for dies_in in range(1, 8):
        disk, process = Disk(tmp_path / str(dies_in), random.Random(dies_in)), Process()
        write(disk.root, 1, 5, rotate=(2, 4))
        filesystem = HostFilesystem(disk, process)

        def die(process: Process = process) -> None:
            process.dead = True
            raise Crash

        filesystem.dies_in, filesystem.die = dies_in, die
        with suppress(Crash):
            journal(disk.root, filesystem).remove()
        if power:
            disk.power_cut()
        there = (disk.root / "journal").exists()
        assert steps(disk.root)[0] == ([1, 2, 3, 4, 5] if there else [])
        assert process.dead or not there
        whole.add(there)
    assert whole == {False, True}


# -- failpoints


def test_a_failpoint_fires_at_the_passing_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    try:
        arm("apply.before=error@2; apply.after=enospc@2-3;publish.before=kill;publish.after=error@2-")
        for name, expected in (
            ("apply.before", [0, errno.EIO, 0, 0]),
            ("apply.after", [0, errno.ENOSPC, errno.ENOSPC, 0]),
            ("publish.after", [0, errno.EIO, errno.EIO, errno.EIO]),
        ):
            codes = []
            for _ in expected:
                try:
                    failpoint(name)
                    codes.append(0)
                except OSError as error:
                    codes.append(error.errno or 0)
            assert codes == expected
        failpoint("publish.before")
        failpoint("publish.before")
        assert killed == [(os.getpid(), 9)]
        failpoint("journal.append.before")
    finally:
        disarm()
    failpoint("apply.after")


@pytest.mark.parametrize("text", ["nowhere=kill", "apply.before", "apply.before=burn", "apply.before=kill@x"])
def test_a_failpoint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=ACTION"):
        arm(text)
    assert not failpoints._armed


def test_every_failpoint_stands_in_the_code_and_in_the_table() -> None:
    source = Path(failpoints.__file__).parents[1]
    code = "".join(path.read_text() for path in source.rglob("*.py") if path.name != "failpoints.py")
    assert set(re.findall(r'failpoint\("([^"]+)"', code)) == set(FAILPOINTS)


def test_half_a_write_reaches_the_file(tmp_path: Path) -> None:
    file = io.BytesIO()
    try:
        arm("journal.append.half=error")
        with pytest.raises(OSError, match="failpoint"):
            failpoint("journal.append.half", lambda: file.write(b"half"))
    finally:
        disarm()
    assert file.getvalue() == b"half"


def test_one_whose_directory_was_deleted_or_moved_says_so_and_begins_again(tmp_path: Path) -> None:
    """What nobody finds at the next start is not durable, whatever the disk says."""
    made = journal(tmp_path)
    made.begin(0, 1)
    made.append(entry(1))
    made.sync()
    shutil.move(tmp_path / "journal", tmp_path / "elsewhere")
    made.append(entry(2))
    with pytest.raises(FileNotFoundError, match="deleted or moved") as caught:
        made.sync()
    assert caught.value.errno == errno.ENOENT
    made.close()
    made.probe(1 << 10)
    position = made.rotate(3)  # as soon as a checkpoint of step 3 is asked for
    made.append(entry(4))
    made.sync()
    made.close()
    assert steps(tmp_path, 3, position)[0] == [4]
