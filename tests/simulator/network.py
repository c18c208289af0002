"""The network: byte streams with delay, jitter and a full pipe, that are cut, frozen, sliced and partitioned.

What TCP promises holds (bytes of one direction arrive in order, once, or the connection ends); nothing else does.
Bytes under way belong to the network: they arrive though their sender is paused or dead. A partition keeps them, and
delivers them when it heals.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tests.simulator.loop import HOST, Host, VirtualLoop

from w5xde_async.errors import Unreachable, W5xdeError
from w5xde_async.net.link import Link
from w5xde_async.net.stream import CLOSED_BY_PEER, CLOSED_HERE, Channel, StreamLost
from w5xde_async.wire.frame import Buffer

__all__ = ["ADDRESS", "Connection", "Network", "SimListener"]

ADDRESS = "127.0.0.1", 5555
RESET = "reset by peer"
_NOBODY = contextvars.Context()  # the network's own callbacks


class Pipe:
    """One direction of one connection."""

    def __init__(self, network: Network, source: Host, target: Host, number: int) -> None:
        self.network, self.source, self.target, self.number = network, source, target, number
        self.flying: deque[tuple[float, bytes | None]] = deque()  # (arrives at, data; None: the end)
        self.buffer = bytearray()  # arrived, unread
        self.load = 0  # bytes in either
        self.flown = self.arrived = 0  # bytes that were ever sent, and of those the ones that came
        self.ended: str | None = None  # for the reader, behind what is in the buffer
        self.broken: str | None = None  # for the writer
        self.reader: asyncio.Future[None] | None = None
        self.writer: asyncio.Future[None] | None = None
        self.slice_left = 0  # so many bytes are read in pieces of at most 7
        self.cut_after: int | None = None
        self._last_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def room(self) -> int:
        return self.network.limit_bytes - self.load

    def send(self, data: bytes) -> None:
        self.load += len(data)
        if not self.network.is_slow:
            self._fly(data)
            return
        piece = max(1, int(self.network.line_bytes_per_s / 2))  # it comes bit by bit
        for at in range(0, len(data), piece):
            self._fly(data[at : at + piece])

    def finish(self) -> None:
        """The sender closes: the reader sees the end behind what was sent."""
        self._fly(None)

    def _fly(self, data: bytes | None) -> None:
        network = self.network
        delay = network.delay(self.source.machine, self.target.machine)
        size = len(data) if data else 0
        at = max(self._last_at, network.loop.now + delay + size / network.bytes_per_s)
        at += size / network.line_bytes_per_s
        self._last_at = at
        self.flown += size
        self.flying.append((at, data))
        if self._timer is None and not self.blocked:
            self._schedule()

    @property
    def blocked(self) -> bool:
        return (self.source.machine, self.target.machine) in self.network.blocked

    def _schedule(self) -> None:
        at = max(self.flying[0][0], self.network.loop.now)
        self._timer = self.network.loop.call_at(at, self._deliver, context=_NOBODY)

    def healed(self) -> None:
        if self.flying and self._timer is None:
            self._schedule()

    def _deliver(self) -> None:
        self._timer = None
        if self.blocked:
            return
        now = self.network.loop.now
        while self.flying and self.flying[0][0] <= now:
            data = self.flying.popleft()[1]
            if data is None:
                self.ended = self.ended or CLOSED_BY_PEER
                continue
            self.network.note("bytes", f"{self.number} {len(data)}")
            self.arrived += len(data)
            if self.cut_after is not None:
                if len(data) > self.cut_after:
                    self.buffer += data[: self.cut_after]
                    self.network.hit("cut in mid-frame")
                    self.flying.clear()
                    self.ended = self.ended or CLOSED_BY_PEER
                    self.break_writer(RESET)
                    break
                self.cut_after -= len(data)
            self.buffer += data
        self.wake_reader()
        if self.flying and self._timer is None:
            self._schedule()

    def reset(self, reason: str = RESET) -> None:
        """The reader gets an error at once; unread and flying bytes are lost."""
        self.flying.clear()
        self.buffer.clear()
        self.load = 0
        self.ended = self.ended or reason
        self.wake_reader()

    def break_writer(self, reason: str) -> None:
        self.broken = self.broken or reason
        self.wake_writer()

    def wake_reader(self) -> None:
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def wake_writer(self) -> None:
        if self.writer is not None and not self.writer.done():
            self.writer.set_result(None)


class SimChannel(Channel):
    """One end of a connection, in the hands of one process."""

    def __init__(self, peer: str, host: Host, inbound: Pipe, outbound: Pipe) -> None:
        super().__init__(peer)
        self.host, self.inbound, self.outbound = host, inbound, outbound
        self.num_sends = 0
        self._chunks: list[Buffer] = []  # written, not drained

    @property
    def acked_bytes(self) -> int | None:
        return self.outbound.arrived if self.outbound.network.says_what_came else None

    @property
    def unacked_bytes(self) -> int | None:
        return self.outbound.flown - self.outbound.arrived if self.outbound.network.says_what_came else None

    async def receive(self, view: memoryview, least: int) -> int:
        pipe, got, loop = self.inbound, 0, self.host.loop
        while True:
            self._check()
            if pipe.ended == RESET and not pipe.buffer:
                raise StreamLost(self.peer, RESET)
            if pipe.buffer and self.host.deaf_until <= loop.now:
                part = min(len(pipe.buffer), len(view) - got)
                if pipe.slice_left > 0:
                    part = min(part, 1 + pipe.slice_left % 7)
                    pipe.slice_left -= part
                view[got : got + part] = pipe.buffer[:part]
                del pipe.buffer[:part]
                got += part
                pipe.load -= part
                self.bytes_received += part
                if pipe.writer is not None:
                    loop.call_later(pipe.network.delay(pipe.target.machine, pipe.source.machine), pipe.wake_writer,
                                    context=_NOBODY)  # fmt: skip
            if got >= least:
                return got
            if pipe.ended is not None and not pipe.buffer:
                raise StreamLost(self.peer, pipe.ended)
            if not pipe.buffer or self.host.deaf_until > loop.now:
                pipe.reader = loop.create_future()
                if pipe.buffer:
                    loop.call_at(self.host.deaf_until, pipe.wake_reader, context=_NOBODY)
                try:
                    await pipe.reader
                finally:
                    pipe.reader = None

    def writelines(self, chunks: Iterable[Buffer]) -> None:
        pipe = self.outbound
        if self.lost is not None or pipe.broken is not None:
            return  # ``drain`` says so
        chunks = list(chunks)
        total = sum(map(len, chunks))
        if self._chunks or total > pipe.room:
            self._chunks.extend(chunks)
            return
        data = b"".join(chunks)
        self.num_sends += 1
        if self.num_sends == 4 and self.host.pauses_at_joining_s:  # HELLO, PROOF, INTRODUCTION, READY
            self.host.deaf_until = self.host.loop.now + self.host.pauses_at_joining_s
            self.host.pauses_at_joining_s = 0.0
            pipe.network.hit("worker reads nothing at first")
        pipe.network.sent(self, data)
        pipe.send(data)
        self.bytes_sent += total

    async def drain(self) -> None:
        self._check()
        pipe = self.outbound
        if pipe.broken is not None:
            raise StreamLost(self.peer, pipe.broken)
        chunks, self._chunks = self._chunks, []
        for chunk in chunks:
            view, done = memoryview(chunk), 0
            while done < len(view):
                self._check()
                if pipe.broken is not None:
                    raise StreamLost(self.peer, pipe.broken)
                part = min(pipe.room, len(view) - done)
                if part <= 0:
                    pipe.network.hit("full pipe")
                    pipe.writer = self.host.loop.create_future()
                    try:
                        await pipe.writer
                    finally:
                        pipe.writer = None
                    continue
                pipe.send(bytes(view[done : done + part]))
                done += part
                self.bytes_sent += part

    async def aclose(self) -> None:
        if self.lost is None:
            self._close(CLOSED_HERE, harsh=False)

    def abort(self, reason: str = CLOSED_HERE) -> None:
        if self.lost is None:
            # The kernel resets a connection that is closed over unread bytes; the peer may lose what it has not read.
            self._close(reason, harsh=bool(self.inbound.buffer))

    def _close(self, reason: str, *, harsh: bool) -> None:
        self.lost = reason
        network, loop = self.inbound.network, self.host.loop
        if harsh:
            loop.call_later(network.delay(self.outbound.source.machine, self.outbound.target.machine),
                            self.outbound.reset, context=_NOBODY)  # fmt: skip
        else:
            self.outbound.finish()
        self.inbound.wake_reader()
        self.outbound.wake_writer()
        loop.call_later(network.delay(self.inbound.target.machine, self.inbound.source.machine) * 2,
                        self.inbound.break_writer, CLOSED_BY_PEER, context=_NOBODY)  # fmt: skip


class Connection:
    """A worker's end and the coordinator's end."""

    def __init__(self, network: Network, worker: Host, coordinator: Host, number: int) -> None:
        self.number, self.worker, self.coordinator = number, worker, coordinator
        self.forth = Pipe(network, worker, coordinator, 2 * number)
        self.back = Pipe(network, coordinator, worker, 2 * number + 1)
        self.near = SimChannel(f"{ADDRESS[0]}:{ADDRESS[1]}", worker, self.back, self.forth)
        self.far = SimChannel(f"{worker.machine}:{40000 + number}", coordinator, self.forth, self.back)

    @property
    def open(self) -> bool:
        return (
            self.near.lost is None and self.far.lost is None and self.worker.state != Host.DEAD
            and self.coordinator.state != Host.DEAD and self.forth.ended is None and self.back.ended is None
        )  # fmt: skip

    def reset(self) -> None:
        for pipe in (self.forth, self.back):
            pipe.reset()
            pipe.break_writer(RESET)

    def close(self) -> None:
        """A middlebox ends it in good order, both ways."""
        for pipe in (self.forth, self.back):
            pipe.finish()
            pipe.break_writer(CLOSED_BY_PEER)


class SimListener:
    """What ``net.endpoint.listen`` gives: accepts links until it is closed."""

    def __init__(self, network: Network, host: Host, on_link: Callable[[Link], Awaitable[None]]) -> None:
        self.network, self.owner, self._on_link = network, host, on_link
        self.host, self.port = ADDRESS
        self.accepting = True
        self._links: list[asyncio.Task[None]] = []

    @property
    def num_links(self) -> int:
        return sum(not task.done() for task in self._links)

    def accept(self, channel: SimChannel) -> None:
        self._links = [task for task in self._links if not task.done()]
        self._links.append(self.owner.spawn(self._serve(channel), f"link {channel.peer}"))

    async def stop_accepting(self) -> None:
        self.accepting = False

    async def aclose(self) -> None:
        self.accepting = False
        tasks = [task for task in self._links if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, channel: SimChannel) -> None:
        link = Link(*channel.pair())
        try:
            await self._on_link(link)
        except W5xdeError:
            pass
        except Exception as error:
            self.network.unexpected(f"link failed: {type(error).__name__}: {error}")
        except BaseException:
            link.abort()
            raise
        finally:
            await link.aclose()


class Network:
    """All connections and what is wrong with them."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop, self.random = loop, rng
        self.latency_s = rng.choice([0.0005, 0.005, 0.03])
        self.jitter_s = rng.choice([0.0, 0.002, 0.02, 0.2])
        self.bytes_per_s = rng.choice([1e5, 1e6, 1e8])  # of each thing that is sent, whatever else is on its way
        self.line_bytes_per_s = math.inf  # one thing after the other
        self.says_what_came = False  # to the sender
        self.limit_bytes = rng.choice([300, 1 << 10, 1 << 13, 1 << 16, 1 << 20])
        self.blocked: set[tuple[str, str]] = set()
        self.spiked: dict[str, float] = {}  # machine -> until when its links are slow
        self.connections: list[Connection] = []
        self.listeners: list[SimListener] = []
        self.recorded: dict[str, deque[tuple[int, bytes]]] = {}  # machine -> (pipe, frames)
        self.note: Callable[[str, str], None] = lambda kind, text: None
        self.hit: Callable[[str], None] = lambda kind: None
        self.unexpected: Callable[[str], None] = lambda text: None
        self._number = 0

    @property
    def is_slow(self) -> bool:
        """Whether bytes wait for each other: in the sender's kernel, which takes ``limit_bytes`` at once."""
        return self.line_bytes_per_s < math.inf

    def delay(self, source: str, target: str) -> float:
        delay = self.latency_s + (self.random.expovariate(1 / self.jitter_s) if self.jitter_s else 0.0)
        if self.spiked and max(self.spiked.get(source, 0.0), self.spiked.get(target, 0.0)) > self.loop.now:
            self.hit("delay spike")
            delay += self.random.uniform(0.2, 2.0)
        return delay

    def open_connections(self) -> list[Connection]:
        self.connections = [c for c in self.connections if c.near.lost is None or c.far.lost is None]
        return [connection for connection in self.connections if connection.open]

    def sent(self, stream: SimChannel, data: bytes) -> None:
        """Keep what workers said after joining: it is played again on later connections."""
        if stream.num_sends > 3 and len(data) < 8192 and stream.host.machine != "c":
            kept = self.recorded.setdefault(stream.host.machine, deque(maxlen=60))
            kept.append((stream.outbound.number, data))

    def block(self, source: str, target: str) -> None:
        self.blocked.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self.blocked.discard((source, target))
        for connection in self.connections:
            connection.forth.healed()
            connection.back.healed()

    def died(self, host: Host, *, power: bool) -> None:
        """A process is gone: its kernel ends its connections, unless the whole machine lost power."""
        self.listeners = [listener for listener in self.listeners if listener.owner is not host]
        for connection in self.connections:
            stream = connection.near if connection.worker is host else connection.far
            if stream.host is not host or stream.lost is not None:
                continue
            if power:
                stream.lost = "power lost"
                # Whoever still sends is answered with a reset once the machine is up again, if ever.
                if self.random.random() < 0.5:
                    self.loop.call_later(self.random.uniform(2.0, 8.0), connection.reset, context=_NOBODY)
            else:
                stream._close("process died", harsh=self.random.random() < 0.5)

    def route(self, caller: Host) -> SimListener | None:
        """The newest coordinator; an older one, by stale names, for whoever has served a newer term than its own."""
        listeners = [listener for listener in self.listeners if listener.accepting]
        if not listeners:
            return None
        newer = any(term > listeners[0].owner.term for term in caller.terms_served)
        if len(listeners) > 1 and newer and self.random.random() < 0.5:
            self.hit("sent to the older of two coordinators")
            return listeners[0]
        return listeners[-1]

    # -- what the rooms call ---------------------------------------------------------------------------------

    async def listen(
        self, host: str, port: int, on_link: Callable[[Link], Awaitable[None]], **options: Any
    ) -> SimListener:
        owner = HOST.get()
        assert owner is not None
        listener = SimListener(self, owner, on_link)
        self.listeners.append(listener)
        return listener

    async def connect(self, host: str, port: int, *, timeout_s: float, **options: Any) -> Link:
        caller = HOST.get()
        assert caller is not None
        deadline = self.loop.now + timeout_s
        peer = f"{host}:{port}"
        await asyncio.sleep(2 * self.delay(caller.machine, "c"))
        while ("c", caller.machine) in self.blocked or (caller.machine, "c") in self.blocked:
            if self.loop.now >= deadline:
                raise Unreachable(peer, "no answer", timeout_s)
            await asyncio.sleep(0.5)
        listener = self.route(caller)
        if listener is None:
            raise Unreachable(peer, "Connection refused", timeout_s)
        self._number += 1
        connection = Connection(self, caller, listener.owner, self._number)
        self.connections.append(connection)
        self.note("connect", f"{self._number} {caller.name} {listener.owner.name}")
        listener.accept(connection.far)
        return Link(*connection.near.pair())
