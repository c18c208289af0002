"""The dashboard's server: pages, ``/events``, ``/api/v1``, ``/metrics`` and ``/health``, in the caller's event loop.

uvicorn runs as a task here and captures no signals. It serves from memory, reads nothing but what the view holds, and
changes nothing: see access for who may look and feed for what a slow viewer costs (nothing). See docs/dashboard.md.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl as tls
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from w5xde_async.telemetry.dashboard.access import Access
from w5xde_async.telemetry.dashboard.connections import Accepted, Connection, Idle, State, at_most
from w5xde_async.telemetry.dashboard.feed import MOST_VIEWERS, Feed
from w5xde_async.telemetry.dashboard.view import View
from w5xde_async.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_EXHAUSTED_S = 0.2
_MOST_REQUESTS = 512  # under way at a time, viewers too, or fewer where the process may open little
_A_TURN = 16  # connections that are accepted in one turn of the loop
_REST, _LONGEST_REST_S = 5, 2.0  # no answer is begun for four times as long as the last one took, at most 2 s
_FLUSH_S = 0.5
_SILENT_S = 10.0
_LEAST_TAKEN = 1 << 16  # bytes that a viewer takes in that time of what waits for it
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
    ".js": "text/javascript; charset=utf-8", ".txt": "text/plain; charset=utf-8",
}  # fmt: skip
_SECTIONS = ("status", "run", "series", "workers", "timelines", "evaluations", "checkpoints", "logs", "settings")
_NO_STORE = {"cache-control": "no-store"}
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state: State = State()
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept here: asyncio's own server bears any number of TLS handshakes, for a minute each."""
        self.servers, self.started = [], True
        for sock in sockets or ():
            self._begin(self._accept(sock))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        """A few a turn of the loop, so that each is heard before it is the oldest."""
        loop, idle, accepted_now = asyncio.get_running_loop(), self.server_state.idle, 0
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:  # it has ended already, or this process has no descriptor left
                await asyncio.sleep(_EXHAUSTED_S)
                continue
            accepted = Accepted(sock, address[0], handshake := self._begin(self._attach(sock)))
            idle.add(accepted)
            handshake.add_done_callback(partial(_end, idle, accepted))
            accepted_now += 1
            if accepted_now == _A_TURN:
                accepted_now = 0
                await asyncio.sleep(0)

    async def _attach(self, sock: socket.socket) -> None:
        make = partial(Connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        tls, handshake_s = (self.config.ssl, _SILENT_S) if self.config.ssl else (None, None)
        with suppress(OSError):  # of its TLS, or it is gone
            await asyncio.get_running_loop().connect_accepted_socket(
                make, sock, ssl=tls, ssl_handshake_timeout=handshake_s
            )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to whoever runs the loop


def _end(idle: Idle, accepted: Accepted, _: asyncio.Task[None]) -> None:
    idle.discard(accepted)
    accepted.ended()


class Dashboard:
    """Shows ``view`` and ``metrics``; the caller has subscribed both. ``start`` once, ``aclose`` once or twice."""

    def __init__(
        self, view: View, metrics: Metrics, *, host: str, port: int, token: str = "",
        ssl: tls.SSLContext | None = None, shown: str = "",
    ) -> None:  # fmt: skip
        """``token`` empty lets in whoever can connect: give one wherever that is not this machine alone.

        ``shown`` is the host in ``address``, where people reach it by another than it listens on.
        """
        self.host, self.port, self.moved = host, port, False
        self._shown = shown or host
        self.feed = Feed(view, max_viewers=at_most(MOST_VIEWERS, 8), soon=partial(self._asked, "viewers"))
        self._most_requests = at_most(_MOST_REQUESTS, 4)
        self._view, self._metrics, self._token, self._ssl = view, metrics, token, ssl
        self._static: dict[str, tuple[bytes, str]] = {}
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._making: dict[str, asyncio.Task[bytes]] = {}  # answers that are asked for and not begun
        self._one_by_one, self._rests_until = asyncio.Lock(), 0.0
        self._idle: dict[Any, tuple[int, float]] = {}  # connection -> bytes that wait for it, and since when

    @property
    def address(self) -> str:
        """Where it is, without the token."""
        shown = f"[{self._shown}]" if ":" in self._shown else self._shown
        return f"{'https' if self._ssl else 'http'}://{shown}:{self.port}/"

    @property
    def link(self) -> str:
        """Where it is, with the token where it has one: for people, not for logs."""
        return self.address + (f"?token={quote(self._token)}" if self._token else "")

    async def start(self) -> None:
        """Listen and serve. A port that is taken is replaced by a free one (``moved``). Raises OSError."""
        loop = asyncio.get_running_loop()
        self._static = await loop.run_in_executor(None, _read_static)
        sock = await self._listen(loop)
        app: ASGIApp = Access(self._app(), token=self._token, host=self.host, secure=self._ssl is not None)
        config = uvicorn.Config(
            self._within_limit(app), http=Connection, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=1, timeout_keep_alive=20,
        )  # fmt: skip
        config.load()
        config.ssl = self._ssl
        self._server = _Server(config)
        self._tasks = [
            asyncio.create_task(self._serve(self._server, sock), name="dashboard"),
            asyncio.create_task(self._flush(), name="dashboard updates"),
        ]

    async def aclose(self) -> None:
        """Give the viewers what is new, let them go, close."""
        if self._server is None:
            return
        self.feed.close()
        self._server.should_exit = True
        serving, flushing = self._tasks
        flushing.cancel()
        await asyncio.wait([serving, flushing])
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        found = await loop.getaddrinfo(self.host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, (host, *_) = found[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listen = partial(socket.create_server, family=family, backlog=2048, dualstack_ipv6=both)
        try:
            sock = listen((host, self.port))  # who comes from now on waits until it is served
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            sock = listen((host, 0))
            self.moved = True
        sock.setblocking(False)
        self.port = sock.getsockname()[1]
        return sock

    async def _serve(self, server: _Server, sock: socket.socket) -> None:
        try:
            await server.serve(sockets=[sock])
        except Exception:
            logger.exception("dashboard ended, the run goes on")
        finally:
            sock.close()

    async def _flush(self) -> None:
        failed = False
        while True:
            await asyncio.sleep(_FLUSH_S)
            now = asyncio.get_running_loop().time()
            for due in (self.feed.flush, partial(self.drop_idle, now)):
                try:
                    due()
                except Exception:
                    if not failed:  # it may fail with every update
                        logger.exception("dashboard cannot show all that is new, the run goes on")
                    failed = True

    def drop_idle(self, now: float) -> None:
        """Close connections that for ``_SILENT_S`` have asked for nothing, or for half of something, for which uvicorn
        would wait for ever, or have taken next to nothing of what waits for them: it is held in memory for as long as
        they are open."""
        before, self._idle = self._idle, {}
        connections: list[Any] = [] if self._server is None else list(self._server.server_state.connections)
        for connection in connections:
            transport = connection.transport
            waiting = transport.get_write_buffer_size() if transport is not None else 0
            if not waiting and not connection.silent:
                continue
            known, since = before.get(connection, (waiting, now))
            if waiting <= known - _LEAST_TAKEN or (waiting and not known):
                known, since = waiting, now
            if now - since < _SILENT_S:
                self._idle[connection] = known, since
            elif transport is not None:
                transport.abort()

    def _within_limit(self, app: ASGIApp) -> ASGIApp:
        """Beyond so many requests under way only ``/health`` is answered: who asks that may end this process."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            server = self._server
            busy = server is not None and len(server.server_state.tasks) > self._most_requests
            if busy and scope["path"] != "/health":
                await PlainTextResponse("too many requests\n", 503, {"retry-after": "10"})(scope, receive, send)
            else:
                await app(scope, receive, send)

        return limited

    async def _made(self, what: str, make: Callable[[], bytes]) -> bytes:
        """An answer of milliseconds, begun after it was asked for. Thousands that are asked for at once hold up neither
        the run nor ``/health``: they get the same, and to make answers takes ``1 / _REST`` of the loop."""
        return await asyncio.shield(self._asked(what, make))

    def _asked(self, what: str, make: Callable[[], bytes]) -> asyncio.Task[bytes]:
        making = self._making.get(what)
        if making is None:
            making = self._making[what] = asyncio.create_task(self._make(what, make))
            making.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever asked may be gone
        return making

    async def _make(self, what: str, make: Callable[[], bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._one_by_one:
            await asyncio.sleep(max(0.0, self._rests_until - loop.time()))
            del self._making[what]  # who asks from now on is given a newer one
            began = loop.time()
            try:
                return make()
            finally:
                now = loop.time()
                self._rests_until = now + min(_LONGEST_REST_S, (_REST - 1) * (now - began))

    # -- what it answers -----------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        async def page(request: Request) -> Response:
            return self._file("index.html")

        async def static(request: Request) -> Response:
            return self._file(request.path_params["name"])

        async def health(request: Request) -> Response:
            return _json(_encoded({"status": "ok"}))

        async def metrics(request: Request) -> Response:
            text = await self._made("metrics", self._metrics.text)
            return Response(text, headers={"content-type": _METRICS_TYPE, **_NO_STORE})

        async def events(request: Request) -> Response:
            if self.feed.full:
                return PlainTextResponse("too many viewers\n", 503, {"retry-after": "10"})
            headers = {"content-type": "text/event-stream", "x-accel-buffering": "no", **_NO_STORE}
            if request.method == "HEAD":
                return Response(headers=headers)
            return StreamingResponse(self.feed.watch(), headers=headers)

        async def api(request: Request) -> Response:
            section = request.path_params["section"]
            if section not in ("snapshot", *_SECTIONS):
                return _missing(section)

            def made() -> bytes:
                snapshot = self._view.snapshot()
                return _encoded(snapshot if section == "snapshot" else snapshot[section])

            return _json(await self._made(section, made))

        routes = [
            Route("/", page),
            Route("/static/{name}", static),
            Route("/events", events),
            Route("/api/v1/{section}", api),
            Route("/metrics", metrics),
            Route("/health", health),
        ]
        return Starlette(routes=routes)

    def _file(self, name: str) -> Response:
        found = self._static.get(name)
        if found is None:
            return PlainTextResponse("not found\n", 404)
        return Response(found[0], headers={"content-type": found[1], "cache-control": "no-cache"})


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str).encode()


def _json(encoded: bytes) -> Response:
    return Response(encoded, headers={"content-type": "application/json", **_NO_STORE})


def _missing(section: str) -> Response:
    answer = _json(_encoded({"error": f"there is no {section[:64]!r}", "sections": ["snapshot", *_SECTIONS]}))
    answer.status_code = 404
    return answer


def _read_static() -> dict[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    for entry in files(__package__).joinpath("static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[entry.name] = (entry.read_bytes(), _TYPES[suffix])
    return found
