"""metrics.jsonl: every event once, in whole lines, and never the run's problem."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import os
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.events import committed

from w5xde_async.errors import StoreError
from w5xde_async.store.filesystem import FencedFilesystem, Filesystem
from w5xde_async.telemetry import recorder as recorder_module
from w5xde_async.telemetry.events import Evaluated, Event, RunStarted, StepCommitted, Warned
from w5xde_async.telemetry.recorder import Recorder
from w5xde_async.telemetry.records import dated_line, number, to_line, to_record


def step(number: int, loss: float = 0.5) -> StepCommitted:
    return StepCommitted(
        step=number,
        epoch=0,
        loss=loss,
        metrics={"accuracy": 0.5},
        samples=64,
        leaves=8,
        learning_rate=1e-3,
        gradient_norm=None,
        loss_scale=1.0,
        skipped=False,
        seconds=0.01,
        num_workers=2,
        bytes_sent=100,
        bytes_received=200,
        phases_s={"wait": 0.008},
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *events: Event, **arguments: Any) -> Recorder:
    recorder = Recorder(path, flush_s=None, wall=lambda: 5.0, **arguments)
    for event in events:
        recorder(event)
    recorder.flush()
    return recorder


@pytest.mark.parametrize(
    "value",
    [
        1, -(1 << 63), 1 << 200, 0.1, 1e-05, 1e22, -0.0, 5e-324, "nan", True, None, [], {}, [1, {"a": [2.5, "b"]}],
        'a "quoted" \\ line\n', "\x00\x1b[2J\x7f", "üß\u202e\U0001f600", "\ud800", {"1": {"2": {}}},
    ],
)  # fmt: skip
def test_a_line_is_what_json_says_in_ascii(value: object) -> None:
    line = to_line({"event": "step", "value": value})
    assert line.isascii()
    assert line.count("\n") == 1
    assert line.startswith('{"event": "step", "value": ')
    assert json.loads(line) == {"event": "step", "value": value}
    assert math.copysign(1, json.loads(line)["value"]) == math.copysign(1, value) if isinstance(value, float) else True


_NUMBERS = st.one_of(
    st.floats(), st.integers(), st.none(), st.floats().map(np.float64), st.floats(width=32).map(np.float32)
)


@given(
    numbers=st.lists(_NUMBERS, min_size=4, max_size=4),
    metrics=st.dictionaries(
        st.one_of(st.text(), st.sampled_from(["null", "\ud800", "a\x00"]), st.integers()), _NUMBERS
    ),
    step=st.integers(),
)
def test_a_steps_line_is_that_of_its_record(numbers: list[Any], metrics: dict[Any, Any], step: int) -> None:
    loss, norm, rate, staleness = numbers
    event = committed(
        step, loss=loss, gradient_norm=norm, learning_rate=rate, staleness=staleness, metrics=metrics,
        phases_s={"wait": 0.0, "apply": loss},
    )  # fmt: skip
    line = dated_line(event, 1.23456)
    assert line == to_line({"time": 1.235, **to_record(event)})
    assert json.loads(line)["event"] == "step_committed"


def test_lines_go_where_the_files_name_is_when_its_folder_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    recorder = write(path, step(4), step(5))
    path.parent.rename(tmp_path / "moved")
    path.parent.mkdir()  # as the run directory does
    recorder(step(6))
    recorder.close()
    assert [line["step"] for line in read(path)] == [6]
    assert [line["step"] for line in read(tmp_path / "moved" / "metrics.jsonl")] == [4, 5]


def test_events_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), Evaluated(step=1, metrics={"accuracy": 0.9}, seconds=0.2), resumed_step=0).close()
    first, second = read(path)
    assert first["event"] == "step_committed"
    assert first["time"] == 5.0
    assert first["loss"] == 0.5
    assert first["gradient_norm"] is None
    assert first["phases_s"] == {"wait": 0.008}
    metrics = {"accuracy": 0.9}
    assert second == {"time": 5.0, "event": "evaluated", "step": 1, "metrics": metrics, "seconds": 0.2, "best": False}


def test_what_is_no_number_is_a_string_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1, math.nan), Evaluated(step=1, metrics={"a": math.inf, "b": -math.inf}, seconds=1.0)).close()
    first, second = read(path)
    assert first["loss"] == "nan"
    assert second["metrics"] == {"a": "inf", "b": "-inf"}
    assert [number(value) for value in ("inf", 1, 0.5)] == [math.inf, 1.0, 0.5]
    assert math.isnan(number("nan"))
    assert math.isnan(number(None))


def test_lines_hold_no_halves_of_characters(tmp_path: Path) -> None:
    """Of a name that is no UTF-8: other readers of JSON take none."""
    path = tmp_path / "metrics.jsonl"
    write(path, Warned(text="caf\udce9 é"), Evaluated(step=1, metrics={"\ud800": 1.0}, seconds=1.0)).close()
    first, second = read(path)
    assert first["text"] == "caf? é"
    assert second["metrics"] == {"?": 1.0}


def test_the_join_command_is_not_recorded(tmp_path: Path) -> None:
    fields = {name: "x" for name in RunStarted.__dataclass_fields__}
    path = tmp_path / "metrics.jsonl"
    write(path, RunStarted(**(fields | {"worker_command": "--join w5xde://secret"}))).close()  # type: ignore[arg-type]
    assert "secret" not in path.read_text()
    assert read(path)[0]["run_name"] == "x"


def test_a_resumed_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    events = [step(1), step(2), Warned(text="kept"), Evaluated(step=2, metrics={}, seconds=1.0), step(3), step(4)]
    write(path, *events).close()
    write(path, step(3, loss=0.25), resumed_step=2).close()
    records = read(path)
    assert [(r["event"], r.get("step"), r.get("loss")) for r in records] == [
        ("step_committed", 1, 0.5),
        ("step_committed", 2, 0.5),
        ("warned", None, None),
        ("evaluated", 2, None),
        ("step_committed", 3, 0.25),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_steps_that_only_the_journal_has_are_added_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), resumed_step=0).close()
    with path.open("a") as file:
        file.write('{"event": "step_comm')  # died here
    replayed = [{"time": float(known), "event": "step_committed", "step": known} for known in (2, 3, 4)]
    write(path, step(5), resumed_step=4, replayed=replayed).close()
    assert [(line["step"], line["time"]) for line in read(path)] == [(1, 5.0), (2, 5.0), (3, 3.0), (4, 4.0), (5, 5.0)]


def test_steps_of_the_journal_survive_a_disk_that_is_full_at_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    full = [True]

    class File(FileIO):
        def write(self, data: Any) -> int:
            if full:
                full.pop()
                raise OSError(errno.ENOSPC, "full")
            return super().write(data)

    replayed = [{"event": "step_committed", "step": 1}]

    class Disk(Filesystem):
        def append(self, path: Path) -> FileIO:
            return File(path, "ab")

    recorder = Recorder(path, resumed_step=1, replayed=replayed, flush_s=None, filesystem=Disk())
    for later in (2, 3):
        recorder(step(later))
        recorder.flush()
    recorder.close()
    assert [line.get("step") for line in read(path)] == [1, 3, None]


def test_sync_leaves_nothing_in_a_buffer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = Recorder(path, flush_s=None)
    recorder.sync()  # nothing yet
    recorder(step(1))
    recorder.sync()
    assert [line["step"] for line in read(path)] == [1]
    recorder.close()


def test_sync_puts_the_name_of_a_new_file_on_the_disk(tmp_path: Path) -> None:
    """Where it was made, and where it has taken the place of one with steps that are done again."""
    path = tmp_path / "metrics.jsonl"
    for first in (0, 1):
        synced: list[Path] = []

        class Disk(Filesystem):
            def sync_directory(self, path: Path, synced: list[Path] = synced) -> None:
                synced.append(path)

        recorder = Recorder(path, resumed_step=first, flush_s=None, filesystem=Disk())
        recorder(step(first + 1))
        recorder(step(first + 2))
        recorder.sync()
        assert synced == [tmp_path]
        recorder.sync()
        assert synced == [tmp_path]  # once is enough
        recorder.close()
    assert [line["step"] for line in read(path)] == [1, 2, 3]


@pytest.mark.parametrize("opened", ["at first", "anew"])
def test_a_file_that_a_successor_puts_there_while_it_is_opened_stays_his(tmp_path: Path, opened: str) -> None:
    """Between the look whose the run is and the opening."""
    path = tmp_path / "metrics.jsonl"
    theirs = [opened == "at first"]  # what comes with the next look

    class Disk(Filesystem):
        def append(self, path: Path) -> FileIO:
            if theirs == [True]:
                theirs.append(True)
                (path.parent / "another").write_text("the successor's\n")
                os.replace(path.parent / "another", path)
            return FileIO(path, "ab")

    def check() -> None:
        if len(theirs) > 1:
            raise StoreError(str(path), "was taken over")

    recorder = Recorder(path, resumed_step=1, flush_s=None, filesystem=FencedFilesystem(Disk(), check))
    recorder(step(2))
    recorder.flush()
    if opened == "anew":
        path.unlink()
        theirs[0] = True
        recorder(step(3))
        recorder.flush()
    recorder(step(4))
    recorder.close()
    assert path.read_text() == "the successor's\n"


@pytest.mark.parametrize("before", [1, 2], ids=["while it is opened", "while it is read"])
def test_a_file_that_was_taken_over_before_it_is_cut_is_not_cut(before: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(3)).close()
    kept = path.read_bytes()
    looks: list[str] = []

    def check() -> None:
        looks.append("")
        if len(looks) > before:
            raise StoreError(str(path), "was taken over")

    write(path, step(2), resumed_step=1, filesystem=FencedFilesystem(Filesystem(), check)).close()
    assert path.read_bytes() == kept
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_torn_last_line_is_cut_off_and_foreign_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe not json\n[1]\n{"step": "x"}\n{"step": 2, "lo')
    write(path, step(3), resumed_step=2).close()
    lines = path.read_bytes().splitlines()
    assert lines[:4] == [b'{"step": 1}', b"\xff\xfe not json", b"[1]", b'{"step": "x"}']
    assert json.loads(lines[4])["step"] == 3
    assert len(lines) == 5


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"event": "step_committed", "step": 1, "x": ' + b"[" * 100_000])
def test_lines_that_nest_too_deeply_are_foreign_too(tmp_path: Path, deep: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2)).close()
    with path.open("ab") as file:
        file.write(deep + b"\n")
    write(path, step(3), resumed_step=2).close()
    lines = path.read_bytes().splitlines()
    assert lines.pop(2) == deep
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert recorder_module.recorded(path, 3).last_step == 3


def test_a_whole_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1)).close()
    inode = path.stat().st_ino
    write(path, step(2), resumed_step=1).close()
    assert path.stat().st_ino == inode
    assert [record["step"] for record in read(path)] == [1, 2]


def test_of_a_long_file_a_resume_reads_the_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint waits for it: of a million steps all lines would take a minute. What stays of the end stays in its
    place, and what only the journal has is added once."""
    path, read_bytes = tmp_path / "metrics.jsonl", [0]

    class Counted(FileIO):
        def readinto(self, buffer: Any) -> int:
            read_bytes[0] += (count := super().readinto(buffer) or 0)
            return count

    def counted(path: Path, mode: str, **_: Any) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(Counted(path), buffer_size=256)

    monkeypatch.setattr(recorder_module, "open", counted, raising=False)
    monkeypatch.setattr(recorder_module, "_BLOCK_BYTES", 700)
    lines = [to_line({"event": "step_committed", "step": known, "pad": "x" * 200}) for known in range(1, 1001)]
    lines[995:995] = [to_line({"event": "evaluated", "step": 994}), to_line({"event": "warned", "text": "y" * 2000})]
    lines[998:998] = [to_line({"event": "warned", "text": "z"})]
    path.write_text("".join(lines) + '{"event": "step_comm')
    replayed = [{"event": "step_committed", "step": known} for known in (993, 994, 995, 996)]
    path.write_text(path.read_text().replace(lines[993], ""))  # of the step 994
    write(path, step(997), resumed_step=996, replayed=replayed).close()
    assert [(line["event"], line.get("step")) for line in read(path)[992:]] == [
        ("step_committed", 993), ("step_committed", 995), ("evaluated", 994), ("warned", None), ("step_committed", 996),
        ("warned", None), ("step_committed", 994), ("step_committed", 997),
    ]  # fmt: skip
    assert read_bytes[0] < 10_000 < path.stat().st_size / 10


@given(
    known=st.lists(st.sampled_from([None, b"x" * 9, b"", b"\r", b"[1]"]), max_size=30),
    torn=st.binary(max_size=9),
    resumed=st.integers(0, 9),
    block=st.integers(1, 99),
)
def test_what_is_cut_off_is_what_is_done_again(known: list[Any], torn: bytes, resumed: int, block: int) -> None:
    """As by a look at every line; a step is in no line before the one before it."""
    torn, last = torn.replace(b"\n", b""), 0
    lines = list[bytes]()
    for one in known:
        if one is None:  # a step
            last, one = last + 1, b'{"event": "step_committed", "step": %d}' % (last + 1)
            lines += [b'{"event": "evaluated", "step": %d}' % max(1, last - 1)]
        lines.append(one)
    whole = [line + b"\n" for line in lines]

    def stays(line: bytes) -> bool:
        return not line.startswith(b"{") or json.loads(line)["step"] <= resumed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder_module, "_BLOCK_BYTES", block)
        data = b"".join(whole) + torn
        end = recorder_module._redone(io.BytesIO(data), resumed, [])
    assert data[: end.begins] + b"".join(end.stays) == b"".join(filter(stays, whole))


@pytest.mark.parametrize("at", ["create", "write", "rename", "remove"])
def test_what_stays_of_a_cut_end_is_lost_by_no_write_that_fails(at: str, tmp_path: Path) -> None:
    """As where the process is killed there: another takes it up."""
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), Warned(text="kept"), step(3), Warned(text="kept too")).close()

    class Dying(Filesystem):
        pass

    def dies(*_: object) -> None:
        raise OSError(errno.EIO, "dying")

    dying = Dying()
    setattr(dying, at, dies)
    write(path, step(2, loss=0.25), resumed_step=1, filesystem=dying).close()
    assert "kept too" in path.read_text()
    write(path, step(2, loss=0.125), resumed_step=1).close()
    kept = [("step_committed", 0.5), ("warned", None), ("warned", None), ("step_committed", 0.125)]
    assert [(line["event"], line.get("loss")) for line in read(path)] == kept
    assert [found for found in tmp_path.iterdir() if found.name != path.name and ".tmp-" not in found.name] == []


def test_what_a_killed_start_has_put_aside_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), Warned(text="kept"), step(2)).close()
    first, second, _ = path.read_bytes().splitlines(keepends=True)
    aside = path.with_name("metrics.jsonl.kept")
    for left in (first + second + second[:7], first, first + second[:9], first + second):
        path.write_bytes(left)
        aside.write_bytes(b"%d\n" % len(first) + second)
        write(path, step(2, loss=0.25), resumed_step=1).close()
        assert path.read_bytes().splitlines(keepends=True)[:2] == [first, second]
        assert [line.get("loss") for line in read(path)] == [0.5, None, 0.25]
        assert not aside.exists()


def test_lines_of_earlier_versions_with_half_a_character_are_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"event": "step_committed", "step": number, "metrics": {"a\udc80": 1.0}} for number in range(1, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(path, step(3), resumed_step=2).close()
    assert [line["step"] for line in read(path)] == [1, 2, 3]


def test_what_stays_of_a_cut_end_survives_a_disk_that_is_full_at_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), Warned(text="kept")).close()
    full = [True]

    class File(FileIO):
        def write(self, data: Any) -> int:
            if full:
                full.pop()
                raise OSError(errno.ENOSPC, "full")
            return super().write(data)

    class Disk(Filesystem):
        def append(self, path: Path) -> FileIO:
            return File(path, "ab")

    recorder = write(path, step(2, loss=0.25), resumed_step=1, filesystem=Disk())
    assert [line["event"] for line in read(path)] == ["step_committed", "warned"]
    recorder(step(3))
    recorder.close()
    kept = [("step_committed", 1), ("warned", None), ("step_committed", 3), ("dropped", None)]
    assert [(line["event"], line.get("step")) for line in read(path)] == kept


class FullDisk(FileIO):
    """Takes ``room`` bytes, then half of what it is given, then none."""

    room = 0

    def write(self, data: Any) -> int:
        taken = min(len(data), self.room)
        self.room -= taken
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:taken])


def test_a_full_disk_is_named_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    files: list[FullDisk] = []

    class Disk(Filesystem):
        def append(self, path: Path) -> FileIO:
            files.append(FullDisk(path, "ab"))
            files[0].room = 10_000
            return files[0]

    recorder = write(path, step(1), filesystem=Disk())
    files[0].room = 100  # less than a line
    for number_ in (2, 3):
        recorder(step(number_))
        recorder.flush()
        assert path.read_bytes().endswith(b"}\n")  # no half line stays
    assert caplog.text.count("metrics not recorded") == 1
    assert "No space left on device" in caplog.text
    files[0].room = 10_000
    recorder(step(4))
    recorder.close()
    assert [(r["event"], r.get("step"), r.get("count")) for r in read(path)] == [
        ("step_committed", 1, None),
        ("step_committed", 4, None),
        ("dropped", None, 2),
    ]


def test_memory_that_lacks_for_a_moment_costs_lines_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> str:
        raise MemoryError

    path = tmp_path / "metrics.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(recorder_module, "dated_line", lacking)
        recorder = write(path, step(1))
    recorder(step(2))
    recorder.close()
    assert [(r["event"], r.get("step"), r.get("count")) for r in read(path)] == [
        ("step_committed", 2, None), ("dropped", None, 1),
    ]  # fmt: skip
    assert "reason=out of memory" in caplog.text


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "file" / "metrics.jsonl", step(1)).close()
    assert caplog.text.count("metrics not recorded") == 1


def test_the_buffer_is_bounded_and_says_what_it_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    recorder = write(path, *(step(number) for number in range(1, 8)), capacity=4)
    recorder(step(8))
    recorder.close()
    recorder(step(9))  # too late, and no error
    assert [r.get("step", r.get("count")) for r in read(path)] == [1, 2, 3, 4, 3, 8]


def test_a_thread_writes_at_once_then_rests_and_ends(tmp_path: Path) -> None:
    """What is on the screen is in the file: after a kill the next start counts the steps that were done from it."""
    path = tmp_path / "metrics.jsonl"
    before = threading.active_count()
    recorder = Recorder(path, flush_s=60.0, capacity=4)
    written = threading.Semaphore(0)
    flush = recorder.flush

    def flushed() -> None:
        flush()
        written.release()

    recorder.flush = flushed  # type: ignore[method-assign]
    recorder(step(1))
    assert written.acquire(timeout=30)
    assert [record["step"] for record in read(path)] == [1]
    recorder(step(2))
    assert len(read(path)) == 1  # it rests
    recorder(step(3))  # half full: woken long before the minute is over
    assert written.acquire(timeout=30)
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    recorder(step(4))
    recorder.close()
    recorder.close()
    assert threading.active_count() == before
    assert [record["step"] for record in read(path)] == [1, 2, 3, 4]


async def test_an_event_is_taken_at_once(tmp_path: Path) -> None:
    """On an event loop, where blocking calls fail; the file appears only when the thread has written it."""
    recorder = Recorder(tmp_path / "metrics.jsonl", flush_s=60.0)
    with recorder._disk:  # a disk that takes its time
        recorder(step(1))
        assert not (tmp_path / "metrics.jsonl").exists()
    await asyncio.to_thread(recorder.close)
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1]
