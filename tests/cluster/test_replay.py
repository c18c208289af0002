"""G12: every frame that a run sent, in either direction, again: to the same run, to another, and to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.support.cluster import QUICK_WORKER, Commits, settings
from tests.support.jobs import mlp_sgd
from tests.support.memory_links import memory_pair

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LinkLost, Refused, RemoteError
from w5xde_async.net.endpoint import connect
from w5xde_async.wire.frame import LENGTH_BYTES, SESSION_CAPS, decode_header, encode
from w5xde_async.wire.messages import Bye, Done, Drain, Heartbeat, Hello, Lease, Params, Proof, Ready, Result
from w5xde_async.worker.connection.handshake import join
from w5xde_async.worker.service import Worker

TOKEN = "the run's secret"
STEPS = 8


class Recorder:
    """Sits between a worker and its coordinator and keeps every byte. ``streams``: (from the worker, to it) by link."""

    def __init__(self) -> None:
        self.streams: list[tuple[bytearray, bytearray]] = []
        self.port = 0

    @asynccontextmanager
    async def before(self, port: int) -> AsyncIterator[str]:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            relays.append(asyncio.current_task())
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            kept = (bytearray(), bytearray())
            self.streams.append(kept)

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, into: bytearray) -> None:
                while data := await source.read(1 << 16):
                    into.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(
                copy(reader, inner_writer, kept[0]), copy(inner_reader, writer, kept[1]), return_exceptions=True
            )
            for one in (inner_writer, writer):
                one.close()
                with suppress(ConnectionError):
                    await one.wait_closed()

        relays: list[Any] = []
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*relays, return_exceptions=True)
        await server.wait_closed()


def frames(stream: bytes) -> list[bytes]:
    """A stream cut into its frames, buffers and all."""
    found, at = [], 0
    while at + LENGTH_BYTES <= len(stream):
        length = int.from_bytes(stream[at : at + LENGTH_BYTES], "big")
        end = at + LENGTH_BYTES + length
        _, specs = decode_header(stream[at + LENGTH_BYTES : end], SESSION_CAPS)
        end += sum(spec.nbytes for spec in specs)
        found.append(bytes(stream[at:end]))
        at = end
    return found


def kind(frame: bytes) -> type:
    length = int.from_bytes(frame[:LENGTH_BYTES], "big")
    return type(decode_header(frame[LENGTH_BYTES : LENGTH_BYTES + length], SESSION_CAPS)[0])


async def send(port: int, *parts: bytes) -> bytes:
    """Everything that a new connection which sends this gets back before it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
    writer.write_eof()
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def effect(coordinator: Coordinator) -> tuple[Any, ...]:
    """All that a replayed frame could have changed."""
    training: Any = coordinator._training
    assert training is not None
    ledger = training.ledger
    return (
        training.version, training.phase.samples_applied, training.aggregator.state.digest(),
        tuple(training.roster.sessions), tuple(training.roster.joining),
        ledger.open_steps, [ledger.free_leaves(step) for step in ledger.open_steps],
        training.phase.leaves, training.phase.counts(), sorted(ledger._grants),
    )  # fmt: skip


async def recorded(name: str) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Every frame from workers, every frame to them, and the two directions of each link, of a whole run."""
    recorder = Recorder()
    async with Coordinator(mlp_sgd(), name=name, config=settings(max_steps=STEPS, token=TOKEN)) as coordinator:
        async with recorder.before(coordinator.port) as address:
            worker = Worker(address, job=mlp_sgd(), config=replace(QUICK_WORKER, token=TOKEN))
            await asyncio.gather(worker.run(), coordinator.wait())
    whole = [bytes(stream) for pair in recorder.streams for stream in pair]
    upward = [frame for up, _ in recorder.streams for frame in frames(up)]
    downward = [frame for _, down in recorder.streams for frame in frames(down)]
    return upward, downward, whole


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_no_frame_of_a_run_does_anything_when_it_is_sent_again():
    """To the run it is of, once its worker has gone, by one who does not know the secret."""
    recorder, commits = Recorder(), Commits()
    config = settings(max_steps=STEPS, token=TOKEN, max_time_s=50.0)
    async with Coordinator(mlp_sgd(), config=config, bus=commits.bus) as coordinator:
        known = replace(QUICK_WORKER, token=TOKEN)
        async with recorder.before(coordinator.port) as address:
            worker = asyncio.create_task(Worker(address, job=mlp_sgd(), config=known).run())
            await commits.reach(4)
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        await nobody(coordinator)
        upward = [frame for up, _ in recorder.streams for frame in frames(up)]
        downward = [frame for _, down in recorder.streams for frame in frames(down)]
        assert {Hello, Proof, Ready, Result, Done} <= set(map(kind, upward))
        assert {Lease, Params} <= set(map(kind, downward))
        before = effect(coordinator)
        hello = upward[0]
        for frame in (*upward, *downward):
            await send(coordinator.port, frame)
            await send(coordinator.port, hello, frame)
        for up, down in recorder.streams:
            await send(coordinator.port, bytes(up))
            await send(coordinator.port, bytes(down))
        assert effect(coordinator) == before

        # One who knows the secret and plays another's part again, after a handshake of his own.
        session = [frame for frame in upward if kind(frame) in (Result, Done, Heartbeat, Drain, Bye)]
        for frame in session[:60]:
            await nobody(coordinator)
            await as_member(coordinator, upward, frame)
        await nobody(coordinator)
        after = effect(coordinator)
        assert after[:4] == before[:4]  # version, samples, parameters, members
        assert after[7] == before[7]  # leaves that count

        # What was played changed nothing for those who work.
        again = Worker(coordinator.address, job=mlp_sgd(), config=known)
        await asyncio.gather(again.run(), coordinator.wait())
        digest = (await coordinator.wait()).digest
    async with Coordinator(mlp_sgd(), config=settings(max_steps=STEPS)) as other:
        await asyncio.gather(Worker(other.address, job=mlp_sgd(), config=QUICK_WORKER).run(), other.wait())
        assert (await other.wait()).digest == digest


async def nobody(coordinator: Coordinator) -> None:
    """Wait until every link has ended: an address may have 64 that are not let in."""
    listener: Any = coordinator._listener
    while listener._links:  # noqa: ASYNC110 - links end in a few rounds of the loop
        await asyncio.sleep(0.001)


async def as_member(coordinator: Coordinator, upward: list[bytes], frame: bytes) -> None:
    """Join under another id, be ready, send one old frame, leave."""
    link = await connect("127.0.0.1", coordinator.port, timeout_s=5.0)
    await join(link, key="another", name="another", token=TOKEN, terms={})
    await link.send([next(up for up in upward if kind(up) is Ready), frame])
    await link.send(encode(Bye(0, "that was all")))
    await link.aclose()


async def test_nor_in_another_run():
    upward, downward, whole = await recorded("one")
    async with Coordinator(mlp_sgd(), name="two", config=settings(max_steps=STEPS, token=TOKEN)) as coordinator:
        while not effect(coordinator)[5]:  # its first steps are open  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        before = effect(coordinator)
        for stream in whole:
            await send(coordinator.port, stream)
        for frame in (*upward, *downward):
            await send(coordinator.port, frame)
        assert effect(coordinator) == before


async def test_nor_at_a_worker():
    """Whatever a coordinator has said before, a worker that is told it again does not join."""
    _, downward, whole = await recorded("one")
    for played in (*downward, *whole[1::2]):
        near, far = memory_pair(limit_bytes=1 << 24)
        joining = asyncio.create_task(join(far, key="w", name="w", token=TOKEN, terms={}))
        await near.recv()  # its HELLO
        await near.send([played])
        await near.aclose()
        with pytest.raises((Refused, RemoteError, LinkLost)):
            await joining
        far.abort()
