"""Connections that an application makes: its own servers in front of a coordinator, its own streams for a worker."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cluster import QUICK_WORKER, Commits, settings, train
from tests.support.jobs import mlp_sgd

from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import LinkLost, RefusalCode, Refused, UsageError
from w5xde_async.net.tls import TlsFiles, own_certificate
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import PROTOCOL_VERSION, Hello, Result
from w5xde_async.worker.service import Departure, Worker

TOKEN = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGH"


@pytest.fixture
def path() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as folder:  # a Unix socket's path is short
        yield f"{folder}/socket"


async def work(path: str, **config: object) -> Departure:
    worker = Worker(job=mlp_sgd(), config=replace(QUICK_WORKER, **config))
    return await worker.run(*await asyncio.open_unix_connection(path))


async def refusal(path: str, **config: object) -> RefusalCode:
    with pytest.raises(Refused) as caught:
        await work(path, **config)
    return RefusalCode(caught.value.code)


@pytest.mark.slow
@pytest.mark.both_loops
async def test_the_same_bits_over_an_applications_unix_socket(path: str):
    over_tcp = await train(mlp_sgd, workers=2, max_steps=6)
    async with Coordinator(mlp_sgd(), config=settings(max_steps=6, min_workers=2)) as coordinator:
        async with await asyncio.start_unix_server(coordinator.handle, path):
            workers = [asyncio.create_task(work(path)) for _ in range(2)]
            result = await coordinator.wait()
            assert await asyncio.gather(*workers) == [Departure.FINISHED] * 2
    assert result.digest == over_tcp.digest


async def test_both_doors_at_once(path: str):
    over_tcp = await train(mlp_sgd, workers=2, max_steps=6)
    async with Coordinator(mlp_sgd(), config=settings(max_steps=6, min_workers=2)) as coordinator:
        async with await asyncio.start_server(coordinator.handle, "127.0.0.1", 0) as server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname())
            by_hand = asyncio.create_task(Worker(job=mlp_sgd(), config=QUICK_WORKER).run(*streams))
            by_itself = asyncio.create_task(Worker(coordinator.address, job=mlp_sgd(), config=QUICK_WORKER).run())
            result = await coordinator.wait()
            assert await asyncio.gather(by_hand, by_itself) == [Departure.FINISHED] * 2
    assert result.digest == over_tcp.digest


HELLO = b"".join(encode(Hello(PROTOCOL_VERSION, bytes(32), "", "", "", "")))


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "too large": b"\xff" * 100,
    "no message": b"\x00\x00\x00\x04abcd",
    "cut off": HELLO[:7],
    "too early": b"".join(encode(Result(1, 0))),
    "twice": HELLO + HELLO,
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_bytes_end_their_own_connection_alone(path: str, kind: str):
    commits = Commits()
    config = settings(max_steps=100_000, min_workers=1)
    async with Coordinator(mlp_sgd(), config=config, bus=commits.bus) as coordinator:
        async with await asyncio.start_unix_server(coordinator.handle, path):
            worker = asyncio.create_task(work(path))
            await commits.reach(2)
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(HOSTILE[kind])
            writer.write_eof()
            async with asyncio.timeout(20):
                with suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            await commits.reach(commits.step + 3)
            assert coordinator.num_workers == 1
            coordinator.request_stop()
            await coordinator.wait()
            with pytest.raises(LinkLost, match="the coordinator stopped"):
                await worker


async def test_a_lost_connection_ends_the_worker(path: str):
    """It knows no other way to the coordinator, and says why it stopped."""
    commits = Commits()
    writers: list[asyncio.StreamWriter] = []
    async with Coordinator(mlp_sgd(), config=settings(max_steps=100_000), bus=commits.bus) as coordinator:

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await coordinator.handle(reader, writer)

        async with await asyncio.start_unix_server(handle, path):
            worker = asyncio.create_task(work(path))
            await commits.reach(2)
            writers[0].transport.abort()
            with pytest.raises(LinkLost, match="closed by peer"):
                await worker


async def test_the_end_of_the_coordinator_ends_what_it_was_given_and_not_the_applications_tasks(path: str):
    returned = 0
    async with Coordinator(mlp_sgd(), config=settings(max_steps=100_000)) as coordinator:

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal returned
            await coordinator.handle(reader, writer)
            returned += 1

        server = await asyncio.start_unix_server(handle, path)
        silent = [await asyncio.open_unix_connection(path) for _ in range(2)]
        await asyncio.sleep(0.05)
    late = await asyncio.open_unix_connection(path)  # the application still listens
    for reader, writer in [*silent, late]:
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0.05)
    assert returned == 3


async def test_a_cancelled_handle_ends_its_connection(path: str):
    async with Coordinator(mlp_sgd(), config=settings(max_steps=100_000)) as coordinator:
        handling: asyncio.Future[asyncio.Task[None] | None] = asyncio.get_running_loop().create_future()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handling.set_result(asyncio.current_task())
            with suppress(asyncio.CancelledError):
                await coordinator.handle(reader, writer)

        async with await asyncio.start_unix_server(handle, path):
            reader, writer = await asyncio.open_unix_connection(path)
            task = await handling
            assert task is not None
            task.cancel()
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()


async def test_a_token_is_asked_as_on_the_port(path: str):
    async with Coordinator(mlp_sgd(), config=settings(max_steps=4, token=TOKEN)) as coordinator:
        async with await asyncio.start_unix_server(coordinator.handle, path):
            assert await refusal(path) is RefusalCode.AUTHENTICATION
            assert await refusal(path, token=TOKEN[::-1]) is RefusalCode.AUTHENTICATION
            worker = asyncio.create_task(work(path, token=TOKEN))
            await coordinator.wait()
            assert await worker is Departure.FINISHED


@pytest.mark.parametrize("shown", ["the coordinator's", "another"])
async def test_behind_the_applications_own_tls_the_proof_is_bound_to_the_coordinators_certificate(
    tmp_path: Path, shown: str
):
    files = await asyncio.to_thread(own_certificate, tmp_path / "tls", "ours")
    other = await asyncio.to_thread(own_certificate, tmp_path / "other", "theirs")
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    chosen = files if shown == "the coordinator's" else other
    assert chosen.cert is not None
    server_side.load_cert_chain(chosen.cert, chosen.key)
    client_side.check_hostname, client_side.verify_mode = False, ssl.CERT_NONE
    config = settings(max_steps=4, token=TOKEN, tls=TlsFiles(files.cert, files.key))
    async with Coordinator(mlp_sgd(), config=config) as coordinator:
        async with await asyncio.start_server(coordinator.handle, "127.0.0.1", 0, ssl=server_side) as server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=client_side)
            worker = Worker(job=mlp_sgd(), config=replace(QUICK_WORKER, token=TOKEN))
            working = asyncio.create_task(worker.run(*streams))
            if shown == "another":
                with pytest.raises(Refused):
                    await working
            else:
                await coordinator.wait()
                assert await working is Departure.FINISHED


async def test_a_worker_that_has_run_closes_the_connection_of_its_second_run_too(path: str):
    closed: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        closed.put_nowait(await reader.read())

    async with await asyncio.start_unix_server(handle, path):
        worker = Worker(job=mlp_sgd(), config=QUICK_WORKER)
        with pytest.raises(LinkLost):
            await worker.run(*await asyncio.open_unix_connection(path))
        _, writer = connection = await asyncio.open_unix_connection(path)
        with pytest.raises(UsageError, match="has run before"):
            await worker.run(*connection)
        assert writer.is_closing()
        for _ in range(2):
            await closed.get()


async def test_misuse_is_said(path: str):
    coordinator = Coordinator(mlp_sgd(), config=settings())
    said: list[str] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await coordinator.handle(reader, writer)
        except UsageError as error:
            said.append(str(error))

    async with await asyncio.start_unix_server(handle, path):
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        calls: list[Callable[[], object]] = [
            lambda: Worker(job=mlp_sgd(), config=QUICK_WORKER).run(reader),
            lambda: Worker(job=mlp_sgd(), config=QUICK_WORKER).run(),
        ]
        for call, text in zip(calls, ("both or neither", "no address"), strict=True):
            with pytest.raises(UsageError, match=text):
                await call()
        writer.close()
    assert "has not been started" in said[0] or "start()" in said[0]


async def test_a_coordinator_without_a_token_takes_workers_from_this_machine_alone():
    class Elsewhere(asyncio.StreamWriter):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return ("192.0.2.7", 4711) if name == "peername" else super().get_extra_info(name, default)

    async with Coordinator(mlp_sgd(), config=settings()) as coordinator:
        refused = asyncio.get_running_loop().create_future()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.__class__ = Elsewhere
            try:
                await coordinator.handle(reader, writer)
            except UsageError as error:
                refused.set_result(str(error))

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()
            assert "another machine" in await refused
