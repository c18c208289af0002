"""One holder, one identity, rising terms, and no run ever written over."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.disk import Disk, HostFilesystem
from torch import nn

from w5xde_async.errors import CheckpointCorrupt, ExitCode, RunDirBusy, StoreError
from w5xde_async.store import rundir
from w5xde_async.store.checkpoint import CheckpointStore, Record
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.journal import Journal
from w5xde_async.store.rundir import RunDir, RunDirUnusable, Superseded, export_model, export_tensors
from w5xde_async.store.tensors import read_metadata, read_tensors
from w5xde_async.store.toml import to_toml


class FullDisk(Filesystem):
    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_new_run_has_a_name_for_good_and_rising_terms(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "digits"
    with RunDir.open(path, resume=True) as run:
        run_id = run.run_id
        assert len(run_id) == 16
        assert not run.resumes
        assert run.set_aside is None
        assert [run.next_term(), run.next_term()] == [1, 2]
    with RunDir.open(path, resume=True) as run:
        assert run.run_id == run_id
        assert run.resumes
        assert run.next_term() == 3
        assert json.loads((path / "run.json").read_text())["term"] == 3  # stored before it is returned


class Noting(Filesystem):
    """Notes which directories are made and whose names reach the disk, in order."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, Path]] = []

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.noted.append(("made", path))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.noted.append(("synced", path))


def test_the_names_of_new_directories_are_on_the_disk_before_anything_is_in_them(tmp_path: Path) -> None:
    disk, path = Noting(), tmp_path / "runs" / "new"
    RunDir.open(path, resume=True, filesystem=disk).close()
    assert disk.noted[:4] == [
        ("made", tmp_path / "runs"), ("synced", tmp_path), ("made", path), ("synced", tmp_path / "runs"),
    ]  # fmt: skip
    disk.noted.clear()
    export_model(nn.Linear(1, 1), tmp_path / "out" / "model.safetensors", filesystem=disk)
    assert disk.noted[:2] == [("made", tmp_path / "out"), ("synced", tmp_path)]


def test_a_term_that_may_have_reached_the_disk_is_not_used_again(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", resume=True) as run:
        run._filesystem = FullDisk()
        with pytest.raises(StoreError, match="disk is full"):
            run.next_term()
        run._filesystem = Filesystem()
        assert run.next_term() == 2


def test_paths(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", resume=True) as run:
        names = [run.config_path, run.metrics_path, run.plot_path, run.model_path, run.checkpoints_path]
        expected = ["config.toml", "metrics.jsonl", "loss.png", "model.safetensors", "checkpoints"]
        assert names == [tmp_path / "run" / name for name in expected]


def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", resume=True), pytest.raises(RunDirBusy) as caught:
        RunDir.open(tmp_path / "run", resume=True)
    assert f"process {os.getpid()}" in caught.value.reason
    assert "choose another --run-dir" in caught.value.reason
    assert caught.value.exit_code == ExitCode.USAGE
    with RunDir.open(tmp_path / "run", resume=True) as run:
        run.close()
        run.close()


def test_a_holder_that_died_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import fcntl, os, sys\n"
        "lock = open(sys.argv[1], 'a+'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "lock.write('12345'); lock.flush(); print('held', flush=True); sys.stdin.read()\n"
    )
    path = tmp_path / "run"
    path.mkdir()
    command = [sys.executable, "-c", script, str(path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunDirBusy, match="process 12345"):
            RunDir.open(path, resume=True)
        other.kill()
        other.wait()
    RunDir.open(path, resume=True).close()


class Killed(BaseException):
    """A process ends, and with it all that it would do."""


class Mortal:
    """A process of the simulator's."""

    dead = superseded = False


def old_run(path: Path) -> str:
    with RunDir.open(path, resume=True) as run:
        run.next_term()
        run.metrics_path.write_text("old\n")
        (path / "metrics.jsonl.kept").write_text("0\nold\n")  # the recorder was killed
        run.checkpoints_path.mkdir()
        (run.checkpoints_path / "step").write_text("old")
        (path / "notes.txt").write_text("the person's own")
        return run.run_id


def test_a_fresh_start_moves_the_old_run_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in (1, 2):
        run_id = old_run(path)
        with RunDir.open(path, resume=False) as run:
            assert run.set_aside == tmp_path / f"run.old-{number}"
            assert run.run_id != run_id
            assert run.next_term() == 1
            assert sorted(entry.name for entry in path.iterdir()) == [".lock", "notes.txt", "run.json"]
        assert json.loads((tmp_path / f"run.old-{number}" / "run.json").read_text())["run_id"] == run_id
        assert (tmp_path / f"run.old-{number}" / "metrics.jsonl").read_text() == "old\n"
        assert (tmp_path / f"run.old-{number}" / "metrics.jsonl.kept").exists()
        assert (tmp_path / f"run.old-{number}" / "checkpoints" / "step").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_a_power_cut_while_the_old_run_is_moved_loses_none_of_it(tmp_path: Path, inside: bool) -> None:
    """Nor is its best model left alone where another course would keep it."""

    class Alone(HostFilesystem):
        def make_directory(self, path: Path) -> None:
            if path.name == "run.old-1":
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            super().make_directory(path)

    found = set()
    for dies_in, seed in itertools.product(range(1, 12), range(4)):
        disk, process = Disk(tmp_path / f"{dies_in} {seed}", random.Random(seed)), Mortal()
        path, filesystem = disk.root / "run", (Alone if inside else HostFilesystem)(disk, process)
        old_run(path)
        (path / "best.safetensors").write_text("old")

        def die(process: Mortal = process) -> None:
            process.dead = True
            raise Killed

        filesystem.dies_in, filesystem.die = dies_in, die
        with suppress(Killed):
            RunDir.open(path, resume=False, filesystem=filesystem).close()
        filesystem.discard()
        disk.power_cut()
        (kept,) = [*disk.root.rglob("checkpoints/step")]
        (best,) = [*disk.root.rglob("best.safetensors")]
        assert best.parent != path or kept.parents[1] == path
        found.add(str(kept.relative_to(disk.root).parents[1]))
    assert len(found) == 2


def test_a_fresh_start_in_an_empty_place_moves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    with RunDir.open(tmp_path, resume=False) as run:
        assert run.set_aside is None
    assert (tmp_path / "mine.txt").exists()


def test_setting_aside_works_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with RunDir.open(Path("."), resume=False) as run:
        assert run.set_aside == tmp_path.resolve() / "run.old-1"


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS])
def test_where_nothing_can_be_put_beside_it_the_old_run_lies_inside(tmp_path: Path, code: int) -> None:
    """The directory is a volume of a container, or the one around it is somebody else's."""
    path = tmp_path / "run"

    class Alone(Filesystem):
        def make_directory(self, target: Path) -> None:
            if code != errno.EXDEV and not target.is_relative_to(path):
                raise OSError(code, os.strerror(code))
            super().make_directory(target)

        def rename(self, source: Path, target: Path) -> None:
            if not target.is_relative_to(path):
                raise OSError(code, os.strerror(code))
            super().rename(source, target)

    for number in (1, 2):
        run_id = old_run(path)
        with RunDir.open(path, resume=False, filesystem=Alone()) as run:
            assert run.set_aside == path / f"old-{number}"
            assert not run.resumes
        assert json.loads((path / f"old-{number}" / "run.json").read_text())["run_id"] == run_id
        assert (path / f"old-{number}" / "checkpoints" / "step").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]  # nothing is left of the attempt


def test_what_stands_in_a_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    with pytest.raises(RunDirUnusable, match=r"the run directory: run\.json: a directory stands where a file is"):
        RunDir.open(tmp_path / "run", resume=True)


def test_another_failure_is_told_and_moves_nothing(tmp_path: Path) -> None:
    class Failing(Filesystem):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

    old_run(tmp_path / "run")
    with pytest.raises(RunDirUnusable, match="cannot prepare the run directory"):
        RunDir.open(tmp_path / "run", resume=False, filesystem=Failing())
    assert (tmp_path / "run" / "checkpoints" / "step").exists()


def test_a_crash_while_setting_aside_never_resumes_half_a_run(tmp_path: Path) -> None:
    class Dies(Filesystem):
        left = 1

        def rename(self, source: Path, target: Path) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            super().rename(source, target)

    path = tmp_path / "run"
    old_run(path)
    with pytest.raises(KeyboardInterrupt):
        RunDir.open(path, resume=False, filesystem=Dies())
    assert not (path / "checkpoints").exists()  # what is left cannot go on from a step
    with RunDir.open(path, resume=False) as run:  # and the lock is free
        assert run.set_aside == tmp_path / "run.old-2"
    assert (tmp_path / "run.old-1" / "checkpoints" / "step").exists()
    assert (tmp_path / "run.old-2" / "metrics.jsonl").exists()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["config.toml", "model.safetensors", "best.safetensors", "loss.png", "checkpoints/a"])
def test_what_no_run_has_made_is_not_written_over(tmp_path: Path, name: str, resume: bool) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(RunDirUnusable, match=f"it holds {name.partition('/')[0]}, which no run has made") as caught:
        RunDir.open(tmp_path, resume=resume)
    assert caught.value.exit_code == ExitCode.USAGE
    assert mine.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", name.partition("/")[0]]
    mine.unlink()
    RunDir.open(tmp_path, resume=resume).close()  # an empty folder is nobody's


@pytest.mark.parametrize("resume", [True, False])
def test_checkpoints_whose_run_json_is_gone_are_said_to_be_good(tmp_path: Path, resume: bool) -> None:
    manifest = tmp_path / "checkpoints" / "step-000000040" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    with pytest.raises(RunDirUnusable, match=r"no run\.json that says of which run: put that file back") as caught:
        RunDir.open(tmp_path, resume=resume)
    assert f"another --run-dir and --resume {tmp_path}/checkpoints/step-..." in str(caught.value)
    assert manifest.read_text() == "{}"


def test_one_that_is_deleted_meanwhile_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.open(path, resume=True) as run:
        run.next_term()
        run.write_config({"name": "x"})
        told: list[bool] = []
        run.on_made_anew = lambda: told.append((path / "run.json").exists())
        shutil.move(path, tmp_path / "elsewhere")
        store = CheckpointStore(run.checkpoints_path, keep=1, filesystem=run.filesystem)
        store.save(Record(step=3, meta={}, groups={}))
        assert told == [True]
        assert json.loads((path / "run.json").read_text()) == {"run_id": run.run_id, "term": 1}
        assert [entry.name for entry in run.checkpoints_path.iterdir()] == ["step-000000003"]
        assert run.config_path.read_text() == (tmp_path / "elsewhere" / "config.toml").read_text()
        with pytest.raises(RunDirBusy, match=str(os.getpid())):  # nobody else is let in
            RunDir.open(path, resume=True)
        RunDir.open(tmp_path / "elsewhere", resume=True).close()  # which is nobody's any more
        (path / "run.json").unlink()
        store.save(Record(step=5, meta={}, groups={}))  # the lock that is there is its own
        (path / "run.json").write_text(json.dumps({"run_id": "0" * 16, "term": 1}))
        with pytest.raises(Superseded, match="another run has begun there"):
            store.save(Record(step=4, meta={}, groups={}))


@pytest.mark.parametrize("content", [b"", b'{"run_id": "0123', b"[]"])
def test_a_damaged_identity_is_written_anew_while_the_run_goes_on(tmp_path: Path, content: bytes) -> None:
    """Nobody else leaves half a file there: who takes a run over puts a whole one in its place."""
    with RunDir.open(tmp_path, resume=True) as run:
        run.next_term()
        store = CheckpointStore(run.checkpoints_path, keep=9, filesystem=run.filesystem)
        (tmp_path / "run.json").write_bytes(content)
        store.save(Record(step=3, meta={}, groups={}))
        assert json.loads((tmp_path / "run.json").read_text()) == {"run_id": run.run_id, "term": 1}
        (tmp_path / "run.json").write_bytes(content)
        (tmp_path / ".lock").rename(tmp_path / "elsewhere")  # the directory may be somebody else's by now
        with pytest.raises(RunDirUnusable, match=r"put that file back") as caught:
            store.save(Record(step=4, meta={}, groups={}))
        assert "--resume never" not in str(caught.value)
        assert (tmp_path / "run.json").read_bytes() == content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(42), "it is no JSON"),
        (b"\xff\xfe\xfd", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        (b"[]", "it says nothing of a run"),
        (b"{}", "it says nothing of a run"),
        (b'{"run_id": "0123456789abcdef", "term": -1}', "values out of range"),
        (b'{"run_id": 7, "term": 1}', "values out of range"),
    ],
)
def test_what_is_wrong_with_an_identity_is_said_in_plain_words(tmp_path: Path, content: bytes, reason: str) -> None:
    with RunDir.open(tmp_path, resume=True) as run:
        run.next_term()
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(StoreError, match=rf"is damaged \({reason}\); start with"), RunDir.open(tmp_path, resume=True):
        pass


def test_who_was_superseded_stays_so_whatever_becomes_of_the_identity(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, resume=True) as run:
        run.next_term()
        identity = tmp_path / "run.json"
        identity.write_text(json.dumps({"run_id": run.run_id, "term": 2}))  # by a machine that has not our lock
        with pytest.raises(Superseded, match="term 2 has taken the run over"):
            run.filesystem.fence()
        identity.write_bytes(b"\0" * 80)
        with pytest.raises(Superseded, match="term 2 has taken the run over"):
            run.filesystem.fence()
        assert identity.read_bytes() == b"\0" * 80
        identity.unlink()
        with pytest.raises(Superseded, match="term 2 has taken the run over"):
            run.filesystem.fence()
        assert not identity.exists()


@pytest.mark.parametrize("abandoned", ["", "abandoned-"])
@pytest.mark.parametrize("kind", ["checkpoint", "journal"])
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"\0" * 80), Path.unlink])
def test_an_identity_is_written_anew_only_where_no_later_term_has_left_anything(
    tmp_path: Path, damage: Callable[[Path], Any], kind: str, abandoned: str
) -> None:
    with RunDir.open(tmp_path, resume=True) as run:
        run.next_term()

        def leave(term: int, run_id: str = run.run_id) -> None:
            if kind == "checkpoint":
                store = CheckpointStore(run.checkpoints_path)
                left = store.save(Record(step=term, meta={"run_id": run_id, "term": term}, groups={})).path
            else:
                journal = Journal(run.journal_path, run_id=run_id, fingerprint="model")
                journal.begin(0, term)
                journal.close()
                left = max(run.journal_path.glob("segment-*"))
            left.rename(left.with_name(abandoned + left.name))

        leave(1)
        leave(7, "0" * 16)
        damage(tmp_path / "run.json")
        run.filesystem.fence()
        assert json.loads((tmp_path / "run.json").read_text()) == {"run_id": run.run_id, "term": 1}
        leave(2)
        damage(tmp_path / "run.json")
        with pytest.raises(Superseded, match="term 2 has taken the run over"):
            run.filesystem.fence()


def test_a_damaged_identity_beside_checkpoints_is_no_reason_to_begin_anew(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, resume=True) as run:
        CheckpointStore(run.checkpoints_path, filesystem=run.filesystem).save(Record(step=3, meta={}, groups={}))
    (tmp_path / "run.json").write_bytes(b"")
    said = unusable(tmp_path)
    assert f"another --run-dir and --resume {tmp_path / 'checkpoints' / 'step-...'}" in said
    assert "--resume never" not in said


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    path, is_directory = tmp_path / "a", "a directory stands where a file is needed"
    (path / ".lock").mkdir(parents=True)
    assert f"{is_directory} ({path / '.lock'}); move it away" in unusable(path)
    (path / ".lock").rmdir()
    (path / ".lock").symlink_to(path / ".lock")
    assert f"stands where a file or a directory is needed ({path / '.lock'}); move" in unusable(path)
    (path / ".lock").unlink()
    (path / ".lock").symlink_to(path / "nowhere" / "lock")
    assert f"{path / '.lock'} is a symbolic link that leads nowhere; remove it" in unusable(path)
    file = tmp_path / "file"
    file.write_text("")
    assert f"a file stands where a directory is needed ({file}); move it away" in unusable(file / "x" / "y")
    with RunDir.open(tmp_path / "c", resume=True) as run:
        store = CheckpointStore(run.checkpoints_path, filesystem=run.filesystem)
        run.checkpoints_path.write_text("")
        with pytest.raises(StoreError, match=re.escape(f"is needed ({run.checkpoints_path}); move it away")):
            store.save(Record(step=3, meta={}, groups={}))
        run.config_path.mkdir()
        with pytest.raises(StoreError, match=re.escape(f"{is_directory} ({run.config_path}); move it away")):
            run.write_config({"name": "x"})


def test_one_that_is_made_anew_on_a_full_disk_is_told_of(tmp_path: Path) -> None:
    class Full(Filesystem):
        full = False

        def rename(self, source: Path, target: Path) -> None:
            if self.full and target.name == "config.toml":
                raise OSError(errno.ENOSPC, "No space left on device")
            super().rename(source, target)

    path, disk, told = tmp_path / "run", Full(), []
    with RunDir.open(path, resume=True, filesystem=disk) as run:
        run.write_config({"name": "x"})
        run.on_made_anew = lambda: told.append("anew")
        shutil.rmtree(path)
        disk.full = True
        with pytest.raises(StoreError, match="the disk is full"):
            run.filesystem.fence()
        run.filesystem.fence()
    assert told == ["anew"]


def test_who_has_begun_where_it_was_deleted_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDir.open(path, resume=True) as run:
        shutil.rmtree(path)
        with RunDir.open(path, resume=True):
            (path / "run.json").unlink()  # as if it had not come to that yet
            with pytest.raises(Superseded, match="another coordinator has begun there"):
                run.filesystem.fence()


def test_a_fresh_start_takes_nothing_up_that_another_machine_writes_meanwhile(tmp_path: Path) -> None:
    """Its coordinator finds no run.json for a moment, and makes its own anew."""
    path = tmp_path / "run"

    class Apart(Filesystem):
        """Its locks do not reach from machine to machine."""

        def lock(self, file: IO[str]) -> None:
            pass

    with RunDir.open(path, resume=True, filesystem=Apart()) as other:
        other.next_term()

        class Slow(Filesystem):
            def sync_directory(self, directory: Path) -> None:
                super().sync_directory(directory)
                if not (path / "run.json").exists():
                    other.filesystem.fence()

        with RunDir.open(path, resume=False, filesystem=Slow()) as run:
            assert (run.resumes, run.term) == (False, 0)
            assert run.run_id != other.run_id
            with pytest.raises(Superseded, match="another run has begun there"):
                other.filesystem.fence()


def test_leftovers_of_dead_writes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-run.json-0badcafe").write_text("half")
    RunDir.open(tmp_path, resume=True).close()
    assert not (tmp_path / ".tmp-run.json-0badcafe").exists()


def unusable(path: Path, **arguments: Any) -> str:
    with pytest.raises(RunDirUnusable) as caught:
        RunDir.open(path, resume=True, **arguments)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_places_that_cannot_hold_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "a file of this name is in the way" in unusable(tmp_path / "file")
    assert "a file stands where a directory is needed" in unusable(tmp_path / "file" / "run")
    assert "disk is full" in unusable(tmp_path / "full", filesystem=FullDisk())
    assert list((tmp_path / "full").iterdir()) == [tmp_path / "full" / ".lock"]

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(rundir, "regular", denied)
    assert "permission denied; make it writable" in unusable(tmp_path / "denied")


def test_a_disk_that_has_no_room_for_the_lock_is_told(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        assert "cannot lock it" in unusable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"run_id": "x", "term": 1}',
        b'{"run_id": 1, "term": 1}',
        b'{"run_id": "0123456789abcdef", "term": 9223372036854775808}',
        b'{"run_id": "0123456789abcdef", "term": 9223372036854775807}',
        b"[" * 200_000,
    ],
)
def test_a_damaged_identity_is_not_guessed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    assert "--resume never" in unusable(tmp_path)
    with RunDir.open(tmp_path, resume=False) as run:
        assert run.set_aside is not None
        assert (run.set_aside / "run.json").read_bytes() == content


def test_the_config_is_readable_toml(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", resume=True) as run:
        run.write_config({"port": 5555})
        run.write_config({"port": 5556, "tls": {"ca_file": None, "on": True}})
        assert run.config_path.read_text() == "port = 5556\n\n[tls]\n# ca_file is not set\non = true\n"
        run._filesystem = FullDisk()
        with pytest.raises(StoreError, match="disk is full"):
            run.write_config({"port": 1})
        assert "5556" in run.config_path.read_text()
        assert not list(run.path.glob(".tmp-*"))


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
scalars = scalars | st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.\"'\n é", max_size=3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text("ab.\"'\n é", max_size=3), values, max_size=4))
def test_toml_reads_back(mapping: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(mapping)) == mapping


def test_toml_of_what_json_and_toml_see_differently() -> None:
    mapping = {"inf": math.inf, "ninf": -math.inf, "del": "\x7f", "path": Path("a/b"), "pair": (1, 2), "none": None}
    read = tomllib.loads(to_toml(mapping))
    assert read == {"inf": math.inf, "ninf": -math.inf, "del": "\x7f", "path": "a/b", "pair": [1, 2]}
    assert math.isnan(tomllib.loads(to_toml({"x": math.nan}))["x"])
    with pytest.raises(StoreError) as caught:
        to_toml({"a": {"b": [1, None]}})
    assert caught.value.path == "a.b.1"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_with_tied_weights_is_exported_for_the_library(tmp_path: Path) -> None:
    model, twin = Tied(), Tied()
    path = tmp_path / "deep" / "model.safetensors"
    assert export_model(model, path) == path.stat().st_size
    safetensors.torch.load_model(twin, path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    export_model(twin, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(StoreError, match="disk is full"):
        export_model(Tied(), path, filesystem=FullDisk())
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_once_a_later_term_has_begun_nothing_is_put_there_or_removed(tmp_path: Path) -> None:
    with RunDir.open(tmp_path / "run", resume=True) as run:
        run.next_term()
        store = CheckpointStore(run.checkpoints_path, keep=1, filesystem=run.filesystem)
        store.save(Record(step=3, meta={}, groups={}))
        identity = json.loads((run.path / "run.json").read_text())
        (run.path / "run.json").write_text(
            json.dumps(identity | {"term": 2})
        )  # as a machine does that has not our lock
        with pytest.raises(Superseded, match="term 2 has taken the run over"):
            store.save(Record(step=4, meta={}, groups={}))
        assert [path.name for path in run.checkpoints_path.iterdir()] == ["step-000000003"]
        with pytest.raises(Superseded):
            store.abandon_after(0)


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_what_a_run_writes_is_for_its_owner(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with RunDir.open(tmp_path / "run", resume=True) as run:
            export_model(nn.Linear(2, 2), run.model_path)
            run.filesystem.make_directory(run.checkpoints_path)
            made = (run.path, run.model_path, run.checkpoints_path, run.path / "run.json")
            modes = {path.name: path.stat().st_mode & 0o777 for path in made}
    finally:
        os.umask(before)
    assert modes == {"run": 0o700, "model.safetensors": 0o600, "checkpoints": 0o700, "run.json": 0o600}


def test_what_is_told_of_a_model_is_no_tensor_of_it(tmp_path: Path) -> None:
    path, model = tmp_path / "best.safetensors", Tied()
    export_tensors(model.state_dict(), path, about={"about": '{"step": 3}'})
    with path.open("rb") as file:
        assert read_metadata(file, path.stat().st_size)["about"] == '{"step": 3}'
        file.seek(0)
        assert read_tensors(file, path.stat().st_size, lambda _: None).keys() == model.state_dict().keys()
    safetensors.torch.load_model(Tied(), path)
    path.write_bytes(b"12345678901")
    with path.open("rb") as file, pytest.raises(CheckpointCorrupt):
        read_metadata(file, 11)
