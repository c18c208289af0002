"""Memory that processes of one user on one machine have together, and that has no name in any file system.

A **region** is a ``memfd`` whose size is sealed: nobody can shorten it under another's feet. A **segment** is one that
its owner alone can write, which the kernel sees to (``F_SEAL_FUTURE_WRITE``); a secret lies before its payload. The
owner tells others (process, descriptor, bytes), and they open ``/proc/PROCESS/fd/DESCRIPTOR``: the kernel allows that
to processes of the same user that see the same processes, which may read its memory in any case. What was opened is
the owner's segment only if the secret is right: on another machine the same numbers name something else.

Nothing is left behind: memory goes with the last process that has it, however that ends. Linux only. What this module
does not do: decide who is told of a segment, or believe what lies in one.
"""

from __future__ import annotations

import ctypes
import hmac
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from w5xde_async.errors import W5xdeError

if sys.platform != "win32":
    import fcntl

#: The secret of a segment has at most this many bytes.
SECRET_BYTES = 64
#: A segment's payload begins so many bytes after its mapping.
HEADER_BYTES = mmap.PAGESIZE

_PAGE = HEADER_BYTES
_before: dict[int, list[Callable[[], object]]] = {}  # what is done before a mapping ends, by its address
_NAME, _SHARED = "w5xde-", "shared-"
_F_SEAL_FUTURE_WRITE = 0x0010  # Python does not name it before 3.13
_MAP_FIXED = 0x10
_MADV_DONTNEED = 4
_FIXED_SIZE = 0 if sys.platform != "linux" else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_READ, _WRITE = (0, 0) if sys.platform == "win32" else (mmap.PROT_READ, mmap.PROT_WRITE)
_ENTRY = 8  # bytes of a page's word in the kernel's map of pages, in the machine's order; which of them is looked at
_TOP = 7 if sys.byteorder == "little" else 0
# Its bits for a page: it is there, it is swapped out, it is a file's and not a copy of it.
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_NO_COPY = bytes(top for top in range(256) if not top & (_PRESENT | _SWAPPED) or top & _OF_FILE)


class Unshared(W5xdeError):
    """Memory cannot be had together. Field: ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def unsupported() -> str:
    """Why this machine has no segments; empty where it has."""
    there = sys.platform == "linux" and hasattr(os, "memfd_create")
    return "" if there else "shared memory is there on Linux alone"


def aligned(nbytes: int, to: int = _PAGE) -> int:
    """The next multiple of ``to``."""
    return -(-nbytes // to) * to


class Region:
    """A piece of memory that others may map. Pages take memory when they are first written."""

    def __init__(self, name: str, nbytes: int, *, others_write: bool = True) -> None:
        """Raises OSError, MemoryError where there is none."""
        self.nbytes = aligned(max(nbytes, 1))
        self.descriptor = os.memfd_create(f"{_NAME}{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._forgotten = weakref.finalize(self, os.close, self.descriptor)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, self.nbytes)
            self.memory = mapped(self.descriptor, self.nbytes)
            # What is mapped stays writable; whoever maps it after this can only read it.
            seals = _FIXED_SIZE | (0 if others_write else _F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except (OSError, MemoryError):
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptor back: nobody can map it any more. What is mapped stays until nobody has it."""
        if self.descriptor >= 0:
            self._forgotten()
            self.descriptor = -1


class Segment(Region):
    """``nbytes`` bytes (``payload``, uint8, zeros) behind a ``secret``. Nobody but this process can write them."""

    def __init__(self, name: str, nbytes: int, secret: bytes) -> None:
        """Raises Unshared where there is none."""
        if lacking := unsupported():
            raise Unshared(lacking)
        try:
            super().__init__(f"{_SHARED}{name}", _PAGE + max(nbytes, 1), others_write=False)
        except (OSError, MemoryError) as error:
            raise Unshared(f"no shared memory of {nbytes} bytes: {error}") from None
        self.secret = secret
        self.memory[: len(secret)] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        self.payload = self.memory[_PAGE : _PAGE + max(nbytes, 1)]

    @property
    def told(self) -> tuple[int, int, int]:
        """What others open it by: process, descriptor, bytes."""
        return os.getpid(), self.descriptor, self.nbytes


class Opened:
    """Another process's segment, to read. ``secret`` holds SECRET_BYTES bytes, zeros behind the secret itself."""

    def __init__(self, told: Sequence[int], nbytes: int) -> None:
        """``told``: as ``Segment.told``, by somebody who may lie; ``nbytes`` is what the payload is to have.

        Raises Unshared.
        """
        if lacking := unsupported():
            raise Unshared(lacking)
        if len(told) != 3 or told[2] != aligned(_PAGE + max(nbytes, 1)):
            raise Unshared("it is told of a segment of another size")
        self.nbytes = nbytes
        try:
            self.descriptor = _open(*told)
        except FileNotFoundError:
            raise Unshared(
                "the process is not here: it has ended, or is on another machine or in another container"
            ) from None
        except PermissionError:
            raise Unshared("it belongs to another user") from None
        except OSError as error:
            raise Unshared(f"it cannot be opened: {error.strerror or error}") from None
        self._forgotten = weakref.finalize(self, os.close, self.descriptor)
        self.secret = os.pread(self.descriptor, SECRET_BYTES, 0)

    def has(self, secret: bytes) -> bool:
        """Whether it is the segment with this secret."""
        return hmac.compare_digest(self.secret, secret.ljust(SECRET_BYTES, b"\0"))

    def map(self) -> Tensor:
        """The payload, as it is and as it changes. To write here is an error that ends the process. Raises Unshared."""
        try:
            memory = mapped(self.descriptor, aligned(_PAGE + self.nbytes), writable=False)
        except MemoryError as error:
            raise Unshared(str(error)) from None
        return memory[_PAGE : _PAGE + max(self.nbytes, 1)]

    def close(self) -> None:
        """Give the descriptor back. What is mapped stays."""
        self._forgotten()


def _open(process: int, descriptor: int, nbytes: int) -> int:
    # What the numbers name is looked at before it is opened to be read: that could wait, or do something, at a device.
    looked_at = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(looked_at)
        name = os.readlink(f"/proc/self/fd/{looked_at}")
        named = name.startswith(f"/memfd:{_NAME}{_SHARED}")
        if not stat.S_ISREG(found.st_mode) or not named or found.st_size != nbytes:
            raise Unshared("what is told of is no segment here, as on another machine or in another container")
        if found.st_uid != os.geteuid():
            raise PermissionError
        opened = os.open(f"/proc/self/fd/{looked_at}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(looked_at)
    if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
        os.close(opened)
        raise Unshared("its owner could cut it short")
    return opened


class Window:
    """A range of addresses that shows memory of this process, or for a time another's segment.

    Tensors in it stay where they are. What is written while a segment is shown is this process's alone, page by page,
    and is gone at ``restore`` and at ``hide``.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises MemoryError."""
        self._nbytes = aligned(max(nbytes, 1))
        self._address = _mmap(None, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.memory = _tensor_at(self._address, self._nbytes)[: max(nbytes, 1)]  #: uint8, zeros
        self._pages = -1  # of this process, as the kernel sees them
        self.shows = False  #: whether it is another's segment that is seen

    def show(self, opened: Opened) -> None:
        """Let the payload be seen, as long as the memory in all. Raises Unshared."""
        if aligned(max(opened.nbytes, 1)) != self._nbytes:
            raise Unshared("the segment has another size")
        try:
            _mmap(self._address, self._nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, opened.descriptor, _PAGE)
        except MemoryError as error:
            raise Unshared(str(error)) from None
        self.shows = True
        if self._pages < 0:
            with suppress(OSError):  # then ``restore`` does not look first
                self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def hide(self) -> None:
        """Let memory of this process be seen again: zeros."""
        if self.shows:
            _mmap(self._address, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
            self.shows = False
        if self._pages >= 0:
            os.close(self._pages)
            self._pages = -1

    def restore(self) -> None:
        """Where a segment is shown, undo what this process has written into it: it sees the owner's bytes again."""
        if not self.shows:
            return
        if self._pages >= 0:
            wanted = self._nbytes // _PAGE * _ENTRY
            told = os.pread(self._pages, wanted, self._address // _PAGE * _ENTRY)
            if len(told) == wanted and not told[_TOP::_ENTRY].translate(None, _NO_COPY):
                return
        _libc().madvise(self._address, self._nbytes, _MADV_DONTNEED)


def mapped(descriptor: int, nbytes: int, *, writable: bool = True) -> Tensor:
    """Memory of a descriptor, which may be closed then; unmapped when no tensor has it any more. Raises MemoryError.

    By the plain call: Python's own would keep a copy of the descriptor, and ask for what a sandbox forbids.
    """
    return _tensor_at(_mmap(None, nbytes, mmap.MAP_SHARED, descriptor, 0, _READ | (_WRITE if writable else 0)), nbytes)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _mmap(
    address: int | None, nbytes: int, flags: int, descriptor: int, at: int, protection: int = _READ | _WRITE
) -> int:
    found: int | None = _libc().mmap(address, nbytes, protection, flags, descriptor, at)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise MemoryError(f"{nbytes} bytes cannot be mapped")
    return found


def _tensor_at(address: int, nbytes: int) -> Tensor:
    memory = (ctypes.c_char * nbytes).from_address(address)
    _before[address] = []
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def is_mapped(memory: Tensor) -> bool:
    """Whether it lies in a mapping of this module's."""
    return memory.untyped_storage().data_ptr() in _before


def before_unmapped(memory: Tensor, action: Callable[[], object]) -> None:
    """Do this before the mapping ends in which ``memory`` lies, on whatever thread that happens."""
    _before[memory.untyped_storage().data_ptr()].append(action)


def _unmap(address: int, nbytes: int) -> None:
    for action in _before.pop(address, ()):
        action()
    _libc().munmap(address, nbytes)
