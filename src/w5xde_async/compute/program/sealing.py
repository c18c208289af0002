"""Closes a process's doors, through the kernel's own interface: Landlock, resource limits, a seccomp filter.

For a process that is about to run a stranger's program (``child``). What is closed stays closed: no privilege is gained
back (``no_new_privs``), and a filter cannot be taken off. On the CPU every call to the kernel that is not on a list of
some forty kills the process: no file can be opened, no socket made, no process started, traced or signalled. CUDA's
driver needs device files and their calls, so there a list of forbidden ones stands in its place, and Landlock keeps the
process to libraries and devices.

Linux on x86-64 and arm64 alone. Numbers are the kernel's, from its headers. Decision: docs/decisions/0023-sandbox.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows, where nothing is sealed
    resource = None  # type: ignore[assignment]

# -- calls to the kernel -----------------------------------------------------------------------------------------

# Tables of calls: name -> number on x86-64 and on arm64; None where that machine has no such call.

#: What computing on the CPU takes.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "recvmsg": (47, 212), "poll": (7, None), "ppoll": (271, 73),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "futex": (202, 98),
    "futex_waitv": (449, 449), "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "getcpu": (309, 168), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "getrusage": (98, 165), "times": (100, 153), "getpid": (39, 172), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getrandom": (318, 278), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
#: Calls whose arguments are looked at; see ``_program``.
_LOOKED_AT: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "prctl": (157, 167), "tgkill": (234, 131), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "fcntl": (72, 25), "ioctl": (16, 29),
}  # fmt: skip
#: What nothing that computes on CUDA takes either.
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kill": (62, 129), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265), "kcmp": (312, 272), "process_madvise": (440, 440), "setuid": (105, 146),
    "setgid": (106, 144), "setrlimit": (160, 164),
}  # fmt: skip
#: What libraries may try and computing does without; there it fails. Landlock does not keep a process from files' modes
#: and times, nor from other processes' limits and priorities, and before its third version not from shortening a file.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "truncate": (76, 45),
}  # fmt: skip
_CALLS = _ALLOWED | _LOOKED_AT | _FORBIDDEN | _DENIED

_X86_64, _ARM64 = 0xC000003E, 0xC00000B7
_MACHINES = {"x86_64": (0, _X86_64), "aarch64": (1, _ARM64)}
_X32 = 0x40000000

_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 15, 21, 38
_PR_SET_VMA = 0x53564D41
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_FILTER, _SECCOMP_TSYNC = 1, 1
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_CLONE_THREAD = 0x00010000
#: Who is signalled when a descriptor is ready, and with what: any signal to any process of the user.
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 10, 15, 0x8901, 0x8902
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in what a filter sees


def unsupported() -> str:
    """Why a process cannot be sealed on this machine; empty where it can."""
    if not sys.platform.startswith("linux"):
        return f"{platform.system() or sys.platform} has no seccomp; Linux has"
    if platform.machine() not in _MACHINES or struct.calcsize("P") != 8:
        return f"no list of system calls is known here for {platform.machine()}"
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create"
    zero = ctypes.c_ulong(0)
    known = _libc().prctl(_PR_GET_SECCOMP, zero, zero, zero, zero) >= 0
    return "" if known else "this kernel was built without seccomp"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _called(_libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def go_first() -> None:
    """The kernel ends this process before others where memory runs out. Before any ``restrict_files``."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def hide() -> None:
    """No privilege is gained from here on, and nobody of the same user looks into this process."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


def filter_calls(*, devices: bool) -> None:
    """Install the filter on all threads. ``devices``: for a process that drives a GPU, the weaker one."""
    machine = platform.machine()
    column, architecture = _MACHINES[machine]
    program = _program(column, architecture, devices=devices)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(described, len(described))
    libc = _libc()
    result = libc.syscall(
        ctypes.c_long(_SECCOMP[machine]), ctypes.c_long(_SECCOMP_SET_FILTER), ctypes.c_long(_SECCOMP_TSYNC), pointer
    )
    if result > 0:
        raise OSError(errno.ESRCH, f"seccomp: thread {result} cannot take the filter")
    _called(result, "seccomp")


def _program(column: int, architecture: int, *, devices: bool) -> list[bytes]:
    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    def argument(index: int, half: int = 0) -> bytes:
        return step(_LOAD, _ARGUMENTS + 8 * index + 4 * half)

    def give(verdict: int) -> bytes:
        return step(_RETURN, verdict)

    otherwise = _ALLOW if devices else _KILL
    made = [step(_LOAD, _ARCH), step(_EQUAL, architecture, 1, 0), give(_KILL), step(_LOAD, _NR)]
    if architecture == _X86_64:
        made += [step(_AT_LEAST, _X32, 0, 1), give(_KILL)]
    listed, verdict = (_FORBIDDEN, _KILL) if devices else (_ALLOWED, _ALLOW)
    for numbers in listed.values():
        if (known := numbers[column]) is not None:
            made += [step(_EQUAL, known, 0, 1), give(verdict)]
    for numbers in _DENIED.values() if devices else ():
        if (known := numbers[column]) is not None:
            made += [step(_EQUAL, known, 0, 1), give(_ERRNO | errno.EPERM)]
    # Of some calls the arguments are looked at. Each block ends in a verdict.
    only = {
        # threads, and no processes; the newer call hides its flags in memory, and libraries know the older one
        "clone": [argument(0), step(_ANY_BIT, _CLONE_THREAD, 0, 1), give(_ALLOW), give(_KILL)],
        "clone3": [give(_ERRNO | errno.ENOSYS)],
        # signals to itself: what abort() does
        "tgkill": [argument(0), step(_EQUAL, os.getpid(), 0, 1), give(_ALLOW), give(_KILL)],
        "prlimit64": [  # to read limits, not to set them
            argument(2),
            step(_EQUAL, 0, 0, 3),
            argument(2, 1),
            step(_EQUAL, 0, 0, 1),
            give(_ALLOW),
            give(_KILL),
        ],
    }
    if not devices:
        only["prctl"] = [  # names of threads and of memory
            argument(0), step(_EQUAL, _PR_SET_NAME, 1, 0), step(_EQUAL, _PR_SET_VMA, 0, 1), give(_ALLOW),
            give(_ERRNO | errno.EPERM),
        ]  # fmt: skip
    else:
        only["sched_setaffinity"] = [  # of the thread that calls, or the first; others are not known from strangers
            argument(0), step(_EQUAL, 0, 1, 0), step(_EQUAL, os.getpid(), 0, 1), give(_ALLOW),
            give(_ERRNO | errno.EPERM),
        ]  # fmt: skip
        # the kernel looks at a command's lower half alone, and so does this
        only["fcntl"] = [
            argument(1), step(_EQUAL, _F_SETOWN, 2, 0), step(_EQUAL, _F_SETSIG, 1, 0), step(_EQUAL, _F_SETOWN_EX, 0, 1),
            give(_KILL), give(_ALLOW),
        ]  # fmt: skip
        only["ioctl"] = [
            argument(1), step(_EQUAL, _FIOSETOWN, 1, 0), step(_EQUAL, _SIOCSPGRP, 0, 1), give(_KILL), give(_ALLOW),
        ]  # fmt: skip
    for name, block in only.items():
        if (known := _LOOKED_AT[name][column]) is not None:
            made += [step(_EQUAL, known, 0, len(block)), *block]
    return [*made, give(otherwise)]


# -- files -------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_OWN_THREADS = "/proc/self/task"
#: Rights to handle by version of the interface: on files, on TCP, and what is kept to the process itself.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_FS_NEWEST, _NET, _SCOPES = (1 << 16) - 1, 0b11, 0b11


def landlock_abi() -> int:
    """Version of the kernel's Landlock; 0 where there is none, or it is off."""
    if not sys.platform.startswith("linux"):
        return 0
    found: int = _libc().syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(found, 0)


def restrict_files(readable: Iterable[str | Path] = (), devices: Iterable[str | Path] = ()) -> int:
    """From here on this thread, and those that it starts, open nothing but ``readable`` files and folders and
    ``devices``; no TCP, no signals and no abstract sockets beyond the process. The version of Landlock; 0: none.

    With ``devices`` also what /proc has of the process' threads, to write it: CUDA's driver names its own there, and
    where it may not, it says that there is no device.
    """
    devices = list(devices)
    abi = landlock_abi()
    if not abi:
        return 0
    rights = _FS_RIGHTS.get(abi, _FS_NEWEST)
    fields = [rights, *([_NET] if abi >= 4 else []), *([_SCOPES] if abi >= 6 else [])]
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    libc = _libc()
    ruleset = _called(
        libc.syscall(ctypes.c_long(_CREATE_RULESET), attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)),
        "landlock_create_ruleset",
    )
    try:
        allowed = [(path, _EXECUTE | _READ_FILE | _READ_DIR) for path in readable]
        allowed += [(path, _READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL) for path in devices]
        if devices:
            allowed.append((_OWN_THREADS, _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE))
        for path, access in allowed:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # what is not there needs no right
            try:
                access &= rights if os.path.isdir(path) else rights & _FILE_RIGHTS
                rule = struct.pack("=Qi", access, place)
                added = libc.syscall(
                    ctypes.c_long(_ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0)
                )
                _called(added, f"landlock_add_rule {path}")
            finally:
                os.close(place)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        restricted = libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0))
        _called(restricted, "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return abi


# -- the rest ----------------------------------------------------------------------------------------------------


def close_descriptors(keep: Sequence[int]) -> None:
    """Close every open file but these."""
    low = 0
    for descriptor in sorted(keep):
        if low < descriptor:  # an empty range would be taken for all
            os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1 << 20)


def limit(*, memory_bytes: int, descriptors: int) -> None:
    """No core dumps, no writing to files, few descriptors, few more threads, and ``memory_bytes`` more of memory
    (0: as much as there is)."""

    def at_most(which: int, count: int) -> None:
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            count = min(count, hard)
        resource.setrlimit(which, (count, count))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, 0)
    at_most(resource.RLIMIT_NOFILE, descriptors)
    with suppress(OSError, ValueError):  # counts all threads of the user
        at_most(resource.RLIMIT_NPROC, _threads_of_user() + 1024)
    if memory_bytes:
        at_most(resource.RLIMIT_DATA, _data_bytes() + memory_bytes)


def _threads_of_user() -> int:
    user, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if entry.stat().st_uid == user:
                    count += len(os.listdir(f"{entry.path}/task"))
    return count


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA so far."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
