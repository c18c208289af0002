"""A watched link counts what passes, frame by frame, and changes nothing of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from w5xde_async.facade.watching import Piece, Traffic, WatchedLink
from w5xde_async.net.link import Received
from w5xde_async.wire.frame import HANDSHAKE_CAPS, SESSION_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Done, Heartbeat, Lease, Result


class Wire:
    """A link that remembers what it sent and gives what it is told to."""

    def __init__(self, incoming: Sequence[tuple[Any, int]] = ()) -> None:
        self.caps, self.peer, self.certificate, self.figures = HANDSHAKE_CAPS, "peer", b"cert", None
        self.bytes_sent, self.bytes_received = 100, 40  # the handshake
        self.sends: list[bytes] = []
        self.ended = ""
        self._incoming = list(incoming)

    async def send(self, chunks: Sequence[Buffer]) -> None:
        self.sends.append(b"".join(bytes(chunk) for chunk in chunks))
        self.bytes_sent += len(self.sends[-1])

    async def recv(self, accept: Any = None) -> Received:
        message, nbytes = self._incoming.pop(0)
        self.bytes_received += nbytes
        specs = (BufferSpec("", "uint8", (nbytes,), "raw", nbytes),) if accept is not None else ()
        return Received(message, specs, accept(message, specs) if accept is not None else ())

    async def aclose(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


def lease(number: int, step: int, start: int, samples: tuple[int, ...]) -> Lease:
    return Lease(**{**_blank(Lease), "lease": number, "version": step, "step": step, "start": start,
                    "samples": samples})  # fmt: skip


def done(number: int, losses: tuple[float, ...], encode_s: float = 0.0) -> list[Buffer]:
    return encode(Done(**{**_blank(Done), "lease": number, "losses": losses, "encode_s": encode_s}))


def _blank(kind: type) -> dict[str, Any]:
    empty: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False, "bytes": b"", "str": ""}
    return {name: empty.get(str(hint), ()) for name, hint in kind.__annotations__.items()}


SIZES = (200, 80, 400, 4, 12, 0)  # of each bucket as it lies in memory


def result(number: int, bucket: int, nbytes: int | None = None) -> list[Buffer]:
    """One bucket's sum, raw or in so many bytes of a codec."""
    raw = nbytes is None
    nbytes = SIZES[bucket] if nbytes is None else nbytes
    spec = BufferSpec("", "float32", (nbytes // 4,), "raw", nbytes) if raw else BufferSpec("", "uint8", (nbytes,), "lz4", nbytes)  # fmt: skip  # noqa: E501
    return encode(Result(**{**_blank(Result), "lease": number, "bucket": bucket}), [(spec, bytes(nbytes))])


def size(frame: Sequence[Buffer]) -> int:
    return sum(len(chunk) for chunk in frame)


async def test_every_number_of_a_piece() -> None:
    wire = Wire([(lease(7, 3, 4, (10, 30)), 500), (lease(8, 4, 0, (5,)), 60)])
    pieces: list[Piece] = []
    ticks = itertools.count()
    link = WatchedLink(
        wire, SIZES, on_piece=pieces.append, clock=lambda: float(next(ticks))
    )  # a second between two looks
    await link.recv(lambda message, specs: [])
    await link.recv(lambda message, specs: [])
    beat, first, second = encode(Heartbeat("busy")), result(7, 0), result(7, 1, 33)
    await link.send([*beat, *first])
    await link.send([*second, *done(7, (1.0, 2.0), 0.25)])
    await link.send(done(8, (0.5,)))
    assert [(piece.step, piece.start, piece.samples, piece.loss) for piece in pieces] == [
        (3, 4, 40, 1.75), (4, 0, 5, 0.5),
    ]  # fmt: skip
    assert pieces[0].sent_bytes == 100 + size(beat) + size(first) + size(second) + size(done(7, (1.0, 2.0), 0.25))
    assert pieces[1].sent_bytes == size(done(8, (0.5,)))
    assert [piece.received_bytes for piece in pieces] == [40 + 500 + 60, 0]
    assert [piece.gradient_bytes for piece in pieces] == [280, 0]
    assert [piece.encoded_bytes for piece in pieces] == [233, 0]
    assert [piece.encode_s for piece in pieces] == [0.25, 0.0]
    assert [piece.network_s for piece in pieces] == pytest.approx([4.0, 1.0])


async def test_frames_that_go_together_have_their_share_of_the_time() -> None:
    wire = Wire([(lease(1, 0, 0, (1,)), 0), (lease(2, 0, 1, (1,)), 0)])
    pieces: list[Piece] = []
    ticks = itertools.count()
    link = WatchedLink(wire, SIZES, on_piece=pieces.append, clock=lambda: float(next(ticks)))
    await link.recv()
    await link.recv()
    await link.send([*result(1, 2), *done(1, (1.0,)), *result(2, 3), *done(2, (1.0,))])
    assert len(wire.sends) == 1
    assert sum(piece.network_s for piece in pieces) == pytest.approx(1.0)
    assert pieces[0].network_s / pieces[1].network_s == pytest.approx(
        (pieces[0].sent_bytes - 100) / pieces[1].sent_bytes
    )


async def test_without_gathering_every_frame_is_a_write_and_the_bytes_are_the_same() -> None:
    chunks = [*result(1, 4), *result(1, 5), *done(1, (1.0,)), *encode(Heartbeat("idle"))]
    together, alone = Wire(), Wire()
    await WatchedLink(together, SIZES, on_piece=None).send(chunks)
    await WatchedLink(alone, SIZES, on_piece=None, gathered=False).send(chunks)
    assert (len(together.sends), len(alone.sends)) == (1, 4)
    assert b"".join(alone.sends) == together.sends[0]


async def test_a_lease_that_was_revoked_in_time_is_no_piece() -> None:
    wire = Wire([(lease(1, 0, 0, (4,)), 0)])
    pieces: list[Piece] = []
    link = WatchedLink(wire, SIZES, on_piece=pieces.append)
    await link.recv()
    await link.send(done(1, ()))
    assert not pieces


async def test_it_is_the_link_that_it_stands_for() -> None:
    wire = Wire()
    link = WatchedLink(wire, SIZES, on_piece=None)
    link.caps = SESSION_CAPS
    assert wire.caps is link.caps is SESSION_CAPS
    assert (link.peer, link.certificate, link.figures) == ("peer", b"cert", None)
    assert (link.bytes_sent, link.bytes_received) == (100, 40)
    await link.aclose()
    assert wire.ended == "closed"
    link.abort()
    assert wire.ended == "aborted"


def test_traffic_adds_up_over_links() -> None:
    traffic, first, second = Traffic(), Wire(), Wire()
    assert (traffic.bytes_sent, traffic.bytes_received) == (0, 0)
    traffic.add(first)
    first.bytes_sent = 1000
    traffic.add(second)
    second.bytes_received = 7
    assert (traffic.bytes_sent, traffic.bytes_received) == (1100, 47)
