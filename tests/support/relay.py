"""``python`` for what runs beside the tests: our programs, and scripts, are forked from their server (forking.py).

Started as ``relay.py DOOR PYTHON SEARCHED ARGUMENT...``. The program has this process's files, all that it inherited,
directory and environment; signals that come here go on to it, this process ends as it ends, and where this one is
killed so is the program. Anything but our own programs, and those that look elsewhere for modules, is a real
interpreter's; so is an island's rank where a test stops ranks (REAL_RANKS), for that cannot be passed on. A sandbox is
forked as well: it closes its doors all the same. What it was started with and holds is a real one's to show.
"""

import json
import os
import signal
import socket
import sys

_OURS = tuple(f"w5xde_async.{name}" for name in ("coordinator", "worker", "status", "tune", "compute.program"))
_SANDBOX = ["-P", "-s", "-m", "w5xde_async.compute.program.child"]
_MOST_INHERITED = 16  # as in forking.py
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def relay(door: str, python: str, searched: str, arguments: list[str]) -> int:
    """The program's exit code; negative: the signal that ended it."""
    arguments = arguments[arguments[:1] == ["-u"] :]  # a forked program's output is not kept back
    inherited = [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and _is_open(number)]
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours = arguments[0].endswith(".py") or (arguments[0] == "-m" and arguments[1] in _OURS)
    places = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    forked = ours and places <= set(searched.split(os.pathsep)) and not ({"RANK", "REAL_RANKS"} <= set(os.environ))
    if arguments[:4] == _SANDBOX:
        arguments, forked = arguments[2:], True
    if not forked or asked.connect_ex(door):
        os.execv(python, [python, *arguments])
    if len(inherited) > _MOST_INHERITED:
        sys.exit(f"too many files are inherited: {[os.readlink(f'/proc/self/fd/{number}') for number in inherited]}")
    status, theirs = socket.socketpair()
    ignored = [int(number) for number in _PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    told = {
        "arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "ignored": ignored, "inherited": inherited,
    }  # fmt: skip
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    socket.send_fds(asked, [json.dumps(told).encode()], [0, 1, 2, theirs.fileno(), *inherited])
    theirs.close()
    for number in inherited:  # the program has them now
        os.close(number)
    answers = status.makefile("rb", buffering=0)
    program = int(answers.readline())
    for number in set(_PASSED_ON) - set(ignored):
        signal.signal(number, lambda number, _: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    return int(answers.readline())


if __name__ == "__main__":
    code = relay(*sys.argv[1:4], sys.argv[4:])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
