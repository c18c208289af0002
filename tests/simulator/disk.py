"""A disk that forgets: real files in a directory, and what of them survives a kill or a power cut.

A killed process loses what it had not flushed; a machine that loses power loses, too, every byte that was not synced
and every name whose directory was not. Errors come for a while, or a process dies at its n-th call.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

from w5xde_async.store.filesystem import Filesystem

__all__ = ["Disk", "HostFilesystem"]


class Process(Protocol):
    """Its locks end when it is dead. Who has been superseded is taken to be where locks do not reach."""

    superseded: bool

    @property
    def dead(self) -> bool: ...


class Disk:
    """One machine's disk, shared by the processes that come and go on it."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.random = root, rng
        self.files: list[_File] = []
        self.names: list[tuple[Path, Callable[[], None], Callable[[], None]]] = []  # (directory, undo, settle)
        self.error = 0  # errno of every write while > 0
        self.locks: dict[str, Process] = {}  # file -> who holds it
        self.num_errors = 0
        self._graves = 0
        root.mkdir(parents=True, exist_ok=True)

    def power_cut(self) -> None:
        """Forget what was not synced."""
        for file in self.files:
            if file.path.exists() and (size := file.path.stat().st_size) > file.synced:
                os.truncate(
                    file.path, file.synced if self.random.random() < 0.7 else self.random.randint(file.synced, size)
                )
        survive = 0 if self.random.random() < 0.5 else self.random.randint(0, len(self.names))
        for _, undo, _ in reversed(self.names[survive:]):
            undo()
        for _, _, settle in self.names[:survive]:
            settle()
        self.names.clear()
        # What is left is on the disk; a name that is gone may be taken by another file.
        self.files = [file for file in self.files if file.path.exists()]
        for file in self.files:
            file.synced = file.path.stat().st_size

    def moved(self, source: Path, target: Path) -> None:
        for file in self.files:
            if file.path == source:
                file.path = target
            elif source in file.path.parents:
                file.path = target / file.path.relative_to(source)

    def synced(self, directory: Path) -> None:
        left = []
        for entry in self.names:
            if entry[0] == directory:
                entry[2]()
            else:
                left.append(entry)
        self.names = left

    def grave(self) -> Path:
        self._graves += 1
        return self.root / f"grave-{self._graves}"


class _File:
    """A file whose writes reach the system when it is flushed, and the disk when it is synced."""

    def __init__(self, owner: HostFilesystem, path: Path) -> None:
        self._owner, self.path = owner, path
        self._pending: list[bytes] = []
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self.size = self.synced = 0

    def write(self, data: Any) -> int:
        self._pending.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        data, self._pending = b"".join(self._pending), []
        if data and self._owner.alive():
            os.write(self._descriptor, data)
            self.size += len(data)

    def close(self) -> None:
        self.flush()
        self.discard()

    def discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostFilesystem(Filesystem):
    """One process' view of the disk."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self.disk, self.process = disk, process
        self.dies_in: int | None = None  # calls until ``die``
        self.die: Callable[[], None] = lambda: None
        self._files: list[_File] = []
        self._locked: list[IO[str]] = []

    def alive(self) -> bool:
        return not self.process.dead

    def lock(self, file: IO[str]) -> None:
        holder = self.disk.locks.get(file.name)
        if holder is not None and not holder.dead and not holder.superseded:
            raise BlockingIOError(errno.EAGAIN, "another process holds it")
        self.disk.locks[file.name] = self.process
        self._locked.append(file)

    def unlock(self, file: IO[str]) -> None:
        if self.disk.locks.get(file.name) is self.process:
            del self.disk.locks[file.name]

    def discard(self) -> None:
        """Let go of what a dead process held open."""
        for file in self._files:
            file.discard()
        for locked in self._locked:
            locked.close()

    def _call(self, *, grows: bool = True) -> None:
        if not self.alive():
            raise OSError(errno.EIO, "the process is dead")
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.dies_in = None
                self.die()
        if self.disk.error and grows:
            self.disk.num_errors += 1
            raise OSError(self.disk.error, os.strerror(self.disk.error))

    def make_directory(self, path: Path) -> None:
        self._call()
        path.mkdir()
        self.disk.names.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True), lambda: None))

    def create(self, path: Path) -> BinaryIO:
        self._call()
        file = _File(self, path)
        self.disk.files.append(file)
        self._files.append(file)
        self.disk.names.append((path.parent, lambda: path.unlink(missing_ok=True), lambda: None))
        return cast(BinaryIO, file)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._call()
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        self._call()
        file.flush()
        opened = cast(_File, file)
        opened.synced = opened.size

    def sync_file(self, path: Path) -> None:
        self._call(grows=False)
        for file in self.disk.files:
            if file.path == path:
                file.synced = path.stat().st_size

    def rename(self, source: Path, target: Path) -> None:
        self._call(grows=False)
        replaced = target.read_bytes() if target.is_file() else None
        os.replace(source, target)
        self.disk.moved(source, target)

        def undo() -> None:
            if not target.exists():
                return
            os.replace(target, source)
            if replaced is not None:
                target.write_bytes(replaced)

        self.disk.names.append((target.parent, undo, lambda: None))

    def sync_directory(self, path: Path) -> None:
        self._call(grows=False)
        self.disk.synced(path)

    def remove(self, path: Path) -> None:
        self._call(grows=False)
        if not path.exists():
            return
        grave = self.disk.grave()
        os.replace(path, grave)
        self.disk.moved(path, grave)

        def settle() -> None:
            if grave.is_dir():
                shutil.rmtree(grave, ignore_errors=True)
            else:
                grave.unlink(missing_ok=True)

        def undo() -> None:
            if path.parent.exists():  # else the directory itself has gone, durably
                os.replace(grave, path)

        self.disk.names.append((path.parent, undo, settle))
