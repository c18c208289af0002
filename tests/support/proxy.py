"""A TCP proxy with faults, between workers and their coordinator.

Each direction is a :class:`Flow`: delay, jitter, throttle, slices, one byte changed, one chunk sent twice, and two
kinds of silence that leave both TCP connections up: ``hold`` (bytes wait, as behind a partition that heals) and
``swallow`` (bytes are taken and lost, as by a middlebox that has forgotten the connection). Connections as a whole can
be reset or half-closed. Everything can be switched while bytes flow, and ``fired`` counts what took effect.

Where the seed decides (jitter, which byte changes), the same seed decides alike; how the system cuts the stream into
chunks is not ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

CHUNK_BYTES = 1 << 16
#: Chunks of one connection and direction that may wait for their time; then the sender is not read any more.
PENDING_CHUNKS = 256

_T = TypeVar("_T")


class Flow:
    """One direction of all connections. ``up`` carries what workers send, ``down`` what the coordinator sends."""

    def __init__(self, name: str, seed: int, fired: Counter[str]) -> None:
        self.name, self._fired = name, fired
        self.delay_s = self.jitter_s = 0.0
        self.bytes_per_s = 0.0  # 0: no limit
        self.slice_bytes = 0  # 0: as it comes
        self.swallow = False
        self.nbytes = 0  # delivered
        self.tape: bytearray | None = None  # of what was delivered, where one is wanted
        self._corrupt = self._duplicate = 0
        self._random = random.Random(f"{seed}:{name}")
        self._flowing = asyncio.Event()
        self._flowing.set()

    def hold(self) -> None:
        """Deliver nothing from now on; ``release`` delivers all of it, in order."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    def corrupt(self, chunks: int = 1) -> None:
        """Change one byte in each of the next ``chunks`` chunks."""
        self._corrupt += chunks

    def duplicate(self, chunks: int = 1) -> None:
        """Send each of the next ``chunks`` chunks twice."""
        self._duplicate += chunks

    def heal(self) -> None:
        """No fault any more. What was swallowed stays lost."""
        self.delay_s = self.jitter_s = self.bytes_per_s = 0.0
        self.slice_bytes = self._corrupt = self._duplicate = 0
        self.swallow = False
        self.release()

    # -- for the proxy -------------------------------------------------------------------------------------

    def changed(self, data: bytes) -> bytes:
        """What is sent in place of ``data``."""
        if self._corrupt:
            self._corrupt -= 1
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ self._random.randrange(1, 256)]) + data[at + 1 :]
            self.count("corrupted")
        if self._duplicate:
            self._duplicate -= 1
            data += data
            self.count("duplicated")
        return data

    def pieces(self, data: bytes) -> Iterator[bytes]:
        if 0 < self.slice_bytes < len(data):
            self.count("sliced")
            for at in range(0, len(data), self.slice_bytes):
                yield data[at : at + self.slice_bytes]
        else:
            yield data

    def wait_s(self) -> float:
        """Delay of the next chunk."""
        if self.jitter_s:
            return self.delay_s + self._random.random() * self.jitter_s
        return self.delay_s

    async def open(self) -> None:
        if not self._flowing.is_set():
            self.count("held")
            await self._flowing.wait()

    def count(self, fault: str) -> None:
        self._fired[f"{self.name} {fault}"] += 1


class _Connection:
    """A worker's socket and the one to the coordinator for it."""

    def __init__(self, inside: socket.socket, outside: socket.socket) -> None:
        self.inside, self.outside = inside, outside
        self.tasks: list[asyncio.Task[None]] = []

    async def end(self, *, reset: bool) -> None:
        """Close both sockets, once nothing waits on them any more: their numbers may be used again at once."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for sock in (self.inside, self.outside):
            if reset:
                _reset(sock)
            sock.close()


class FaultProxy:
    """Listens on loopback and carries every connection to ``target``, which may change at run time."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.target = target
        self.refuse = False  # new connections are reset at once
        self.fired: Counter[str] = Counter()
        self.up, self.down = Flow("up", seed, self.fired), Flow("down", seed, self.fired)
        self._clock, self._sleep = clock, sleep
        self._connections: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._accepting = self._spawn(self._accept(), "accept")

    async def aclose(self) -> None:
        self._accepting.cancel()
        self.reset()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def heal(self) -> None:
        """No fault any more, in either direction."""
        self.refuse = False
        self.up.heal()
        self.down.heal()

    def reset(self) -> int:
        """RST to both ends of every connection; how many there were."""
        ended = tuple(self._connections)
        for connection in ended:
            self._end(connection, reset=True)
        self.fired["reset"] += len(ended)
        return len(ended)

    def half_close(self, flow: Flow) -> int:
        """End the stream that ``flow`` carries, in every connection; the other direction goes on."""
        for connection in self._connections:
            sink = connection.outside if flow is self.up else connection.inside
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
                flow.count("half-closed")
        return len(self._connections)

    # -- carrying ------------------------------------------------------------------------------------------

    def _spawn(self, work: Awaitable[None], name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        task.set_name(f"proxy {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            inside, _ = await loop.sock_accept(self._listener)
            self._spawn(self._connect(inside), "connect")

    async def _connect(self, inside: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        outside = socket.socket()
        outside.setblocking(False)
        inside.setblocking(False)
        try:
            if self.refuse:
                self.fired["refused"] += 1
                raise ConnectionRefusedError
            await loop.sock_connect(outside, self.target)
        except BaseException as error:
            _reset(inside)
            inside.close()
            outside.close()
            if isinstance(error, OSError):
                return
            raise
        for sock in (inside, outside):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(inside, outside)
        self._connections.append(connection)
        for flow, source, sink in ((self.up, inside, outside), (self.down, outside, inside)):
            pending: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PENDING_CHUNKS)
            connection.tasks += [
                self._spawn(self._read(connection, flow, source, pending), f"read {flow.name}"),
                self._spawn(self._write(connection, flow, sink, pending), f"write {flow.name}"),
            ]

    def _end(self, connection: _Connection, *, reset: bool) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._spawn(connection.end(reset=reset), "end")

    async def _read(
        self, connection: _Connection, flow: Flow, source: socket.socket, pending: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        due, data = 0.0, b"-"
        while data:
            try:
                data = await loop.sock_recv(source, CHUNK_BYTES)
            except OSError:
                if not flow.swallow:
                    self._end(connection, reset=True)
                return
            if flow.swallow:
                flow.count("swallowed")  # the stream's end too
                continue
            for piece in flow.pieces(flow.changed(data)) if data else [b""]:
                due = max(due, self._clock() + flow.wait_s())  # jitter never reorders a stream
                if flow.bytes_per_s:
                    flow.count("throttled")
                    due += len(piece) / flow.bytes_per_s
                await pending.put((due, piece))

    async def _write(
        self, connection: _Connection, flow: Flow, sink: socket.socket, pending: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            due, data = await pending.get()
            if (left := due - self._clock()) > 0:
                flow.count("delayed")
                await self._sleep(left)
            await flow.open()
            try:
                if data:
                    await loop.sock_sendall(sink, data)
                    flow.nbytes += len(data)
                    if flow.tape is not None:
                        flow.tape += data
                else:
                    sink.shutdown(socket.SHUT_WR)
            except OSError:
                self._end(connection, reset=True)
                return
        others = [task for task in connection.tasks if task is not asyncio.current_task()]
        if all(task.done() for task in others):
            self._end(connection, reset=False)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class ProxyThread:
    """A FaultProxy in a thread of its own, for tests without an event loop: ``proxy.call(lambda p: p.up.hold())``."""

    def __init__(self, target: tuple[str, int], *, seed: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._proxy = self._run(self._make(target, seed))
        self.port, self.fired = self._proxy.port, self._proxy.fired

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, act: Callable[[FaultProxy], _T]) -> _T:
        """Run ``act`` on the proxy's loop; its result."""

        async def acting() -> _T:
            return act(self._proxy)

        return self._run(acting())

    def close(self) -> None:
        self._run(self._proxy.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _make(self, target: tuple[str, int], seed: int) -> FaultProxy:
        proxy = FaultProxy(target, seed=seed)
        await proxy.start()
        return proxy

    def _run(self, work: Awaitable[_T]) -> _T:
        async def waiting() -> _T:
            return await work

        return asyncio.run_coroutine_threadsafe(waiting(), self._loop).result(20)
