"""Children of a sandbox that do what a stranger's kernels might: the entry points are tests' own, none is in src.

``python -m tests.support.sealed`` forks for each of ``ATTEMPTS``, closes that process's doors as the real child does,
and lets it try, in plain machine calls. What came of each it says as JSON. ``tests.support.deadly`` computes, and dies.
"""

from __future__ import annotations

import codecs
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable

from w5xde_async.compute.program import child, sealing

__all__ = ["ATTEMPTS", "HARMLESS"]

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


def attempt(name: str) -> str:
    """What came of it: the signal that ended the process, or what the call gave."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        code = 1
        try:
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
    sys.stdout.write(json.dumps({name: attempt(name) for name in (*ATTEMPTS, *HARMLESS)}))
