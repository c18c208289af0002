"""Servers and nodes of one machine and user find each other, as they did when nothing was secret.

A server that asks for a secret leaves its join string in a file of its owner's home, named after machine and port and
readable by its owner alone, for as long as it listens. A node of the same owner that is given nothing looks there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.net.join import write_private_line
from w5xde_async.net.tls import is_loopback


def join_file_here(host: str, port: int) -> Path | None:
    """Where a server of this machine on that port leaves its join string; None where ``host`` is elsewhere.

    The file need not be there (yet): a server without TLS needs none.
    """
    return _path(port) if port and is_here(host) else None


def is_here(host: str) -> bool:
    """Whether an address, or a name that needs no resolver, is this machine's."""
    if is_loopback(host) or host.lower() == socket.gethostname().lower():
        return True
    try:
        version = ip_address(host).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # no other machine's address can be bound; nothing is sent
    except (ValueError, OSError):
        return False
    return True


@asynccontextmanager
async def found_by_neighbours(coordinator: Coordinator) -> AsyncIterator[None]:
    """While open, nodes of this machine and user find a coordinator that listens."""
    path, told = _path(coordinator.port), coordinator.local_join
    if path is None:
        yield
        return
    await asyncio.to_thread(_leave, path, told)
    try:
        yield
    finally:
        await asyncio.to_thread(_take_back, path, told)


def _leave(path: Path, told: str) -> None:
    with suppress(OSError):  # a home that cannot be written: nodes are given the join file
        if told:
            write_private_line(path, told)
        else:
            path.unlink(missing_ok=True)  # of a server on this port that was killed


def _take_back(path: Path, told: str) -> None:
    with suppress(OSError):
        if told and path.read_text(encoding="utf-8").strip() == told:
            path.unlink()


def _path(port: int) -> Path | None:
    try:
        # Machines and containers may share a home.
        return Path.home() / ".local" / "state" / "w5xde" / f"join-{socket.gethostname()}-{port}"
    except RuntimeError:
        return None
