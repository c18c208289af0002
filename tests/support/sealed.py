"""Children of a sandbox that do what a stranger's kernels might: the entry points are tests' own, none is in src.

``python -m tests.support.sealed`` forks for each of ``ATTEMPTS``, closes that process's doors as the real child does,
and lets it try, in plain machine calls. Of a child that drives a GPU, for each of ``WITH_DEVICES``, the filter alone is
there, as if the kernel had no Landlock. What came of each it says as JSON. ``tests.support.deadly`` computes, and dies.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable

from w5xde_async.compute.program import child, sealing

__all__ = ["ATTEMPTS", "HARMLESS", "WITH_DEVICES"]

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    number = sealing._CALLS[name][sealing._MACHINES[os.uname().machine][0]] if name in sealing._CALLS else int(name)
    made = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    result: int = libc.syscall(ctypes.c_long(number or 0), *made)
    return -ctypes.get_errno() if result < 0 else result


PARENT = os.getpid()  # before it forks
_X86 = os.uname().machine == "x86_64"
_OPENAT, _MEMFD, _NEW_LIMIT = ("257", "319", 302) if _X86 else ("56", "279", 261)
_LIMITS = ctypes.create_string_buffer(16)

#: name -> what it tries. Every one must end the process.
ATTEMPTS: dict[str, Callable[[], object]] = {
    "open a file": lambda: call(_OPENAT, -100, b"/etc/passwd", 0),
    "open through Python": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "write a file": lambda: call(_OPENAT, -100, b"/tmp/w5xde-owned", os.O_CREAT | os.O_WRONLY, 0o600),
    "make a socket": lambda: call("socket", socket.AF_INET, socket.SOCK_STREAM, 0),
    "connect to a socket of this machine": lambda: call("socket", socket.AF_UNIX, socket.SOCK_STREAM, 0),
    "send a descriptor": lambda: call("sendmsg", 1, 0, 0),
    "start a program": lambda: call("execve", b"/bin/sh", 0, 0),
    "start a process": lambda: call("clone", 17, 0, 0, 0, 0),
    "fork": lambda: os.fork(),
    "trace its parent": lambda: call("ptrace", 16, PARENT, 0, 0),
    "read its parent's memory": lambda: call("process_vm_readv", PARENT, 0, 0, 0, 0, 0),
    "kill its parent": lambda: call("kill", PARENT, 0),
    "signal its parent's thread": lambda: call("tgkill", PARENT, PARENT, 0),
    "io_uring": lambda: call("io_uring_setup", 8, 0),
    "a namespace of its own": lambda: call("unshare", 0x10000000),
    "a region of its own": lambda: call(_MEMFD, b"x", 0),
    "raise its limits": lambda: call(str(_NEW_LIMIT), 0, 9, ctypes.addressof(_LIMITS), 0),
    "the other table of calls": lambda: call(str(0x40000000 | 39)) if _X86 else call("socket", 1, 1, 0),
}
#: What it may do, so that the test knows that it would see the difference.
HARMLESS: dict[str, Callable[[], object]] = {
    "nothing": lambda: 0,
    "its number": lambda: os.getpid() > 0,
    "a name of a thread": lambda: libc.prctl(15, b"name", 0, 0, 0),
    "another filter": lambda: libc.prctl(22, ctypes.c_ulong(2), 0, 0, 0),
    "memory": lambda: len(bytearray(1 << 20)),
}

_PIPE, _SOCKET = os.pipe()[0], socket.socket()  # of this process, and so of those that it forks
_FILE = tempfile.NamedTemporaryFile()  # as long as this process
_OWNER = struct.pack("ii", 1, PARENT)

#: What a child that drives a GPU tries -> what comes of it.
WITH_DEVICES: dict[str, tuple[Callable[[], object], str]] = {
    "say whom a pipe signals": (lambda: fcntl.fcntl(_PIPE, 8, PARENT), "SIGSYS"),
    "say whom a pipe signals, by the newer command": (lambda: fcntl.fcntl(_PIPE, 15, _OWNER), "SIGSYS"),
    "say what a pipe signals": (lambda: fcntl.fcntl(_PIPE, 10, signal.SIGKILL), "SIGSYS"),
    "say whom a socket signals": (lambda: fcntl.ioctl(_SOCKET, 0x8901, struct.pack("i", PARENT)), "SIGSYS"),
    "say whom a socket signals, by the older command": (
        lambda: fcntl.ioctl(_SOCKET, 0x8902, struct.pack("i", PARENT)),
        "SIGSYS",
    ),
    "empty a file": (lambda: call("truncate", _FILE.name.encode(), 0), str(-errno.EPERM)),
    "set a limit": (lambda: resource.setrlimit(resource.RLIMIT_CPU, (100, 100)), "SIGSYS"),
    "set a limit by the older call": (lambda: call("setrlimit", 0, ctypes.addressof(_LIMITS)), "SIGSYS"),
    "another descriptor of a pipe": (lambda: fcntl.fcntl(_PIPE, fcntl.F_DUPFD_CLOEXEC, 0) > 0, "True"),
    "what a pipe is open for": (lambda: fcntl.fcntl(_PIPE, fcntl.F_GETFL), "0"),
    "how much waits in a pipe": (lambda: fcntl.ioctl(_PIPE, 0x541B, b"1234"), repr(bytes(4))),
}


def attempt(name: str) -> str:
    """What came of it: the signal that ended the process, or what the call gave."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            if name in WITH_DEVICES:
                sealing.hide()
                sealing.filter_calls(devices=True)
                result = repr(WITH_DEVICES[name][0]())
            else:
                child._shut(theirs, cuda=False, memory_bytes=1 << 28)
                result = repr((ATTEMPTS | HARMLESS)[name]())
            os.write(theirs.fileno(), result.encode())
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    said = ours.recv(1 << 10)
    ours.close()
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said.decode() or f"code {status}"


if __name__ == "__main__":
    codecs.lookup("ascii")
    sys.stdout.write(json.dumps({name: attempt(name) for name in (*ATTEMPTS, *HARMLESS, *WITH_DEVICES)}))
