"""Members of an island hear of each other's end, whoever else connects."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from w5xde_async.cluster import ties
from w5xde_async.cluster.ties import Ties


@asynccontextmanager
async def tied(ranks: int) -> AsyncIterator[list[Ties]]:
    members = [Ties() for _ in range(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        others = [members[rank].connect(host, port, rank, 20.0) for rank in range(1, ranks)]
        await asyncio.gather(members[0].accept(listening, ranks, 20.0), *others)
        assert listening.getblocking()
    try:
        yield members
    finally:
        for member in members:
            member.close()


@pytest.mark.both_loops
@pytest.mark.parametrize("leaves", [0, 1, 2])
async def test_each_hears_that_another_is_gone(leaves: int) -> None:
    async with tied(3) as members, asyncio.timeout(20):
        hearing = {number: asyncio.create_task(member.gone()) for number, member in enumerate(members)}
        done, _ = await asyncio.wait(hearing.values(), timeout=0.01)
        assert not done
        hearing.pop(leaves).cancel()
        members[leaves].close()
        if leaves:
            assert await hearing.pop(0) == leaves
            members[0].close()
        assert [await heard for heard in hearing.values()] == [0] * len(hearing)


async def test_strangers_take_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "_SAYING_S", 0.01)
    head, other, again = Ties(), Ties(), Ties()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        silent = (await asyncio.open_connection(*address))[1]
        numbers = [b"w5xde rank %s\n" % rank for rank in (b"0", b"3", b"-1", b"x", b"01", b"\xff")]
        accepting = asyncio.create_task(head.accept(listening, 3, 20.0))
        for line in (b"", b"GET / HTTP/1.0\r\n", bytes(100_000), *numbers):
            _, writer = await asyncio.open_connection(*address)
            writer.write(line)
            writer.close()
        connecting = asyncio.create_task(other.connect(*address, 1, 20.0))
        twice = asyncio.create_task(again.connect(*address, 1, 20.0))
        done, _ = await asyncio.wait((connecting, twice), return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        assert isinstance(done.pop().exception(), ConnectionError)  # the second
        assert not accepting.done()
        last = Ties()
        await asyncio.gather(last.connect(*address, 2, 20.0), accepting)
        for member in (head, other, again, last):
            member.close()
        silent.close()
        await asyncio.gather(connecting, twice, return_exceptions=True)


@pytest.mark.both_loops
@pytest.mark.parametrize("most", [4, 64])
async def test_strangers_that_say_nothing_hold_up_nobody(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Not until they are given up, where as many as that are asked at once."""
    monkeypatch.setattr(ties, "_SAYING_S", 1000.0 if most == 64 else 0.01)
    monkeypatch.setattr(ties, "_MOST_ASKED", most)
    head, other = Ties(), Ties()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        strangers = [await asyncio.open_connection(*address) for _ in range(10)]
        async with asyncio.timeout(20):
            await asyncio.gather(head.accept(listening, 2, 20.0), other.connect(*address, 1, 20.0))
            assert listening.getblocking()
            for reader, writer in strangers:  # and are let go
                assert await reader.read() == b""
                writer.close()
        head.close()
        other.close()


async def test_who_does_not_come_is_waited_for_so_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        head, other = Ties(), Ties()
        with pytest.raises(TimeoutError):
            await head.accept(listening, 2, 0.01)
        with pytest.raises(TimeoutError):
            await other.connect(*listening.getsockname(), 1, 0.01)
        other.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await other.connect("127.0.0.1", listening_nowhere(), 1, 20.0)


def listening_nowhere() -> int:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port: int = gone.getsockname()[1]
        return port
