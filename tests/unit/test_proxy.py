"""The fault proxy does what it says, and counts it. Time is an argument: nothing here sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.proxy import FaultProxy, ProxyThread


class VirtualTime:
    """A clock that stands still until somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Ends:
    """Both ends of one connection through a proxy."""

    def __init__(self, proxy: FaultProxy, time: VirtualTime) -> None:
        self.proxy, self.time = proxy, time
        self.worker: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        self.coordinator: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    async def up(self, data: bytes) -> None:
        self.worker[1].write(data)
        await self.worker[1].drain()

    async def down(self, data: bytes) -> None:
        self.coordinator[1].write(data)
        await self.coordinator[1].drain()


@asynccontextmanager
async def connected(seed: int = 0) -> AsyncIterator[Ends]:
    accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda r, w: accepted.set_result((r, w)), "127.0.0.1", 0)
    time = VirtualTime()
    proxy = FaultProxy(server.sockets[0].getsockname()[:2], seed=seed, clock=time.clock, sleep=time.sleep)
    await proxy.start()
    ends = Ends(proxy, time)
    ends.worker = await asyncio.open_connection("127.0.0.1", proxy.port)
    ends.coordinator = await accepted
    try:
        yield ends
    finally:
        await proxy.aclose()
        for _, writer in (ends.worker, ends.coordinator):
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0)


async def nothing_to_read(reader: asyncio.StreamReader, turns: int = 50) -> bool:
    """Nothing comes while the loop looks at its sockets many times."""
    read = asyncio.ensure_future(reader.read(1))
    for _ in range(turns):
        await asyncio.sleep(0)
    if read.done():
        return False
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    return True


async def test_without_faults_bytes_and_ends_pass() -> None:
    async with connected() as ends:
        await ends.up(b"to the coordinator")
        assert await ends.coordinator[0].readexactly(18) == b"to the coordinator"
        await ends.down(b"back")
        assert await ends.worker[0].readexactly(4) == b"back"
        ends.worker[1].write_eof()
        assert await ends.coordinator[0].read() == b""
        await ends.down(b"still open")
        assert await ends.worker[0].readexactly(10) == b"still open"
        assert not ends.proxy.fired
        ends.coordinator[1].close()
        assert await ends.worker[0].read() == b""


async def test_delay_jitter_and_throttle_by_seed_and_in_order() -> None:
    async def waits(seed: int) -> list[float]:
        async with connected(seed) as ends:
            ends.proxy.up.delay_s, ends.proxy.up.jitter_s = 5.0, 1.0
            for number in range(4):
                await ends.up(bytes([number]))
                assert await ends.coordinator[0].readexactly(1) == bytes([number])
            assert ends.proxy.fired["up delayed"] == 4
            return ends.time.slept

    first, again, other = await waits(1), await waits(1), await waits(2)
    assert first == again != other
    assert all(5.0 <= wait <= 6.0 for wait in first)
    async with connected() as ends:
        ends.proxy.down.bytes_per_s = 100.0
        await ends.down(bytes(250))
        await ends.worker[0].readexactly(250)
        assert ends.time.now == pytest.approx(2.5)


async def test_slices() -> None:
    async with connected() as ends:
        ends.proxy.up.slice_bytes = 1
        ends.proxy.up.bytes_per_s = 1.0  # so that each slice is waited for alone
        await ends.up(b"abcd")
        assert await ends.coordinator[0].readexactly(4) == b"abcd"
        assert ends.time.now == pytest.approx(4.0)
        assert ends.proxy.fired["up sliced"] == 1


@pytest.mark.parametrize("name", ["up", "down"])
async def test_silence_in_one_direction_leaves_the_other_and_the_connection(name: str) -> None:
    async with connected() as ends:
        up = name == "up"
        flow = ends.proxy.up if up else ends.proxy.down
        send, reader = (ends.up, ends.coordinator[0]) if up else (ends.down, ends.worker[0])
        back, other = (ends.down, ends.worker[0]) if up else (ends.up, ends.coordinator[0])
        flow.hold()
        await send(b"late")
        await back(b"in time")
        assert await other.readexactly(7) == b"in time"
        assert await nothing_to_read(reader)
        flow.release()
        assert await reader.readexactly(4) == b"late"
        flow.swallow = True
        await send(b"lost")
        await back(b"in time")
        assert await other.readexactly(7) == b"in time"
        assert await nothing_to_read(reader)
        assert ends.proxy.fired[f"{name} swallowed"] == 1
        flow.swallow = False
        await send(b"next")
        assert await reader.readexactly(4) == b"next"
        assert ends.proxy.fired[f"{name} held"] == 1


async def test_a_changed_byte_and_a_chunk_twice() -> None:
    async with connected() as ends:
        ends.proxy.up.corrupt()
        await ends.up(bytes(64))
        got = await ends.coordinator[0].readexactly(64)
        assert sum(byte != 0 for byte in got) == 1
        await ends.up(bytes(64))
        assert await ends.coordinator[0].readexactly(64) == bytes(64)
        ends.proxy.down.duplicate()
        await ends.down(b"once")
        assert await ends.worker[0].readexactly(8) == b"onceonce"
        assert ends.proxy.fired == {"up corrupted": 1, "down duplicated": 1}


async def test_half_close_and_reset() -> None:
    async with connected() as ends:
        assert ends.proxy.half_close(ends.proxy.down) == 1
        assert await ends.worker[0].read() == b""
        await ends.up(b"go on")
        assert await ends.coordinator[0].readexactly(5) == b"go on"
        assert ends.proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            await ends.coordinator[0].read()
        assert ends.proxy.num_connections == 0


async def test_refusing_and_another_target() -> None:
    async with connected() as ends:
        ends.proxy.refuse = True
        reader, writer = await asyncio.open_connection("127.0.0.1", ends.proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.transport.abort()
        ends.proxy.heal()
        took: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()
            took.set_result(None)

        other = await asyncio.start_server(take, "127.0.0.1", 0)
        ends.proxy.target = other.sockets[0].getsockname()[:2]
        _, writer = await asyncio.open_connection("127.0.0.1", ends.proxy.port)
        await took
        writer.transport.abort()
        other.close()
        assert ends.proxy.fired["refused"] == 1


def test_in_a_thread() -> None:
    proxy = ProxyThread(("127.0.0.1", 1))
    try:
        proxy.call(lambda one: one.up.hold())
        assert proxy.call(lambda one: one.num_connections) == 0
        assert proxy.address == f"127.0.0.1:{proxy.port}"
    finally:
        proxy.close()
