"""The few calls through which this package changes a disk, and what their failures mean to a person.

Every durable write goes through a ``Filesystem``, so a test can put one in its place that dies, forgets or runs
full between any two calls. Nothing here knows what is being written. Temporary names begin with ``TEMPORARY``:
whatever carries it after a start belongs to a write that died, and may be removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Any, BinaryIO

from w5xde_async.errors import StoreError

TEMPORARY = ".tmp-"

_WRITE_BUFFER_BYTES = 1 << 20
_LOCKED_BYTE = 1 << 20  # far behind the pid in a lock file: Windows would not let others read a locked byte

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space or choose another --run-dir",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another --run-dir",
    errno.EFBIG: "a file would be larger than this process may write; raise the limit (ulimit -f)",
    errno.EACCES: "permission denied; make it writable for this user or choose another --run-dir",
    errno.EPERM: "not permitted; make it writable for this user or choose another --run-dir",
    errno.EROFS: "the file system is read-only; choose another --run-dir",
    errno.EIO: "input/output error, the disk may be failing; choose another --run-dir",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter --run-dir",
}


_FILE, _DIRECTORY = "a file stands where a directory is needed", "a directory stands where a file is needed"
_NOWHERE = "a symbolic link that leads nowhere stands where a file or a directory is needed"
#: What stands in the way, by what the system says of it, as far as it cannot be looked at.
_IN_THE_WAY = {
    errno.ENOTDIR: _FILE,
    errno.EEXIST: "something of this name is there already",
    errno.EISDIR: _DIRECTORY,
    errno.ELOOP: _NOWHERE,
}


def explain(error: OSError, *, looks: bool = True) -> str:
    """What failed and what to do about it, on one line. ``looks``: at what is in the way, which an event loop may not
    wait for."""
    number, named = error.errno or 0, error.filename2 or error.filename
    there = _nearest(Path(os.fsdecode(named))) if looks and isinstance(named, str | bytes | Path) else None
    what = _IN_THE_WAY.get(number)
    if there is not None and (what is not None or number == errno.ENOENT):
        if not os.path.exists(there):
            what = _NOWHERE
        elif number == errno.EEXIST:
            what = "a directory of this name is there already" if os.path.isdir(there) else _FILE
        elif (number == errno.EISDIR) != os.path.isdir(there):  # it is in the way of another, or has gone meanwhile
            there = None
    if what is not None:
        return f"{what}{'' if there is None else f' ({there})'}; move it away, or choose another --run-dir"
    return _ADVICE.get(number) or error.strerror or str(error)


def _nearest(path: Path) -> Path | None:
    """The part of a path that is there, and what follows is not: what is in the way."""
    return next((part for part in (path, *path.parents) if os.path.lexists(part)), None)


@contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``StoreError`` that names ``path`` and what was being done."""
    try:
        yield
    except OSError as error:
        raise StoreError(str(path), f"cannot {doing}: {explain(error)}") from error


def regular(path: str, flags: int) -> int:
    """An ``opener`` of ``open`` for what is found on a disk. A pipe in a file's place would be waited for, a device may
    have no end: OSError."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a directory, ``open`` says so
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{os.path.basename(path)} is no regular file", path)
    return descriptor


def read_regular(path: Path) -> bytes:
    """All of a file. Raises OSError."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Filesystem:
    """The calls themselves, each durable or atomic as its line says."""

    def make_directory(self, path: Path) -> None:
        """Create one directory; ``FileExistsError`` when it is there."""
        path.mkdir(mode=0o700)

    def make_directories(self, path: Path) -> None:
        """Create a directory and its missing parents; their names are on the disk then. One that is there will do."""
        if path.is_dir():
            return
        if not path.parent.exists():
            self.make_directories(path.parent)
        try:
            self.make_directory(path)
        except FileExistsError:
            if not path.is_dir():
                raise
        self.sync_directory(path.parent)

    def create(self, path: Path) -> BinaryIO:
        """Open a new file for writing, that its owner alone can read; it must not exist."""
        return open(path, "xb", buffering=_WRITE_BUFFER_BYTES, opener=_private)

    def append(self, path: Path) -> FileIO:
        """Open a file for writing at its end, without a buffer; it is made where it is not there."""
        return FileIO(path, "ab", opener=regular)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_file(self, path: Path) -> None:
        """Return when the bytes of a file that another process may have left are on the disk."""
        with open(path, "r+b", opener=regular) as file:
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Move atomically within one file system; replaces a file."""
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's names are on the disk (Windows has no such call)."""
        if sys.platform == "win32":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def fence(self) -> None:
        """Raise where nothing that was written counts any more."""

    def lock(self, file: IO[str]) -> None:
        """Take the one lock of an open file, which ends with this process. Raises OSError where another has it."""
        if sys.platform == "win32":  # pragma: no cover
            import msvcrt

            file.seek(_LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, file: IO[str]) -> None:
        """Let others take the lock."""
        if sys.platform == "win32":  # pragma: no cover
            import msvcrt

            file.seek(_LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)  # explicitly: a forked child may hold the file open too

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def sweep(self, directory: Path) -> None:
        """Remove what writes left behind that died; what cannot be removed stays.

        Whole or not at all, since on a disk whose locks do not reach it a writer that lives may be about to put its
        directory into place: that is another name before its first file goes.
        """
        for path in list(directory.glob(f"{TEMPORARY}*")):
            with suppress(OSError):
                doomed = temporary_beside(path.with_name("swept"))
                self.rename(path, doomed)
                self.remove(doomed)


class FencedFilesystem(Filesystem):
    """Another file system, whose names change only while ``check`` does not raise.

    Whoever has been superseded may still write to its own open and temporary files, which nobody reads; it puts
    nothing in place of what its successor made, and removes nothing.
    """

    def __init__(self, inner: Filesystem, check: Callable[[], None]) -> None:
        self._inner, self._check = inner, check
        self.make_directory, self.create = inner.make_directory, inner.create  # type: ignore[method-assign]
        self.append, self.write, self.sync = inner.append, inner.write, inner.sync  # type: ignore[method-assign]
        self.sync_directory, self.sync_file = inner.sync_directory, inner.sync_file  # type: ignore[method-assign]

    def fence(self) -> None:
        self._check()

    def rename(self, source: Path, target: Path) -> None:
        self._check()
        self._inner.rename(source, target)

    def remove(self, path: Path) -> None:
        if not path.name.startswith(TEMPORARY):
            self._check()
        self._inner.remove(path)


def temporary_beside(path: Path) -> Path:
    """An unused temporary name in ``path``'s directory."""
    return path.with_name(f"{TEMPORARY}{path.name}-{os.urandom(4).hex()}")


def is_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def unused(path: Path) -> Path:
    """``path``, or the first of ``path-1``, ``path-2``, ... where something lies there."""
    target, number = path, 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}-{number}")
    return target


def replace_file(filesystem: Filesystem, path: Path, fill: Callable[[BinaryIO], None]) -> None:
    """Let ``fill`` write a file and put it at ``path`` in one step: readers see the old one or the new one.

    Raises:
        OSError: the disk said no; ``path`` is as it was and nothing lies beside it.
    """
    temporary = temporary_beside(path)
    try:
        with filesystem.create(temporary) as file:
            fill(file)
            filesystem.sync(file)
        filesystem.rename(temporary, path)
        filesystem.sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            filesystem.remove(temporary)
        raise
