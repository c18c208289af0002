"""The dashboard's connections: those with nothing under way make room for others, so that nobody is kept out by them.

Whoever can reach the port can open connections and say nothing, without any token or TLS. Beyond ``MOST_IDLE`` of them,
or an eighth of what the process may open, the oldest is closed, of the address that has most: a viewer or a probe of
another address loses none by it, and one of the same address has asked long before it is the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any, Protocol, cast

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MOST_IDLE = 512

# uvicorn warns of every request that is none, which anybody may send without a token: those lines would have no end.
logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)


def at_most(number: int, part: int) -> int:
    """``number``, or less: one in ``part`` of the descriptors that this process may have: the run needs others."""
    if sys.platform == "win32":
        return number
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return number if limit == resource.RLIM_INFINITY else min(number, max(limit // part, 1))


class Closable(Protocol):
    """What may have to make room. ``host``: the peer's address, without its port."""

    host: str

    def abort(self) -> None:
        """Close it at once."""


class Idle:
    """Connections without a request under way, each address's in the order in which they became so."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[Closable, None]] = {}
        self._number = 0
        self._most = at_most(MOST_IDLE, 8)

    def add(self, connection: Closable) -> None:
        """From now on it may be closed for others; the one whose turn it is, is closed at once."""
        self.discard(connection)
        self._hosts.setdefault(connection.host, {})[connection] = None
        self._number += 1
        if self._number > self._most:
            crowd = max(self._hosts, key=lambda host: len(self._hosts[host]))
            oldest = next(iter(self._hosts[crowd]))
            self.discard(oldest)
            oldest.abort()

    def discard(self, connection: Closable) -> None:
        """It has a request under way, or is gone. Calling it twice is fine."""
        known = self._hosts.get(connection.host, {})
        if connection in known:
            del known[connection]
            self._number -= 1
            if not known:
                del self._hosts[connection.host]


class Accepted:
    """A socket that is no ``Connection`` yet, since its handshake is under way."""

    def __init__(self, sock: socket.socket, host: str, handshake: asyncio.Task[None]) -> None:
        self._sock, self.host, self._handshake = sock, host, handshake

    def abort(self) -> None:
        self._handshake.cancel()

    def ended(self) -> None:
        """The handshake has; where it was cancelled before it began, nobody else has closed the socket."""
        if self._handshake.cancelled():
            self._sock.close()


class State(ServerState):
    """What all connections of one server share."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Idle()


class Connection(H11Protocol):
    """One connection; its server's state is a ``State``."""

    host = ""  #: the peer's address, without its port

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **kwargs)
        self.logger = logger

    @property
    def _idle(self) -> Idle:
        return cast(State, self.server_state).idle

    @property
    def silent(self) -> bool:
        """It has asked for nothing yet, or begun to ask for more, and uvicorn sets it no limit."""
        done = self.cycle is None or self.cycle.response_complete
        return done and self.timeout_keep_alive_task is None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        super().connection_made(transport)
        peer: Any = transport.get_extra_info("peername")
        self.host = str(peer[0]) if isinstance(peer, tuple) else ""
        self._idle.add(self)

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle.discard(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may have begun the next request
        if self.cycle.response_complete and not self.transport.is_closing():
            self._idle.add(self)
