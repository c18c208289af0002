"""No torn or altered checkpoint is ever loaded, whatever happens between two calls to the disk."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import safetensors.torch
import torch

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.store import checkpoint
from w5xde_async.store.checkpoint import CheckpointStore, Record
from w5xde_async.store.filesystem import Filesystem
from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.store.tensors import read_tensors

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


class Crash(BaseException):
    """The process dies here."""


class MortalFilesystem(Filesystem):
    """Dies before call number ``die_at``; with ``forgets``, what was not synced is lost, as in a power cut."""

    def __init__(self, die_at: int, *, forgets: bool = False) -> None:
        self.calls = 0
        self.names: list[str] = []
        self._die_at = die_at
        self._dead = False
        self._forgets = forgets
        self._unsynced_files: dict[Path, int] = {}
        self._unsynced_names: dict[Path, list[Callable[[], None]]] = {}

    def _tick(self, name: str) -> None:
        if self.calls >= self._die_at:
            self._dead = True
            raise Crash
        self.calls += 1
        self.names.append(name)

    def _on_power_cut(self, directory: Path, undo: Callable[[], None]) -> None:
        self._unsynced_names.setdefault(directory, []).append(undo)

    def make_directory(self, path: Path) -> None:
        self._tick("make_directory")
        super().make_directory(path)
        self._on_power_cut(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))

    def create(self, path: Path) -> BinaryIO:
        self._tick("create")
        self._unsynced_files[path] = 0
        self._on_power_cut(path.parent, lambda: path.unlink(missing_ok=True))
        return super().create(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._tick("write")
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._tick("sync")
        super().sync(file)
        self._unsynced_files.pop(Path(file.name))

    def rename(self, source: Path, target: Path) -> None:
        self._tick("rename")
        super().rename(source, target)

        def undo() -> None:
            if target.exists() and not source.exists():
                os.replace(target, source)

        self._on_power_cut(target.parent, undo)

    def sync_directory(self, path: Path) -> None:
        self._tick("sync_directory")
        super().sync_directory(path)
        self._unsynced_names.pop(path, None)

    def remove(self, path: Path) -> None:
        if self.calls == self._die_at and not self._dead:
            next(path.iterdir()).unlink()  # removing a tree is many calls: die among them
        self._tick("remove")
        super().remove(path)

    def power_cut(self) -> None:
        """Bring the disk to a state in which everything that was not made durable is gone."""
        if not self._forgets:
            return
        for path in self._unsynced_files:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for directory in sorted(self._unsynced_names, key=lambda path: -len(path.parts)):
            for undo in reversed(self._unsynced_names[directory]):
                undo()


class FailingFilesystem(Filesystem):
    """Raises an ``OSError`` at the ``at``-th call of one kind; every other call works."""

    def __init__(self, call: str, code: int, *, at: int = 1) -> None:
        self._left = at
        original = getattr(super(), call)

        def fail(*args: object) -> object:
            self._left -= 1
            if self._left == 0:
                raise OSError(code, os.strerror(code))
            return original(*args)

        setattr(self, call, fail)


def record(step: int) -> Record:
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3) + step
    skeleton, tensors = pack_state({"state": {0: {"exp_avg": weight * 2, "step": torch.tensor(float(step))}}})
    model = {"weight": weight, "tied": weight, "bias": torch.tensor([step], dtype=torch.bfloat16), "n": torch.tensor(1)}
    meta = {"optimizer": skeleton, "loss": 0.1, "text": "é"}
    return Record(step=step, meta=meta, groups={"model": model, "optimizer": tensors})


def assert_whole(loaded: Record | None, step: int) -> None:
    assert loaded is not None
    expected = record(step)
    assert loaded.step == step
    assert loaded.meta == expected.meta
    for group, tensors in expected.groups.items():
        assert set(loaded.groups[group]) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded.groups[group][name].dtype == tensor.dtype
            assert torch.equal(loaded.groups[group][name], tensor)


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith(".")]


def test_a_record_comes_back_with_ties_and_optimizer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    saved = store.save(record(123))
    assert saved.path == tmp_path / "run" / "checkpoints" / "step-000000123"
    assert saved.nbytes == sum(path.stat().st_size for path in saved.path.iterdir())
    assert sorted(path.name for path in saved.path.iterdir()) == FILES
    loaded, skipped = store.latest()
    assert skipped == []
    assert_whole(loaded, 123)
    assert loaded is not None
    assert loaded.groups["model"]["weight"] is loaded.groups["model"]["tied"]
    state = unpack_state(loaded.meta["optimizer"], loaded.groups["optimizer"])
    assert torch.equal(state["state"][0]["exp_avg"], record(123).groups["model"]["weight"] * 2)


def test_the_files_are_the_librarys_format(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(i).to(dtype) for i, dtype in enumerate([torch.bool, torch.float64, torch.float16])}
    tensors["scalar"] = torch.tensor(3, dtype=torch.int8)
    tensors["turned"] = torch.arange(6).reshape(2, 3).t()
    saved = CheckpointStore(tmp_path).save(Record(step=1, meta={}, groups={"model": tensors, "empty": {}}))
    read = safetensors.torch.load_file(saved.path / "model.safetensors")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert CheckpointStore(tmp_path).load(saved.path).groups["empty"] == {}
    data = (saved.path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert all(entry["data_offsets"][0] % tensors[name].element_size() == 0 for name, entry in header.items())


def test_an_empty_directory_has_no_record(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.latest() == (None, [])
    assert store.steps() == []


def test_the_oldest_over_keep_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10, 11):
        store.save(record(step))
    assert store.steps() == [10, 11]
    assert leftovers(tmp_path) == []


def test_the_record_just_saved_stays_though_damaged_ones_are_later(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (8, 9):
        store.save(record(step))
        (tmp_path / f"step-{step:09d}" / "manifest.json").unlink()
    store.save(record(5))
    loaded, skipped = store.latest()
    assert_whole(loaded, 5)
    assert [entry.path.name for entry in skipped] == ["step-000000009"]


@pytest.mark.parametrize("between", ["load", "_load_group"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_record_that_another_removes_meanwhile_is_not_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, times: int
) -> None:
    """Two coordinators of a run, on a disk whose locks do not reach from one to the other."""
    other = CheckpointStore(tmp_path, keep=1)
    other.save(record(1))
    looked = getattr(CheckpointStore, between)

    def meanwhile(store: CheckpointStore, *arguments: object, **named: object) -> object:
        if (newest := other.steps()[-1]) <= times:
            other.save(record(newest + 1))
        return looked(store, *arguments, **named)

    monkeypatch.setattr(CheckpointStore, between, meanwhile)
    loaded, skipped = CheckpointStore(tmp_path).latest()
    assert skipped == []
    assert_whole(loaded, times + 1)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(record(1))
    store.save(record(2))
    changed = Record(step=2, meta={"second": True}, groups={})
    store.save(changed)
    assert store.steps() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2
    assert store.latest() == (changed, [])
    store.save(record(2))
    assert_whole(store.latest()[0], 2)


def test_what_was_asked_for_stays_however_many_follow(tmp_path: Path) -> None:
    """Also where its step is saved again: the next start may be told the same."""
    asked_for = tmp_path / "step-000000002"
    CheckpointStore(tmp_path).save(record(2))
    store = CheckpointStore(tmp_path, keep=2, asked_for=asked_for)
    assert store.ends_with(asked_for)
    assert [store.save(record(step)).oldest for step in (2, 2, 3, 4, 5)] == [2, 2, 2, 3, 4]
    assert_whole(store.load(asked_for), 2)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5"], "no more than it is kept"
    assert not store.ends_with(asked_for)
    CheckpointStore(tmp_path, keep=2).save(record(6))
    assert store.steps() == [5, 6], "a start that is not told so needs it no more"


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def damage_remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [damage_truncate, damage_empty, damage_append, damage_remove])
def test_a_torn_file_falls_back_and_says_why(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path)
    store.save(record(1))
    saved = store.save(record(2))
    damage(saved.path / name)
    with pytest.raises(CheckpointCorrupt, match=name):
        store.load(saved.path)
    loaded, skipped = store.latest()
    assert_whole(loaded, 1)
    assert [entry.path for entry in skipped] == [saved.path]
    assert name in skipped[0].reason


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(record(2)).path
    original = (path / name).read_bytes()
    for position in range(len(original)):
        flipped = bytearray(original)
        flipped[position] ^= 1 << (position % 8)
        (path / name).write_bytes(flipped)
        with pytest.raises(CheckpointCorrupt):
            store.load(path)
    (path / name).write_bytes(original)
    assert_whole(store.load(path), 2)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [2**59], "data_offsets": [0, 2**61]},
        {"dtype": "F32", "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 65 + [2], "data_offsets": [0, 8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "x",
    ],
    ids=str,
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    with pytest.raises(CheckpointCorrupt):
        read_tensors(io.BytesIO(data), len(data), lambda _: None)


def test_a_record_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(record(1)).path
    with pytest.raises(CheckpointCorrupt, match="holds step 1"):
        store.load(path.rename(tmp_path / "step-000000009"))


@pytest.mark.parametrize("change", [
    {"step": math.inf}, {"step": 5.0}, {"step": True}, {"step": None}, {"format": None}, {"meta": []}, {"meta": None},
    {"files": [1]}, {"files": {"model": {"nbytes": math.inf, "blake2b": ""}}},
], ids=str)  # fmt: skip
def test_a_manifest_that_says_nonsense_under_a_digest_of_its_own_is_passed_over(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """None: that it does not say."""
    store = CheckpointStore(tmp_path)
    store.save(record(1))
    (tmp_path / "step-000000005").mkdir()
    body = {"format": 1, "step": 5, "files": {}, "meta": {}, **change}
    body = {name: value for name, value in body.items() if value is not None}
    (tmp_path / "step-000000005" / "manifest.json").write_bytes(checkpoint._encode_manifest(body))
    loaded, skipped = store.latest()
    assert_whole(loaded, 1)
    assert [passed.path.name for passed in skipped] == ["step-000000005"]
    if "format" in change:
        assert store.meta()["loss"] == 0.1


def test_a_newer_format_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("w5xde_async.store.checkpoint.FORMAT", 2)
        path = CheckpointStore(tmp_path).save(record(1)).path
    with pytest.raises(StoreError, match=r"format 2 .* upgrade"):
        CheckpointStore(tmp_path).load(path)


def num_calls(prepare: Callable[[Path], None], tmp_path: Path, saved: Record) -> int:
    directory = tmp_path / "count"
    prepare(directory)
    filesystem = MortalFilesystem(10**9)
    CheckpointStore(directory, keep=2, filesystem=filesystem).save(saved)
    return filesystem.calls


def two_records(directory: Path) -> None:
    store = CheckpointStore(directory, keep=2)
    store.save(record(1))
    store.save(record(2))


@pytest.mark.parametrize("forgets", [False, True], ids=["killed", "power-cut"])
@pytest.mark.parametrize("step", [3, 2], ids=["new-step", "same-step"])
def test_a_crash_between_any_two_calls_loses_nothing_that_was_saved(tmp_path: Path, step: int, forgets: bool) -> None:
    replacement = Record(step=step, meta=record(step).meta | {"again": True}, groups=record(step).groups)
    total = num_calls(two_records, tmp_path, replacement)
    assert total > 15
    outcomes = set()
    for die_at in range(total):
        directory = tmp_path / f"die-{die_at}"
        two_records(directory)
        filesystem = MortalFilesystem(die_at, forgets=forgets)
        with pytest.raises(Crash):
            CheckpointStore(directory, keep=2, filesystem=filesystem).save(replacement)
        filesystem.power_cut()

        store = CheckpointStore(directory, keep=2)
        Filesystem().sweep(directory)
        assert leftovers(directory) == []
        for path in directory.iterdir():
            store.load(path)  # no record may look damaged, older ones included
        loaded, _ = store.latest()
        assert loaded is not None
        if loaded.meta.get("again"):
            assert loaded.step == step
            outcomes.add("new")
        else:
            assert_whole(loaded, 2)
            outcomes.add("old")
        # Whatever happened, the run can go on from here.
        store.save(record(9))
        assert_whole(store.latest()[0], 9)
        shutil.rmtree(directory)
    assert outcomes == {"old", "new"}


def test_another_s_sweep_in_the_middle_of_a_save_leaves_no_record_that_looks_damaged(tmp_path: Path) -> None:
    """Of two machines whose locks do not reach each other one starts while the other saves."""

    class Halfway(Filesystem):
        """Comes to no more than the first file before the other goes on."""

        def remove(self, path: Path) -> None:
            (path / "manifest.json").unlink()
            raise OSError(errno.EINTR, "halfway")

    class Swept(Filesystem):
        def rename(self, source: Path, target: Path) -> None:
            Halfway().sweep(tmp_path)
            super().rename(source, target)

    two_records(tmp_path)
    with pytest.raises(StoreError):
        CheckpointStore(tmp_path, filesystem=Swept()).save(record(3))
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    found, skipped = CheckpointStore(tmp_path).latest()
    assert_whole(found, 2)
    assert skipped == []


@pytest.mark.parametrize("forgets", [False, True], ids=["killed", "power-cut"])
def test_a_save_that_returned_is_durable(tmp_path: Path, forgets: bool) -> None:
    filesystem = MortalFilesystem(10**9, forgets=forgets)
    store = CheckpointStore(tmp_path / "a" / "checkpoints", filesystem=filesystem)
    store.save(record(4))
    filesystem.power_cut()
    assert_whole(store.latest()[0], 4)


CALLS_OF_A_SAVE = {"make_directory": 1, "create": 3, "write": 8, "sync": 3, "sync_directory": 2, "rename": 1}


@pytest.mark.parametrize(("call", "at"), [(call, at) for call, n in CALLS_OF_A_SAVE.items() for at in range(1, n + 1)])
def test_a_full_disk_loses_nothing_and_leaves_nothing(tmp_path: Path, call: str, at: int) -> None:
    CheckpointStore(tmp_path).save(record(1))
    store = CheckpointStore(tmp_path, filesystem=FailingFilesystem(call, errno.ENOSPC, at=at))
    with pytest.raises(StoreError, match="disk is full; free some space") as caught:
        store.save(record(2))
    assert caught.value.path == str(tmp_path)
    assert leftovers(tmp_path) == []
    loaded, skipped = CheckpointStore(tmp_path).latest()
    assert skipped == []
    # Only the very last sync fails after the record is in place.
    assert_whole(loaded, 2 if (call, at) == ("sync_directory", 2) else 1)


def test_a_refused_write_says_what_to_do(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, filesystem=FailingFilesystem("create", errno.EACCES))
    with pytest.raises(StoreError, match="permission denied; make it writable"):
        store.save(record(1))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_to_prune_does_not_fail_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointStore(tmp_path, keep=1).save(record(1))
    store = CheckpointStore(tmp_path, keep=1, filesystem=FailingFilesystem("remove", errno.EACCES))
    store.save(record(2))
    assert "checkpoint not pruned" in caplog.text
    assert_whole(store.latest()[0], 2)


def test_a_failure_to_list_what_to_prune_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, listings = CheckpointStore(tmp_path), list[int]()

    def failing(path: Path, real: Callable[[Path], Iterator[Path]] = Path.iterdir) -> Iterator[Path]:
        listings.append(1)
        if len(listings) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", failing)
    store.save(record(1))
    assert "checkpoint not pruned" in caplog.text
    assert_whole(store.latest()[0], 1)


def test_later_records_can_be_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        store.save(record(step))
    assert [path.name for path in store.abandon_after(1)] == ["abandoned-step-000000002", "abandoned-step-000000003"]
    assert_whole(store.latest()[0], 1)
    store.save(record(2))
    assert [path.name for path in store.abandon_after(1)] == ["abandoned-step-000000002-1"]
    assert_whole(store.load(tmp_path / "abandoned-step-000000003"), 3)


@pytest.mark.parametrize(
    "bad",
    [
        Record(step=-1, meta={}, groups={}),
        Record(step=1, meta={}, groups={"../up": {}}),
        Record(step=1, meta={}, groups={"manifest": {}}),
        Record(step=1, meta={"x": float("nan")}, groups={}),
        Record(step=1, meta={"x": {1: 2}}, groups={}),  # type: ignore[dict-item]
        Record(step=1, meta={}, groups={"model": {"x": 1}}),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_lies_there(tmp_path: Path, bad: Record) -> None:
    with pytest.raises(StoreError):
        CheckpointStore(tmp_path).save(bad)
    assert list(tmp_path.iterdir()) == []


def test_loading_from_nowhere_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no checkpoint here"):
        CheckpointStore(tmp_path).load(tmp_path / "step-000000001")


def test_a_manifest_is_readable_json(tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path).save(record(7))
    manifest = json.loads((saved.path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["step"] == 7
    assert set(manifest["files"]) == {"model", "optimizer"}
