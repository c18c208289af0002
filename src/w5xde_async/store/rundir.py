"""The directory of one run: who holds it, what the run is called, and where its files lie.

Invariants: at most one process holds a directory (a lock the system drops with the process, so none is ever
stale); ``run_id`` is made once; a term that was handed out is never handed out again, whatever dies when; a new
run never writes over an old one. Small files are replaced atomically. What is in the files is their owners' matter.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from torch import Tensor, nn

from w5xde_async.errors import ExitCode, RunDirBusy, StoreError
from w5xde_async.store.checkpoint import CheckpointStore
from w5xde_async.store.failpoints import failpoint
from w5xde_async.store.filesystem import (
    FencedFilesystem,
    Filesystem,
    disk_errors,
    explain,
    is_at,
    read_regular,
    regular,
    replace_file,
)
from w5xde_async.store.journal import newest_term
from w5xde_async.store.tensors import write_tensors
from w5xde_async.store.toml import to_toml

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_IDENTITY = "run.json"
_GO_ON = (
    "put that file back from a copy, or go on from one of its checkpoints elsewhere, with another --run-dir and "
    "--resume {checkpoints}/step-..."
)
# What a run leaves behind, in the order in which it is set aside: journal and checkpoints first, so that a crash
# half-way can never leave a directory that resumes a run whose history is gone, and the best model before them, which
# another course would keep as its own; the identity last.
_CONTENT = (
    "journal", "best.safetensors", "checkpoints", "metrics.jsonl.kept", "metrics.jsonl", "loss.png",
    "model.safetensors", "config.toml", _IDENTITY,
)  # fmt: skip
#: Where the directory is a volume of its own, or what it lies in belongs to somebody else.
_NOT_BESIDE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
_MOST_TERM = (1 << 63) - 1  # which a message can still carry: the next one is handed out
_RUN_ID = re.compile(r"[0-9a-f]{16}")


class RunDirUnusable(StoreError):
    """The place asked for cannot hold a run; one line, exit code 2."""

    exit_code = ExitCode.USAGE


class _Damaged(RunDirUnusable):
    """run.json says nothing of a run."""


class Superseded(StoreError):
    """A later term has begun in this directory: what this process would write there no longer counts."""


class RunDir:
    """One run's directory, held until ``close()``. Make it with ``open``.

    ``resumes`` is True when it held a run that goes on; ``set_aside`` is where an old run's files were moved, if any.
    ``run_id``: sixteen hex digits that name the run for good, through every resume. ``term``: the one that was handed
    out last, 0 before the first.
    """

    def __init__(
        self,
        path: Path,
        lock: IO[str],
        filesystem: Filesystem,
        *,
        resume: bool,
        set_aside: Path | None,
        new_run_id: Callable[[], str],
    ) -> None:
        self.path = path
        self.identity_path = path / _IDENTITY
        self.config_path = path / "config.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.plot_path = path / "loss.png"
        self.model_path = path / "model.safetensors"
        self.best_path = path / "best.safetensors"
        self.checkpoints_path = path / "checkpoints"
        self.journal_path = path / "journal"
        self.set_aside = set_aside
        self._lock: IO[str] | None = lock
        self._making = threading.Lock()
        self._settings: Mapping[str, object] | None = None
        #: Called, by any thread, when the directory was made anew while the run goes on.
        self.on_made_anew: Callable[[], None] = lambda: None
        self._filesystem = filesystem
        self._superseded = ""  # by whom: for good, whatever lies there later
        # What lies there of a run that was set aside has been written since, by who does not know that: it is no run's.
        self.resumes = resume and (path / _IDENTITY).exists()
        self.run_id, self.term = self._read_identity() if self.resumes else (new_run_id(), 0)
        if not self.resumes:
            self._write_identity()

    @classmethod
    def open(
        cls, path: Path, *, resume: bool, filesystem: Filesystem | None = None,
        new_run_id: Callable[[], str] = lambda: os.urandom(8).hex(),
    ) -> RunDir:  # fmt: skip
        """Create (parents too) or reopen the directory and take its lock.

        ``resume=False`` on a directory that holds a run first moves that run's files to ``NAME.old-1``, ``-2``, ...
        beside it, or to ``old-1``, ``-2``, ... in it where it is a volume of its own. Files that no run made are left
        where they are.

        Raises:
            RunDirBusy: another process holds it; says which.
            RunDirUnusable: it cannot be created, written, locked or read, or a run would write over what none made.
        """
        filesystem = filesystem or Filesystem()
        lock = _take_lock(path, filesystem)
        try:
            try:
                _check_own(path)
                for directory in (path, path / "checkpoints", path / "journal"):
                    filesystem.sweep(directory)
                set_aside = None if resume else _set_aside(path, filesystem)
                return cls(path, lock, filesystem, resume=resume, set_aside=set_aside, new_run_id=new_run_id)
            except OSError as error:
                where = Path(str(error.filename)).name if error.filename else ""
                reason = f"{where}: {explain(error)}" if where and where != path.name else explain(error)
                raise RunDirUnusable(str(path), f"cannot prepare the run directory: {reason}") from error
        except BaseException:
            filesystem.unlock(lock)
            lock.close()
            raise

    @property
    def filesystem(self) -> Filesystem:
        """For what lies in this directory: once a later term has begun in it, it lets nothing be put there or removed.

        The lock keeps two processes of one machine apart; this, those of machines whose locks do not reach each other.
        """
        return FencedFilesystem(self._filesystem, self._check_term)

    def not_before(self, term: int) -> None:
        """A term that was handed out, as another file than run.json says, which may be an older copy."""
        self.term = max(self.term, term)

    def next_term(self) -> int:
        """A term higher than any before in this directory; on the disk before it is returned.

        Raises:
            StoreError: it could not be stored, and must not be used.
        """
        self.term += 1  # also when storing fails: the number may have reached the disk
        with disk_errors(self.path / _IDENTITY, "store the term"):
            failpoint("term.store.before")
            self._write_identity()
            failpoint("term.store.after")
        return self.term

    def write_config(self, settings: Mapping[str, object]) -> None:
        """Replace ``config.toml`` by ``settings``. Leaving secrets out is the caller's part.

        Raises:
            StoreError: the disk said no, or a value that TOML cannot express (``path`` is its key).
        """
        self._settings, text = settings, to_toml(settings).encode()
        with disk_errors(self.config_path, "write the settings"):
            replace_file(self._filesystem, self.config_path, lambda file: self._filesystem.write(file, text))

    def close(self) -> None:
        """Let others have the directory. Calling it twice is fine."""
        if self._lock is not None:
            self._filesystem.unlock(self._lock)
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_identity(self) -> tuple[str, int]:
        path = self.path / _IDENTITY
        reason = "it is no JSON"
        try:
            content = json.loads(read_regular(path))
            reason = "it says nothing of a run"
            run_id, term = content["run_id"], content["term"]
            reason = "values out of range"
            if not _RUN_ID.fullmatch(run_id) or type(term) is not int or not 0 <= term < _MOST_TERM:
                raise ValueError(reason)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            advice = "start with --resume never to set this run aside"
            if _holds_checkpoints(self.path):
                advice = _GO_ON.format(checkpoints=self.checkpoints_path)
            raise _Damaged(str(path), f"is damaged ({reason}); {advice}") from error
        return run_id, term

    def _check_term(self) -> None:
        if self._superseded:
            raise Superseded(str(self.path), self._superseded)
        try:
            try:
                run_id, stored = self._read_identity()
            except FileNotFoundError:
                self._make_anew()
                return
            except _Damaged:
                run_id, stored = self._mended_identity()
            if run_id != self.run_id:
                raise Superseded(str(self.path), "another run has begun there")
            self._require_newest(stored)
        except Superseded as error:
            self._superseded = error.reason
            raise

    def _require_newest(self, term: int) -> None:
        """Raises Superseded where this is later than ours."""
        if term > self.term:
            reason = f"a coordinator of term {term} has taken the run over; this one is of term {self.term}"
            raise Superseded(str(self.path), reason)

    def _require_newest_of_files(self) -> None:
        """As run.json says nothing: it would be ours from here on. Raises Superseded."""
        self._require_newest(CheckpointStore(self.checkpoints_path).newest_term(self.run_id))
        self._require_newest(newest_term(self.journal_path, self.run_id))

    def _mended_identity(self) -> tuple[str, int]:
        """It cannot be read, and this process has the directory: who takes a run over leaves no half a file. Raises
        Superseded where another coordinator has the directory too, on a machine that our lock does not reach."""
        with self._making:
            try:
                return self._read_identity()  # another thread was here first
            except _Damaged as error:
                if self._lock is None or not is_at(self._lock, self.path / _LOCK):
                    raise
                self._require_newest_of_files()
                logger.warning("%s is written anew, while the run goes on: it was damaged reason=%s",
                               self.path / _IDENTITY, error.__cause__)  # fmt: skip
            self._write_identity()
            return self.run_id, self.term

    def _make_anew(self) -> None:
        """It was deleted or moved. Nobody else can have begun here without writing his own: what is in memory goes
        where it was to go. Raises Superseded where somebody else just does."""
        with self._making:
            if (self.path / _IDENTITY).exists():
                return  # another thread was here first
            self._require_newest_of_files()
            logger.warning("the run directory was deleted or moved, and is made anew path=%s", self.path)
            self._filesystem.make_directories(self.path)
            if self._lock is not None and not is_at(self._lock, self.path / _LOCK):
                held = self._lock
                try:
                    self._lock = _take_lock(self.path, self._filesystem)
                except RunDirBusy as error:
                    raise Superseded(str(self.path), "another coordinator has begun there") from error
                self._filesystem.unlock(held)  # explicitly: a forked child may hold it too
                held.close()
            self._write_identity()
            self.on_made_anew()  # before anything else may fail: it is made anew once
            if self._settings is not None:
                self.write_config(self._settings)

    def _write_identity(self) -> None:
        content = json.dumps({"run_id": self.run_id, "term": self.term}).encode() + b"\n"
        identity = self.path / _IDENTITY
        replace_file(self._filesystem, identity, lambda file: self._filesystem.write(file, content))


def kept_run_id(path: Path) -> str:
    """Of the run that is kept in a directory, which somebody may hold; empty where nothing says so."""
    try:
        content = json.loads(read_regular(path / _IDENTITY))
        return str(content["run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def export_model(model: nn.Module, path: Path, *, filesystem: Filesystem | None = None) -> int:
    """Write a model's weights to ``path`` in one step; returns the bytes written.

    Tied weights are stored once; ``safetensors.torch.load_model`` reads the file into a model of the same kind.

    Raises:
        StoreError: the disk said no, or the state holds something that is not a tensor; ``path`` is as it was.
    """
    return export_tensors(model.state_dict(), path, filesystem=filesystem)


def export_tensors(
    tensors: Mapping[str, Tensor], path: Path, *, about: Mapping[str, str] | None = None,
    filesystem: Filesystem | None = None,
) -> int:  # fmt: skip
    """A state dict, as ``export_model`` writes one. ``about``: texts for the file's metadata. Raises StoreError."""
    filesystem = filesystem or Filesystem()
    nbytes = 0

    def fill(file: BinaryIO) -> None:
        nonlocal nbytes
        nbytes = write_tensors(partial(filesystem.write, file), tensors, about)

    with disk_errors(path, "write the model"):
        filesystem.make_directories(path.parent)
        replace_file(filesystem, path, fill)
    return nbytes


def _holds_checkpoints(path: Path) -> bool:
    return any((path / "checkpoints").glob("step-*/manifest.json"))


def _check_own(path: Path) -> None:
    """Raises RunDirUnusable where no run has been, and a file or folder has the name of one that a run writes."""
    if (path / _IDENTITY).exists():
        return
    if _holds_checkpoints(path):
        advice = _GO_ON.format(checkpoints=path / "checkpoints")
        raise RunDirUnusable(str(path), f"it holds checkpoints, and no run.json that says of which run: {advice}")
    for name in _CONTENT:
        if (there := path / name).is_file() or (there.is_dir() and any(there.iterdir())):
            reason = f"it holds {name}, which no run has made and a run would write over; choose another --run-dir"
            raise RunDirUnusable(str(path), reason)


def _set_aside(path: Path, filesystem: Filesystem) -> Path | None:
    content = [*path.glob("abandoned-*"), *(path / name for name in _CONTENT if (path / name).exists())]
    if not content:
        return None
    real = path.resolve()  # "." and links have no name of their own to build on
    target = _first_free(real.parent / f"{real.name}.old")
    try:
        filesystem.make_directories(target)  # whose name is on the disk before anything is moved there
        filesystem.rename(content[0], target / content[0].name)
    except OSError as error:
        if error.errno not in _NOT_BESIDE:
            raise
        with suppress(OSError):  # it may have been made
            target.rmdir()
        target = _first_free(real / "old")
        filesystem.make_directories(target)
        filesystem.rename(content[0], target / content[0].name)
    for entry in content[1:]:
        filesystem.rename(entry, target / entry.name)
    filesystem.sync_directory(target)
    filesystem.sync_directory(path)
    return target


def _first_free(stem: Path) -> Path:
    number = 1
    while (target := stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return target


def _take_lock(path: Path, filesystem: Filesystem) -> IO[str]:
    try:
        filesystem.make_directories(path)
        lock = open(path / _LOCK, "a+", encoding="utf-8", opener=regular)
    except OSError as error:
        # mkdir says "exists" of a file in the way; the person needs to hear what stands there.
        if isinstance(error, FileExistsError):
            reason = "a file of this name is in the way; choose another --run-dir"
        elif isinstance(error, FileNotFoundError) and (path / _LOCK).is_symlink():
            reason = f"{path / _LOCK} is a symbolic link that leads nowhere; remove it"
        else:
            reason = explain(error)
        raise RunDirUnusable(str(path), f"cannot use it as run directory: {reason}") from error
    try:
        filesystem.lock(lock)
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except (BlockingIOError, PermissionError) as error:
        lock.seek(0)
        holder = lock.read(32).strip() or "unknown"
        lock.close()
        reason = f"process {holder} is using this run directory; stop it, or choose another --run-dir"
        raise RunDirBusy(str(path), reason) from error
    except OSError as error:
        with suppress(OSError):  # what a full disk had no room for is tried once more
            lock.close()
        raise RunDirUnusable(str(path), f"cannot lock it: {explain(error)}") from error
    return lock
