"""Socket options for long-lived links with large and small frames; whatever a platform lacks is skipped.

Buffers: Linux is left to tune them itself. A fixed size is clamped to ``net.core.rmem_max`` (208 KiB by default) and
switches the tuning off, and even 4 MiB, where granted, was no faster on loopback (bench/transport.py).
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import NamedTuple

BUFFER_BYTES = 4 << 20
#: Keepalive: first probe after, then every, and given up after so many. The heartbeat is faster; this is the backstop.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 20, 5, 4
#: Linux: sent bytes may stay unacknowledged this long.
USER_TIMEOUT_MS = 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_COUNT)

_TCP_INFO_BYTES = 104
_RTT_OFFSET, _RETRANSMITS_OFFSET = 68, 100  # of tcpi_rtt (microseconds) and tcpi_total_retrans in Linux's tcp_info
_ACKED_OFFSET, _ACKED_INFO_BYTES = 120, 128  # of tcpi_bytes_acked there, since Linux 4.1
_SO_NWRITE_MACOS = 0x1024  # bytes that the peer has not acknowledged yet

_TCP_KEEPALIVE_MACOS = 0x10  # named TCP_KEEPALIVE only by some builds of Python


def tune(sock: socket.socket, *, platform: str = sys.platform) -> dict[str, int]:
    """Set what this platform knows on a connected socket; what was set, by name."""
    done: dict[str, int] = {}

    def put(level: int, name: str, value: int, option: int | None = None) -> None:
        option = getattr(socket, name, None) if option is None else option
        if option is None:
            return
        try:
            sock.setsockopt(level, option, value)
        except OSError:
            return  # known to Python, not to this kernel or kind of socket
        done[name] = value

    put(socket.IPPROTO_TCP, "TCP_NODELAY", 1)
    if platform != "linux":
        put(socket.SOL_SOCKET, "SO_SNDBUF", BUFFER_BYTES)
        put(socket.SOL_SOCKET, "SO_RCVBUF", BUFFER_BYTES)
    put(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
    if platform == "win32":
        _keepalive_windows(sock, done)
        return done
    if platform == "darwin":
        option = getattr(socket, "TCP_KEEPALIVE", _TCP_KEEPALIVE_MACOS)
        put(socket.IPPROTO_TCP, "TCP_KEEPALIVE", KEEPALIVE_IDLE_S, option)
    else:
        put(socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_IDLE_S)
    put(socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S)
    put(socket.IPPROTO_TCP, "TCP_KEEPCNT", KEEPALIVE_COUNT)
    if platform == "linux":
        put(socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS)
        put(socket.IPPROTO_TCP, "TCP_QUICKACK", 1)
    return done


class Figures(NamedTuple):
    """What the kernel knows of a connection: its smoothed round trip, and segments that it had to send again."""

    rtt_s: float
    retransmits: int


def figures(sock: socket.socket, *, platform: str = sys.platform) -> Figures | None:
    """None where this platform, kernel or kind of socket does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if platform != "linux" or option is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _TCP_INFO_BYTES:
        return None
    (rtt_us,), (again,) = (struct.unpack_from("=I", info, offset) for offset in (_RTT_OFFSET, _RETRANSMITS_OFFSET))
    return Figures(rtt_us / 1e6, again)


def acked_bytes(sock: socket.socket, sent_bytes: int, *, platform: str = sys.platform) -> int | None:
    """Bytes that the other machine has acknowledged of the ``sent_bytes`` that were handed over; None where this
    platform, kernel or kind of socket does not say. Only that it grows has a meaning: TLS adds its own bytes."""
    try:
        if platform == "darwin":
            return sent_bytes - sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE_MACOS)
        option = getattr(socket, "TCP_INFO", None)
        if platform != "linux" or option is None:
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _ACKED_INFO_BYTES)
    except OSError:
        return None
    return None if len(info) < _ACKED_INFO_BYTES else int(struct.unpack_from("=Q", info, _ACKED_OFFSET)[0])


def unacked_bytes(sock: socket.socket, *, platform: str = sys.platform) -> int | None:
    """Bytes that were handed over and the other machine has not acknowledged; None where this platform, kernel or kind
    of socket does not say."""
    try:
        if platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE_MACOS)
        if platform != "linux":
            return None
        import fcntl
        import termios

        waiting = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))  # also named SIOCOUTQ: see tcp(7)
    except (OSError, ValueError):  # ValueError: it is closed
        return None
    return int.from_bytes(waiting, sys.byteorder)


def tune_listener(sock: socket.socket, *, platform: str = sys.platform) -> None:
    """One listener per address; on POSIX it may bind while old connections of its port linger."""
    if platform == "win32":
        # SO_REUSEADDR would let another program take the port over.
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", -5), 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _keepalive_windows(sock: socket.socket, done: dict[str, int]) -> None:
    code = getattr(socket, "SIO_KEEPALIVE_VALS", None)
    ioctl = getattr(sock, "ioctl", None)
    if code is None or ioctl is None:
        return
    try:
        ioctl(code, (1, 1000 * KEEPALIVE_IDLE_S, 1000 * KEEPALIVE_INTERVAL_S))
    except OSError:
        return
    done["SIO_KEEPALIVE_VALS"] = KEEPALIVE_IDLE_S
