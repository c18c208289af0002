"""Checkpoints: a directory per record, whole or absent, and refused when a single bit differs.

``checkpoints/step-000000123/`` holds ``manifest.json`` (format, step, meta, and each file's size and digest, with
a digest over the manifest itself) and one safetensors file per group of tensors. A record is written into a
temporary directory beside, every file synced, the manifest last, then renamed into place; older ones are pruned
only after that. A step that is saved again gets a new revision (``step-000000123.1``) before the old one goes, so
there is no moment without a whole record.

One writer at a time (the run directory's lock sees to it). Blocking: callers run it in an executor. Digests
detect damage, they do not authenticate. No clock takes part in any decision.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from w5xde_async.errors import CheckpointCorrupt, StoreError
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import (
    Filesystem,
    disk_errors,
    explain,
    read_regular,
    regular,
    temporary_beside,
    unused,
)
from w5xde_async.store.state import JSON
from w5xde_async.store.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_DIGEST_BYTES = 32
#: So often at most are records looked for whose last list another coordinator has made untrue.
_MOST_LOOKS = 8

_DIRECTORY = re.compile(r"step-(\d{9,18})(?:\.(\d{1,9}))?")
_ABANDONED = re.compile(r"abandoned-(step-(\d{9,18})(?:\.\d{1,9})?)(?:-\d{1,9})?")
_GROUP = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What a checkpoint holds: a step, anything JSON, and groups of tensors (``model``, ``optimizer``)."""

    step: int
    meta: dict[str, JSON]
    groups: dict[str, dict[str, Tensor]]

    @property
    def beside(self) -> list[str]:
        """Attributes of the optimizer that its steps had changed, and that are not in it."""
        names: Any = self.meta.get("beside", [])
        return [*map(str, names)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A record on the disk; ``seconds`` is what writing it took. ``oldest``: of the newest that are kept, the oldest
    one's step; 0 where what is over them could not be removed."""

    path: Path
    nbytes: int
    seconds: float
    oldest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A record that was passed over, and what is wrong with it. ``run_id``: of the other run that it belongs to."""

    path: Path
    reason: str
    run_id: str = ""


def is_record(path: Path) -> bool:
    """Whether a checkpoint lies there, whole or not."""
    there = os.path.isdir(path)  # not so a name that is too long, of which pathlib raises
    return there and (_DIRECTORY.fullmatch(path.name) is not None or os.path.exists(path / MANIFEST))


class CheckpointStore:
    """The checkpoints of one run, newest first by step; holds no file open and no state of its own."""

    def __init__(
        self, directory: Path, *, keep: int = 3, filesystem: Filesystem | None = None, run_id: str = "",
        asked_for: Path | None = None,
    ) -> None:  # fmt: skip
        """``keep``: newest checkpoints that are kept. ``run_id``: the run's, where what another has written is not
        to be taken for one of its own. ``asked_for``: the record that this start was told to go on from; it stays,
        beside those, for the next start that is told the same. Raises ValueError where ``keep`` is less than 1."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._run_id = run_id
        self._asked_for = None if asked_for is None else asked_for.resolve()
        self._directory = directory
        self._keep = keep
        self._filesystem = filesystem or Filesystem()

    def save(self, record: Record) -> SavedCheckpoint:
        """Write ``record`` durably, then remove what is over ``keep``. The record just written is never removed.

        Raises:
            StoreError: nothing was removed, and no part of the record stays, or all of it does, where only its name
                may not have reached the disk; says where, why and what to do.
        """
        began = time.perf_counter()
        meta = _plain_meta(record.meta)
        if type(record.step) is not int or not 0 <= record.step < 10**18:
            raise StoreError(str(self._directory), f"step {record.step!r} is not a step number")
        for group in record.groups:
            if not _GROUP.fullmatch(group) or group == "manifest":
                raise StoreError(str(self._directory), f"{group!r} cannot name a group of tensors")
        with disk_errors(self._directory, "save a checkpoint"):
            self._filesystem.make_directories(self._directory)
            target = self._unused_name(record.step)
            temporary = temporary_beside(target)
            try:
                nbytes = self._write(temporary, record, meta)
                failpoint("checkpoint.rename.before")
                self._filesystem.rename(temporary, target)
            except BaseException:
                with suppress(OSError):
                    self._filesystem.remove(temporary)
                raise
            failpoint("checkpoint.rename.after")
            self._filesystem.sync_directory(self._directory)
            failpoint("checkpoint.sync_directory.after")
        oldest = self._prune(target)
        return SavedCheckpoint(path=target, nbytes=nbytes, seconds=time.perf_counter() - began, oldest=oldest)

    def latest(self) -> tuple[Record | None, list[Skipped]]:
        """The newest whole record of this run, and every newer one that is damaged, or another run's.

        A record that is gone when it is read is not damaged: another coordinator of the run, on a disk whose locks do
        not reach it, has saved newer ones meanwhile and removed that one. They are looked for again.

        Raises:
            StoreError: the directory itself cannot be read.
        """
        looks = 0
        while True:
            looks += 1
            skipped: list[Skipped] = []
            for path in reversed(self._paths()):
                try:
                    record = self.load(path)
                    other = self._other(record.meta)
                    if not other:
                        return record, skipped
                    reason = (
                        f"run {other} has written it, and this is run {self._run_id}; --resume with its path takes it"
                    )
                    skipped.append(Skipped(path=path, reason=reason, run_id=other))
                except StoreError as error:
                    if looks < _MOST_LOOKS and not path.exists():
                        break
                    skipped.append(Skipped(path=path, reason=error.reason))
            else:
                return None, skipped

    def load(self, path: Path) -> Record:
        """Read and verify one record.

        Raises:
            CheckpointCorrupt: a file is missing, cut short or altered; ``reason`` names it.
            StoreError: it is not there, cannot be read, or is of a newer format.
        """
        with disk_errors(path, "load a checkpoint"):
            if not path.is_dir():
                raise StoreError(str(path), "there is no checkpoint here; --resume takes a step-... directory")
            body = _read_manifest(path)
            try:
                step, meta, files = body["step"], body["meta"], dict(body["files"])
                if type(step) is not int or not isinstance(meta, dict):
                    raise TypeError("a step is a whole number, and what is noted with it has names")
                groups = {name: self._load_group(path, name, **entry) for name, entry in files.items()}
                record = Record(step=step, meta=meta, groups=groups)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointCorrupt(str(path), f"{MANIFEST} is not complete ({error!r})") from error
        named = _DIRECTORY.fullmatch(path.name)
        if named and int(named[1]) != step:
            raise CheckpointCorrupt(str(path), f"holds step {step}, not the step of its name")
        return record

    def meta(self, path: Path | None = None) -> dict[str, JSON]:
        """What was noted with a record, without reading its tensors: of the newest that can be read, or of ``path``.
        Empty where there is none."""
        for known in [path] if path is not None else list(reversed(self._paths())):
            with suppress(StoreError, OSError):
                meta = _read_manifest(known)["meta"]
                meta = dict(meta) if isinstance(meta, dict) else {}
                if path is not None or not self._other(meta):
                    return meta
        return {}

    def newest_term(self, run_id: str) -> int:
        """The newest term of a run that a record names, an abandoned one too; 0: none does."""
        metas = [self.meta(path) for path in self._directory.glob("*step-*")]
        terms = [meta.get("term") for meta in metas if meta.get("run_id") == run_id]
        return max((term for term in terms if isinstance(term, int)), default=0)

    def _other(self, meta: dict[str, JSON]) -> str:
        """The run that has written a record, where that is another; else empty."""
        found = meta.get("run_id")
        return str(found) if self._run_id and found not in (None, self._run_id) else ""

    def ends_with(self, path: Path) -> bool:
        """Whether a record at ``path`` is the newest of this store, the first that ``latest`` looks at."""
        return path.resolve() in [known.resolve() for known in self._paths()[-1:]]

    def steps(self) -> list[int]:
        """The steps that have a record, ascending, whole or not."""
        return sorted({_order(path)[0] for path in self._paths()})

    def abandon_after(self, step: int) -> list[Path]:
        """Set aside every record later than ``step`` and return where they lie now.

        Called when a run goes on from ``step`` though later records exist (damaged ones, or an earlier one chosen by
        hand): from there the run is a different one, and ``latest`` must not jump back to them. Nothing is lost:
        they keep their content under ``abandoned-...`` and count no longer towards ``keep``.
        """
        moved = []
        with disk_errors(self._directory, "set later checkpoints aside"):
            for path in self._paths():
                if _order(path)[0] > step:
                    target = unused(path.with_name(f"abandoned-{path.name}"))
                    self._filesystem.rename(path, target)
                    moved.append(target)
            if moved:
                self._filesystem.sync_directory(self._directory)
        return moved

    def abandoned(self) -> list[tuple[int, Path, str]]:
        """Of the records that ``abandon_after`` has set aside: step, where it lies, and its name before; the latest
        step first."""
        with disk_errors(self._directory, "list the checkpoints"):
            found = [(_ABANDONED.fullmatch(path.name), path) for path in self._directory.glob("abandoned-step-*")]
        return sorted([(int(name[2]), path, name[1]) for name, path in found if name is not None], reverse=True)

    # --- writing

    def _unused_name(self, step: int) -> Path:
        revisions = [_order(path)[1] for path in self._paths() if _order(path)[0] == step]
        return self._directory / (f"step-{step:09d}" + (f".{max(revisions) + 1}" if revisions else ""))

    def _write(self, temporary: Path, record: Record, meta: JSON) -> int:
        filesystem = self._filesystem
        filesystem.make_directory(temporary)
        failpoint("checkpoint.files.before")
        files: dict[str, JSON] = {}
        total = 0
        for group, tensors in record.groups.items():
            try:
                nbytes, digest = self._write_group(temporary / f"{group}.safetensors", tensors)
            except StoreError as error:
                raise StoreError(f"{group}: {error.path}", error.reason) from error
            files[group] = {"nbytes": nbytes, "blake2b": digest}
            total += nbytes
        manifest = _encode_manifest({"format": FORMAT, "step": record.step, "files": files, "meta": meta})
        failpoint("checkpoint.manifest.before")
        with filesystem.create(temporary / MANIFEST) as file:
            filesystem.write(file, manifest)
            filesystem.sync(file)
        failpoint("checkpoint.manifest.after")
        filesystem.sync_directory(temporary)  # the files' names must be as durable as their bytes
        return total + len(manifest)

    def _write_group(self, path: Path, tensors: dict[str, Tensor]) -> tuple[int, str]:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        with self._filesystem.create(path) as file:

            def sink(data: bytes | memoryview) -> None:
                self._filesystem.write(file, data)
                digest.update(data)

            nbytes = write_tensors(sink, tensors)
            self._filesystem.sync(file)
        return nbytes, digest.hexdigest()

    def _prune(self, saved: Path) -> int:
        """Remove older revisions of ``saved`` and the oldest records over ``keep``, and return the step of the oldest
        that stays for ``keep``. A failure costs only space. What another run has written stays, and counts for nothing;
        what was asked for stays too."""
        step, doomed = _order(saved)[0], []
        try:
            others = [path for path in self._listed() if path != saved and not self._other(self.meta(path))]
            kept = sorted({_order(path)[0] for path in others} - {step}, reverse=True)[: self._keep - 1]
            failpoint("checkpoint.prune.before")
            for path in others:
                if _order(path)[0] not in kept and path.resolve() != self._asked_for:
                    # Renamed first, durably, so that a half-removed record never looks like a damaged one.
                    doomed.append(temporary_beside(path))
                    self._filesystem.rename(path, doomed[-1])
            if doomed:
                self._filesystem.sync_directory(self._directory)
                failpoint("checkpoint.prune.half")
            for path in doomed:
                self._filesystem.remove(path)
            failpoint("checkpoint.prune.after")
            return min([*kept, step])
        except OSError as error:
            logger.warning("checkpoint not pruned path=%s reason=%s", self._directory, explain(error))
            return 0

    # --- reading

    def _paths(self) -> list[Path]:
        """The records' directories, oldest first."""
        with disk_errors(self._directory, "list checkpoints"):
            return self._listed()

    def _listed(self) -> list[Path]:
        found = list(self._directory.iterdir()) if self._directory.is_dir() else []
        return sorted((path for path in found if _DIRECTORY.fullmatch(path.name)), key=_order)

    def _load_group(self, path: Path, group: str, *, nbytes: int, blake2b: str) -> dict[str, Tensor]:
        if not _GROUP.fullmatch(group):
            raise CheckpointCorrupt(str(path), f"{MANIFEST} names a file {group!r}")
        name = f"{group}.safetensors"
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        try:
            with open(path / name, "rb", opener=regular) as file:
                found = file.seek(0, 2)
                file.seek(0)
                if found != nbytes:
                    raise CheckpointCorrupt(str(path), f"{name} has {found} bytes, the manifest says {nbytes}")
                tensors = read_tensors(file, nbytes, digest.update)
        except FileNotFoundError as error:
            raise CheckpointCorrupt(str(path), f"{name} is missing") from error
        except CheckpointCorrupt as error:
            if error.path == str(path):
                raise
            raise CheckpointCorrupt(str(path), f"{name}: {error.path}: {error.reason}") from error
        if digest.hexdigest() != blake2b:
            raise CheckpointCorrupt(str(path), f"{name} does not match its digest")
        return tensors


def _order(path: Path) -> tuple[int, int]:
    named = _DIRECTORY.fullmatch(path.name)
    assert named is not None
    return int(named[1]), int(named[2] or 0)


def _plain_meta(meta: dict[str, JSON]) -> JSON:
    """``meta`` checked to survive JSON, which would quietly turn int keys to str and tuples to lists."""
    try:
        same = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError("meta", f"is not plain JSON ({error})") from error
    if not same:
        raise StoreError("meta", "holds int keys or tuples, which JSON does not keep; use pack_state for those")
    return meta


def _encode_manifest(body: dict[str, Any]) -> bytes:
    digest = hashlib.blake2b(json.dumps(body).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1).encode() + b"\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        data = read_regular(path / MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(str(path), f"{MANIFEST} is missing") from error
    try:
        body = json.loads(data)
        body.pop("digest")
        # Byte for byte: an altered blank or a doubled key parses to the same values.
        whole, version = _encode_manifest(body) == data, body["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(str(path), f"{MANIFEST} is damaged ({type(error).__name__})") from error
    if not whole:
        raise CheckpointCorrupt(str(path), f"{MANIFEST} does not match its digest")
    if version != FORMAT:
        raise StoreError(str(path), f"format {version} is not one this version reads; upgrade w5xde-async")
    assert isinstance(body, dict)
    return body
