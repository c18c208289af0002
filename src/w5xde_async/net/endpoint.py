"""Links to and from addresses: ``connect``, ``listen``, ``parse_address``.

Invariants: a connection that fails half-way leaves no descriptor; every accepted link has a task, owned by its
Listener and gone when ``Listener.aclose`` returns; one slow or hostile peer (a TLS handshake that never ends) holds
nobody else up; when descriptors run out the listener waits, it does not spin. What this module does not do: retry
(the caller knows how long it is worth) or say who may join (``wire.handshake``).
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import hashlib
import hmac
import logging
import math
import os
import re
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import zip_longest
from typing import Any

from w5xde_async.errors import LinkLost, PortInUse, RefusalCode, Refused, Unreachable, UsageError, W5xdeError
from w5xde_async.net.encrypted import EncryptedChannel, shake_hands
from w5xde_async.net.hanging import in_daemon_thread
from w5xde_async.net.link import Link
from w5xde_async.net.racing import NoneWorked, first_that_works
from w5xde_async.net.sockets import SocketChannel, until_readable, until_writable
from w5xde_async.net.strangers import Strangers
from w5xde_async.net.stream import Channel, ended_by
from w5xde_async.net.transport import TransportChannel
from w5xde_async.net.tuning import tune, tune_listener

DEFAULT_PORT, DASHBOARD_PORT = 5555, 5556
#: A TLS handshake that takes longer is dropped.
HANDSHAKE_S = 10.0
#: Connections that wait in the system until they are accepted.
BACKLOG = 128
#: How long to leave the backlog alone when the system has no descriptor or memory left.
EXHAUSTED_S = 0.5
#: Connections that are turned away are said no more often than this.
REFUSALS_SAID_S = 60.0
_ENDING_S = 1.0  # in which a link that was closed ends
#: A coordinator with a dashboard has 22 beside its links, and needs some to save, to journal and to answer a browser.
_OTHER_DESCRIPTORS = 40
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_TLS_HINT = "compare both sides: TLS or --insecure, --tls-ca-file, --tls-cert; the coordinator's join file has it right"

_ITS_OWN = "write the address with the interface of this machine that leads there"
_NO_TLS = "WRONG_VERSION_NUMBER"  # in OpenSSL's words: what came is no record of TLS
_DATES = (9, 10)  # of OpenSSL: not yet valid, expired

_LONGEST_NAME, _LONGEST_LABEL = 253, 63  # RFC 1035
_LETTER = re.compile(r"[A-Za-z0-9._-]")
# An interface (eth0.100 too), or its number. What looks addresses up takes nothing that is empty between dots.
_SCOPE = re.compile(r"(?!\.|.*\.\.)[A-Za-z0-9._-]{1,15}(?<!\.)")
_SHOWN = 80  # characters of a host that is no good
_MOST_PORTS = 32  # that are tried where any free one will do, and all addresses of a name need the same
_HIDDEN = "(not shown: it may hold a secret)"

_log = logging.getLogger(__name__)

_Address = tuple[socket.AddressFamily, Any]


def is_no_address(text: str) -> bool:
    """Whether it is a URL, or means to be one: a join string, perhaps, whose secret is to be shown to nobody."""
    return "://" in text or "@" in text


def _quoted(text: str, most: int | None = None) -> str:
    """As an error shows it: ``most`` characters of it."""
    if is_no_address(text):
        return _HIDDEN
    return f"{text[:most]!r}{'...' * (len(text) > len(text[:most]))}"


def parse_address(
    text: str, default_port: int = DEFAULT_PORT, *, place: str = "address", listens: bool = False
) -> tuple[str, int]:
    """``host``, ``host:port``, ``[v6]`` or ``[v6]:port``; the port is ``default_port`` where none is given.

    ``place``: where it was given, for the UsageError. ``listens``: port 0 may be given, and stands for any free one.
    """
    host, port = split_address(text, default_port, place=place)
    if port == 0 and not listens:
        raise UsageError(f"{place} {text!r} has port 0, at which nothing listens; it looks like host:{default_port}")
    return valid_host(host, place=place), port


def split_address(text: str, default_port: int = DEFAULT_PORT, *, place: str = "address") -> tuple[str, int]:
    """As ``parse_address``, for a host that need not be a name or an address, and any port."""
    host, port_text = text.strip(), ""
    given = f"{place} {_quoted(text)}"
    example = default_port or DEFAULT_PORT
    if "," in host:
        raise UsageError(f"{given} names several; give one, as in host:{example}")
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in host:
            raise UsageError(f"{given} is not [IPv6]:port")
        port_text, colon = rest[1:], bool(rest)
    elif host.count(":") > 1:
        raise UsageError(f"{given}: write an IPv6 address in brackets, as in [::1]:{example}")
    else:
        host, found, port_text = host.partition(":")
        colon = bool(found)
    if not host or host.startswith("-") or any(one.isspace() or one in "/@[]" for one in host):
        raise UsageError(f"{given} has no valid host; it looks like host:{example}")
    if not colon:
        return host, default_port
    if not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5 or int(port_text) > 65535:
        raise UsageError(f"{given} has no valid port; a port is a number from 0 to 65535")
    return host, int(port_text)


def valid_host(host: str, *, place: str = "address") -> str:
    """A name that the resolver can be asked for, in ASCII (IDNA), or an address. Raises UsageError.

    Underscores pass, which the names of containers have and those of the Internet must not.
    """
    shown = f"{place} {_quoted(host, _SHOWN)}"
    if ":" in host:
        address, percent, scope = host.partition("%")
        try:
            parsed = ip_address(address)
        except ValueError:
            raise UsageError(f"{shown} is no IPv6 address") from None
        if percent and not _SCOPE.fullmatch(scope):
            raise UsageError(f"{shown} has no valid interface after its %")
        return "::" if parsed.is_unspecified else host
    if len(host) > _LONGEST_NAME:
        raise UsageError(f"{shown} has {len(host)} characters; a name has {_LONGEST_NAME} at most")
    name = host
    if not host.isascii():
        try:
            name = host.encode("idna").decode("ascii")
        except UnicodeError:
            raise UsageError(f"{shown} is no host name: IDNA does not write it in ASCII") from None
    if re.fullmatch(r"[0-9.]+", name):
        try:
            ip_address(name)
        except ValueError:
            raise UsageError(f"{shown} is no IPv4 address: four numbers from 0 to 255 with dots between") from None
        return name
    labels = name.removesuffix(".").split(".")
    if not all(labels):
        raise UsageError(f"{shown} is no host name: nothing stands before, after or between its dots")
    if len(name) > _LONGEST_NAME or max(map(len, labels)) > _LONGEST_LABEL:
        raise UsageError(
            f"{shown} is no host name: between dots are {_LONGEST_LABEL} characters at most, {_LONGEST_NAME} in all"
        )
    if odd := next((character for character in name if not _LETTER.fullmatch(character)), ""):
        raise UsageError(f"{shown} is no host name: {odd!r} has no place in one")
    if name.startswith("-"):  # a program would take it for a flag
        raise UsageError(f"{shown} is no host name: it begins with a hyphen")
    return name


def bare_host(text: str, *, place: str = "address") -> str:
    """``host`` or an IPv6 address, in brackets or not, without a port. Raises UsageError."""
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host.count(":") == 1 and host.rpartition(":")[2].isdecimal():
        raise UsageError(f"{place} {_quoted(text)} has a port: give that as --port {host.rpartition(':')[2]}")
    if not host:
        raise UsageError(f"{place} {text!r} is no host name or address")
    return valid_host(host, place=place)


def format_address(host: str, port: int) -> str:
    """The inverse of ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(
    host: str,
    port: int,
    *,
    timeout_s: float,
    ssl: ssl.SSLContext | None = None,
    bulk: Executor | None = None,
    certificate: bytes = b"",
) -> Link:
    """A link to the first address of ``host`` that answers; the next is tried beside it after a quarter of a second.
    ``certificate``: the SHA-256 of the one that it has to show, where only that one will do.

    A resolver that hangs holds nobody up longer than ``timeout_s``, nor the end of the program. Raises Unreachable, and
    Refused where TLS does not come about for a reason that will not go away.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    peer = format_address(host, port)
    try:
        async with asyncio.timeout_at(deadline):
            addresses = _families_in_turn(await _look_up(host, port))
    except TimeoutError:
        raise Unreachable(peer, "the name did not resolve in time", timeout_s) from None
    except OSError as error:
        scope = host.partition("%")[2]
        if scope and not scope.isdigit() and scope not in [name for _, name in socket.if_nameindex()]:
            raise Unreachable(peer, f"this machine has no interface {scope!r}", timeout_s, advice=_ITS_OWN) from None
        raise Unreachable(peer, f"the name does not resolve: {ended_by(error)}", timeout_s) from None
    except UnicodeError:
        raise Unreachable(peer, "the name does not resolve: it is no host name", timeout_s) from None

    async def attempt(address: _Address) -> Link:
        try:
            async with asyncio.timeout_at(deadline):
                channel = await _connect_one(address, peer, host, tls=ssl, bulk=bulk)
            link = Link(*channel.pair())
            check_certificate(link, certificate)
            return link
        except TimeoutError:
            raise LinkLost(peer, "no answer") from None
        except (OSError, LinkLost) as error:
            if _is_refusal(error):
                raise Refused(RefusalCode.AUTHENTICATION, _why(error), _tls_hint(error)) from None
            raise LinkLost(peer, _why(error)) from None

    try:
        return await first_that_works([partial(attempt, one) for one in addresses], discard=Link.abort)
    except NoneWorked as failed:
        for other in failed.errors:
            if not isinstance(other, LinkLost):
                raise other from None
        lost = dict.fromkeys(each.reason for each in failed.errors if isinstance(each, LinkLost))
        raise Unreachable(peer, ", ".join(lost) or "the name has no address", timeout_s) from None


def check_certificate(link: Link, expected: bytes) -> None:
    """Whether the other side has shown the certificate of that SHA-256 (empty: any will do).

    Raises Refused; then the link is aborted.
    """
    if expected and not hmac.compare_digest(hashlib.sha256(link.certificate).digest(), expected):
        link.abort()
        raise Refused(
            RefusalCode.AUTHENTICATION,
            "the coordinator's certificate is not the one of the join string",
            "copy the present join file, or string; if it has not changed, somebody sits between",
        )


async def listen(
    host: str,
    port: int,
    on_link: Callable[[Link], Awaitable[None]],
    *,
    ssl: ssl.SSLContext | None = None,
    bulk: Executor | None = None,
    max_strangers: int = 1024,
    max_of_address: int = 64,
) -> Listener:
    """Listen on every address of ``host`` ("" is all of this machine); port 0 picks a free one.

    ``on_link`` runs in a task of its own for each link, which is closed when it returns. Of those that have not been
    let in (``Link.let_in``) there may be ``max_strangers``, ``max_of_address`` from one address: for a new one beyond,
    the one of its address, or of the address that has most, that has said nothing for longest is closed. So it is
    where this process may have no more descriptors, since those that it needs for its files are not for links; where
    all have been let in, the new one is closed. Raises PortInUse, UsageError.
    """
    try:
        addresses = await _resolve(host or None, port, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"cannot listen on {host!r}: {ended_by(error)}") from None
    except UnicodeError:
        raise UsageError(f"cannot listen on {host!r}: it is no host name") from None
    for left in reversed(range(1 if port else _MOST_PORTS)):
        try:
            socks = _bind_all(addresses, host, port)
            break
        except PortInUse:  # one that the first address has chosen may be taken at another
            if not left:
                raise
    most = _most_links()
    return Listener(
        socks, on_link, tls=ssl, bulk=bulk, max_links=most, max_strangers=max_strangers,
        max_of_address=min(max_of_address, most / 2),
    )  # fmt: skip


def _bind_all(addresses: Sequence[_Address], host: str, port: int) -> list[socket.socket]:
    socks: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys(addresses):  # a name may stand twice in a table of hosts
            # Port 0 is chosen by the first address; the others follow it.
            bound = (address[0], socks[0].getsockname()[1], *address[2:]) if socks and not port else address
            sock = _bind(family, bound, host, port)
            if sock is not None:
                socks.append(sock)
        if not socks:
            raise UsageError(f"cannot listen on {host!r}: no usable address")
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return socks


def _most_links() -> float:
    """How many descriptors links may take."""
    if sys.platform == "win32":
        return math.inf
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else max(limit - _OTHER_DESCRIPTORS, 2)


@dataclass(slots=True, eq=False)
class _Accepted:
    host: str
    sock: socket.socket | None = None
    link: Link | None = None  # None during the TLS handshake
    spoke: bool = False  # its handshake has begun
    task: asyncio.Task[None] | None = None

    @property
    def heard(self) -> int:
        return self.spoke if self.link is None else self.link.bytes_received

    def close(self) -> None:
        if self.link is not None:
            self.link.abort()
        elif self.task is not None:
            self.task.cancel()


class Listener:
    """Accepts links until it is closed. Made by ``listen``."""

    def __init__(
        self,
        socks: list[socket.socket],
        on_link: Callable[[Link], Awaitable[None]],
        *,
        tls: ssl.SSLContext | None,
        bulk: Executor | None,
        max_links: float,
        max_strangers: float,
        max_of_address: float,
    ) -> None:
        self.host, self.port, *more = socks[0].getsockname()
        if len(more) == 2 and more[1]:  # its interface, without which nobody finds a link-local address
            self.host = f"{self.host.partition('%')[0]}%{socket.if_indextoname(more[1])}"
        self._socks = socks
        self._on_link = on_link
        self._tls, self._bulk = tls, bulk
        self._max_links, self._links = max_links, dict[asyncio.Task[None], _Accepted]()
        self._strangers = Strangers(max_strangers, max_of_address)
        self._warn_at = 0.0
        self._one_ended = asyncio.Event()
        self._stopped = False
        loop = asyncio.get_running_loop()
        name = f"accept {format_address(self.host, self.port)}"
        self._accepting = [loop.create_task(self._accept(sock), name=name) for sock in socks]

    @property
    def num_links(self) -> int:
        """Links being handled now, handshakes included."""
        return len(self._links)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection that somebody else has accepted; returns when it has ended.

        The limits are those of the port, and so is the end: once the port is closed, the connection is closed at once.
        An address without a host, as a Unix socket has, counts as one host. Cancelled, it ends the connection first.
        """
        link = Link(reader, writer)
        address = writer.get_extra_info("peername")
        host = address[0] if isinstance(address, tuple) else ""
        has_room = False
        try:
            has_room = not self._stopped and await self._has_room(host, link.peer)
        finally:
            if not has_room:
                link.abort()
        if not has_room:
            return
        accepted = _Accepted(host, link=link)
        task = self._begin(accepted, self._serve_link(accepted, link), link.peer)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise

    async def stop_accepting(self) -> None:
        """Close the port; links that stand go on."""
        self._stopped = True
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for sock in self._socks:
            sock.close()

    async def aclose(self) -> None:
        """Close the port, cancel the tasks of all links and wait for them. May be called twice."""
        await self.stop_accepting()
        tasks = self._links.keys() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        paused, failed = False, 0  # in a row
        while True:
            try:
                sock, address = await _next(loop, listening)
            except OSError as error:
                # One that is none of these is the failure of one connection that ended before we took it. The next may
                # have ended, too; but what forbids to accept at all would keep the event loop here for good.
                failed += 1
                if error.errno not in _EXHAUSTED and failed == 1:
                    await asyncio.sleep(0)
                    continue
                if not paused:
                    _log.warning("accept paused reason=%s", ended_by(error))
                paused = True
                await asyncio.sleep(EXHAUSTED_S)
                continue
            paused, failed = False, 0
            peer, has_room = format_address(*address[:2]), False
            try:
                has_room = await self._has_room(address[0], peer)
            finally:
                if not has_room:
                    sock.close()
            if has_room:
                accepted = _Accepted(address[0], sock)
                self._begin(accepted, self._serve_socket(sock, peer, accepted), peer)

    async def _has_room(self, host: str, peer: str) -> bool:
        """Whether one link more from ``host`` may be served, for which strangers may have had to go."""
        now = asyncio.get_running_loop().time()
        told = len(self._links), len(self._strangers), self._strangers.of(host)
        if len(self._links) >= self._max_links or not self._strangers.has_room(host):
            await asyncio.sleep(0)  # more may come than can be taken in, and the others have work to do
        closed = len(self._links) >= self._max_links and self._strangers.close_one(now)
        if closed:  # its descriptor is not free yet
            with suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    while len(self._links) >= self._max_links:
                        self._one_ended.clear()
                        await self._one_ended.wait()
        has_room = len(self._links) < self._max_links and not self._stopped
        if has_room:
            closed = self._strangers.make_room(host, now) or closed
        if (closed or not has_room) and now >= self._warn_at:  # a flood of them must not become one of lines
            self._warn_at = now + REFUSALS_SAID_S
            what = "strangers closed for a newcomer" if has_room else "accept refused"
            _log.warning("%s peer=%s links=%d strangers=%d of_its_address=%d", what, peer, *told)
        return has_room

    def _begin(self, accepted: _Accepted, serving: Coroutine[Any, Any, None], peer: str) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        task = accepted.task = loop.create_task(serving, name=f"link {peer}")
        self._links[task] = accepted
        self._strangers.add(accepted, loop.time())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        accepted = self._links.pop(task)
        if accepted.link is not None:  # a task that was cancelled before it began has closed neither
            accepted.link.abort()
        elif accepted.sock is not None:
            accepted.sock.close()
        self._strangers.discard(accepted)
        self._one_ended.set()

    async def _serve_socket(self, sock: socket.socket, peer: str, accepted: _Accepted) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                if self._tls is not None and _watches_descriptors(loop):
                    await until_readable(sock)
                    accepted.spoke = True
                channel = await _attach(sock, peer, tls=self._tls, bulk=self._bulk, server_hostname=None)
        except (OSError, LinkLost) as error:
            _log.info("accept failed peer=%s reason=%s", peer, _why(error))
            return
        link = Link(*channel.pair())
        link.greeted_s = loop.time() - began
        await self._serve_link(accepted, link)

    async def _serve_link(self, accepted: _Accepted, link: Link) -> None:
        accepted.link, link.on_let_in = link, partial(self._strangers.discard, accepted)
        try:
            await self._on_link(link)
        except W5xdeError as error:
            _log.info("link ended peer=%s reason=%s", link.peer, error)
        except Exception:
            _log.exception("link failed peer=%s", link.peer)
        except BaseException:
            link.abort()
            raise
        finally:
            await link.aclose()


async def _next(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> tuple[socket.socket, Any]:
    """``loop.sock_accept``, which loses what it has accepted where it is cancelled in the turn after; this does not."""
    if not _watches_descriptors(loop):
        return await loop.sock_accept(listening)
    while True:
        try:
            sock, address = listening.accept()
        except (BlockingIOError, InterruptedError):
            await until_readable(listening)
        else:
            return sock, address


async def _look_up(host: str, port: int) -> list[_Address]:
    """As ``_resolve``. A name is asked for in a thread that nobody waits for: a resolver may take minutes."""
    try:
        return await _resolve(host, port, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await in_daemon_thread(("resolve", host, port), partial(_ask_resolver, host, port))


def _ask_resolver(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(family, address) for family, _, _, _, address in found]


def _families_in_turn(addresses: Sequence[_Address]) -> list[_Address]:
    """In the resolver's order, but for the families, which take turns (RFC 8305): one of them may lead nowhere."""
    if not addresses:
        return []
    first = [one for one in addresses if one[0] == addresses[0][0]]
    others = [one for one in addresses if one[0] != addresses[0][0]]
    return [one for pair in zip_longest(first, others) for one in pair if one is not None]


async def _resolve(host: str | None, port: int, *, flags: int = 0) -> list[_Address]:
    if host is not None and "%" in host:  # uvloop's own drops the scope; an address keeps nobody waiting
        kind = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP}
        found = socket.getaddrinfo(host, port, **kind, flags=flags | socket.AI_NUMERICHOST)
    else:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


async def _connect_one(
    address: _Address, peer: str, host: str, *, tls: ssl.SSLContext | None, bulk: Executor | None
) -> Channel:
    loop = asyncio.get_running_loop()
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await _sock_connect(loop, sock, address[1])
        if sock.getsockname() == sock.getpeername():
            # A free port of the ephemeral range, dialled locally, can connect to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    except BaseException:
        sock.close()
        raise
    name = host.removesuffix(".")  # certificates name a host without the root's dot
    return await _attach(sock, peer, tls=tls, bulk=bulk, server_hostname=name)


async def _sock_connect(loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Any) -> None:
    """``loop.sock_connect``, with which uvloop drops the scope of an IPv6 address; this does not."""
    if len(address) < 4 or not address[3] or not _watches_descriptors(loop):
        await loop.sock_connect(sock, address)
        return
    with suppress(BlockingIOError):
        sock.connect(address)
        return
    await until_writable(sock)
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


async def _attach(
    sock: socket.socket,
    peer: str,
    *,
    tls: ssl.SSLContext | None,
    bulk: Executor | None,
    server_hostname: str | None,
) -> Channel:
    """The channel over a connected socket, which it owns; closed where this raises."""
    loop = asyncio.get_running_loop()
    channel: TransportChannel | None = None
    try:
        sock.setblocking(False)
        tuned = tune(sock)
        _log.debug("socket tuned peer=%s options=%s", peer, tuned)
        if _watches_descriptors(loop):
            if tls is None:
                return SocketChannel(sock, peer, bulk=bulk)
            return EncryptedChannel(await shake_hands(sock, tls, server_hostname), peer)
        made = channel = TransportChannel(peer)
        if server_hostname is None:
            await loop.connect_accepted_socket(lambda: made, sock, ssl=tls)
        else:
            name = server_hostname if tls is not None else None
            await loop.create_connection(lambda: made, sock=sock, ssl=tls, server_hostname=name)
    except BaseException:
        if channel is not None and channel.connected:  # cancelled in the turn in which the handshake was done
            channel.abort()  # the transport owns the socket by now, and would wait for the other side's last word
        else:
            sock.close()
        raise
    return channel


def _watches_descriptors(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether bytes can go without a transport."""
    return hasattr(socket.socket, "sendmsg") and type(loop).add_reader is not asyncio.AbstractEventLoop.add_reader


def _bind(family: socket.AddressFamily, address: Any, host: str, port: int) -> socket.socket | None:
    literal = ":" in host
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None  # a family that this kernel does not have
    try:
        sock.setblocking(False)
        tune_listener(sock)
        if family == socket.AF_INET6:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6 and not literal:
            return None  # localhost is also ::1, which this machine may have switched off
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host or "*", port) from None
        where = format_address(host or "*", port) if port else host or "*"
        lacking = error.errno == errno.EINVAL and host.lower().startswith("fe80:") and "%" not in host
        reason = f"a link-local address needs its interface: {host}%eth0" if lacking else ended_by(error)
        raise UsageError(f"cannot listen on {where}: {reason}") from None
    return sock


def _is_refusal(error: Exception) -> bool:
    """TLS failed over what one side is, not over the network between them."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def _tls_hint(error: Exception) -> str:
    """What to do. Certificates are valid from one moment to another: a wrong clock looks like a wrong certificate."""
    reason = str(getattr(error, "reason", "") or "").upper()
    if reason == _NO_TLS:
        return f"what listens there speaks no TLS, and may be no coordinator; {_TLS_HINT}"
    if getattr(error, "verify_code", 0) not in _DATES and "EXPIRED" not in reason:
        return _TLS_HINT
    now = datetime.datetime.now(datetime.UTC)
    return f"compare the clocks of both sides (this machine's says {now:%Y-%m-%d %H:%M} UTC), or renew the certificate"


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: certificate not accepted: {error.verify_message}"
    if isinstance(error, LinkLost):
        return error.reason
    return ended_by(error) if isinstance(error, OSError) else str(error)
