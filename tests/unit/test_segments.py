"""Memory that two processes have: who can open it, who can write it, and what is seen of it when."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from w5xde_async.segments import SECRET_BYTES, Opened, Region, Segment, Unshared, Window, unsupported

pytestmark = pytest.mark.skipif(unsupported() != "", reason=unsupported())

NBYTES = 3 * mmap.PAGESIZE + 40
SECRET = b"only for who can read it"


@pytest.fixture
def segment() -> Iterator[Segment]:
    with closing(Segment("test", NBYTES, SECRET)) as made:
        yield made


def test_who_opens_it_reads_the_secret_and_what_the_owner_writes(segment: Segment) -> None:
    with closing(Opened(segment.told, NBYTES)) as opened:
        seen = opened.map()
    assert opened.secret == SECRET.ljust(SECRET_BYTES, b"\0")
    assert seen.shape == segment.payload.shape == (NBYTES,)
    assert not seen.any()
    segment.payload[-1] = 7
    assert seen[-1] == 7


def test_nobody_else_can_write_it(segment: Segment) -> None:
    assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o600
    anew = os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR)
    try:
        for descriptor in (segment.descriptor, anew):
            with pytest.raises(OSError, match="not permitted"):
                mmap.mmap(descriptor, segment.nbytes)
            with pytest.raises(OSError, match="not permitted"):
                os.pwrite(descriptor, b"x", 0)
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(anew)


def test_closed_it_cannot_be_opened_and_what_is_mapped_stays(segment: Segment) -> None:
    told = segment.told
    seen = Opened(told, NBYTES).map()
    segment.close()
    with pytest.raises(Unshared):
        Opened(told, NBYTES)
    segment.payload[0] = 5
    assert seen[0] == 5


def test_a_forgotten_segment_keeps_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = Segment("test", NBYTES, SECRET)
    opened = Opened(made.told, NBYTES)
    del made, opened
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("told", [(), (1, 2), (0, 0, 0, 0), (1 << 62, 1 << 62, 1 << 62), (-1, -1, -1)])
def test_numbers_that_are_none_are_refused(told: tuple[int, ...]) -> None:
    with pytest.raises(Unshared):
        Opened(told, NBYTES)


def test_what_is_no_segment_is_not_opened(segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, descriptor, nbytes = segment.told
    fifo, file = tmp_path / "fifo", tmp_path / "memfd:w5xde-x"
    os.mkfifo(fifo)
    file.write_bytes(bytes(nbytes))
    opened = [os.open(fifo, os.O_RDWR), os.open(file, os.O_RDONLY), os.memfd_create("other"), os.open("/", os.O_RDONLY)]
    opened.append(os.memfd_create("w5xde-shared-test"))  # of the right name and size, but its owner could cut it short
    for at in (2, 4):
        os.ftruncate(opened[at], nbytes)
    try:
        for other in opened:
            with pytest.raises(Unshared):
                Opened((process, other, nbytes), NBYTES)
    finally:
        for other in opened:
            os.close(other)
    with pytest.raises(Unshared, match="another size"):
        Opened(segment.told, NBYTES + mmap.PAGESIZE)
    with pytest.raises(Unshared, match="another machine"):
        Opened((1 << 22, descriptor, nbytes), NBYTES)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Unshared, match="another user"):
        Opened(segment.told, NBYTES)


def test_without_memory_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", lacks)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(Unshared, match="No space left"):
        Segment("test", NBYTES, SECRET)
    assert set(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unshared, match="Linux alone"):
        Segment("test", NBYTES, SECRET)


def test_a_region_is_written_by_both_and_keeps_its_size() -> None:
    with closing(Region("test", NBYTES)) as region, mmap.mmap(region.descriptor, region.nbytes) as other:
        other[3] = 9
        assert region.memory[3] == 9
        seals = fcntl.fcntl(region.descriptor, fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_SEAL


@pytest.fixture(params=["looks first", "pagemap closed"])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Window:
    if request.param == "pagemap closed":
        opens = os.open

        def refuses(path: str, *args: int, **named: int) -> int:
            if path == "/proc/self/pagemap":
                raise PermissionError
            return opens(path, *args, **named)

        monkeypatch.setattr(os, "open", refuses)
    return Window(NBYTES)


def test_a_window_shows_a_segment_where_its_tensors_are(segment: Segment, window: Window) -> None:
    memory: Tensor = window.memory
    memory[:2] = 1
    place = memory.data_ptr()
    with closing(Opened(segment.told, NBYTES)) as opened:
        window.show(opened)
    segment.payload.copy_(torch.arange(NBYTES) % 251)
    assert torch.equal(memory, segment.payload)
    memory[5], memory[-1] = 200, 201  # as a step does that writes into its model
    assert (int(segment.payload[5]), int(segment.payload[-1])) == (5, (NBYTES - 1) % 251)
    assert int(memory[5]) == 200
    segment.payload.fill_(3)
    window.restore()
    assert torch.equal(memory, segment.payload)
    segment.payload.fill_(4)
    window.restore()  # nothing was written here
    assert torch.equal(memory, segment.payload)
    window.hide()
    assert not memory.any()
    memory.fill_(9)
    window.restore()
    assert memory.data_ptr() == place
    assert int(memory.min()) == 9
    assert int(segment.payload[0]) == 4


def test_a_window_shows_one_segment_after_another_and_keeps_no_descriptor(segment: Segment) -> None:
    before = set(os.listdir("/proc/self/fd"))
    window = Window(NBYTES)
    for value in (1, 2):
        segment.payload.fill_(value)
        with closing(Opened(segment.told, NBYTES)) as opened:
            window.show(opened)
        assert int(window.memory[0]) == value
    with pytest.raises(Unshared, match="size"):
        Window(NBYTES * 3).show(Opened(segment.told, NBYTES))
    window.hide()
    window.hide()
    assert set(os.listdir("/proc/self/fd")) == before


def test_another_process_reads_it_and_cannot_write_what_the_owner_has(segment: Segment) -> None:
    segment.payload[0] = 6
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            seen = Opened(segment.told, NBYTES).map()
            code = 0 if int(seen[0]) == 6 else 2
            window = Window(NBYTES)
            window.show(Opened(segment.told, NBYTES))
            window.memory.fill_(99)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert int(segment.payload[0]) == 6
