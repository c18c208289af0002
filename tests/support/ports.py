"""Ports for programs that are started, end and are started again."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

_FIRST, _LAST, _EACH = 20000, 32000, 200  # below those that the system gives to clients (32768 on)


def _own() -> tuple[socket.socket, Iterator[int]]:
    """Ports for this process alone: a socket whose name has no file, and ends with the process, says that they are."""
    for first in range(_FIRST, _LAST, _EACH):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0w5xde-tests-ports-{first}")
        except OSError:
            name.close()
        else:
            return name, itertools.cycle(range(first, first + _EACH))
    raise OSError(f"all ports from {_FIRST} to {_LAST} are other tests'")


_name, _ports = _own()  # before any test, each of which has to leave as many descriptors as it found


def free_port() -> int:
    """A port of loopback that stays the caller's also while nothing listens there.

    Others ask for ports between such a question and the start of the program that is to listen, and while a coordinator
    that was killed is away: what the system gives out then may be the port that it comes back to.
    """
    for port in itertools.islice(_ports, _EACH):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of this process's ports is free")
