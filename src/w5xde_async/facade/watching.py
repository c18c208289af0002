"""A worker whose link is looked at: what went over the socket, piece by piece.

A :class:`WatchedLink` stands between the worker and its link and reads the frames that pass. A **piece** is one
answered lease. All numbers are those of the socket and the messages on it: nothing is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from w5xde_async.errors import LocalError
from w5xde_async.net.link import Accept, Link, Received
from w5xde_async.net.tuning import Figures
from w5xde_async.wire.frame import LENGTH_BYTES, SESSION_CAPS, Buffer, BufferSpec, Caps, decode_header
from w5xde_async.wire.messages import Done, Lease, Message, Result, Welcome
from w5xde_async.worker.connection.handshake import Joined
from w5xde_async.worker.service import Worker

__all__ = ["Piece", "Traffic", "WatchedLink", "WatchedWorker"]


class Piece(NamedTuple):
    """One lease's answer, when it has been handed to the socket.

    ``loss``: mean over the samples. ``sent_bytes``, ``received_bytes``: of all messages since the piece before, the
    handshake with the first. ``network_s``: seconds spent sending, and receiving what had begun to come.
    ``gradient_bytes``: the gradients as they are in memory; ``encoded_bytes``: as they were sent; ``encode_s``:
    seconds that went into that.
    """

    step: int
    start: int
    samples: int
    loss: float
    sent_bytes: int
    received_bytes: int
    encode_s: float
    network_s: float
    gradient_bytes: int
    encoded_bytes: int


class Traffic:
    """The totals of one worker over all its connections."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._before = (0, 0)

    def add(self, link: Link) -> None:
        """A new link; the one before has ended."""
        self._before = (self.bytes_sent, self.bytes_received)
        self._link = link

    @property
    def bytes_sent(self) -> int:
        """Bytes handed to the sockets so far, handshakes included (TLS adds its own to them)."""
        return self._before[0] + (0 if self._link is None else self._link.bytes_sent)

    @property
    def bytes_received(self) -> int:
        """Bytes taken from the sockets so far."""
        return self._before[1] + (0 if self._link is None else self._link.bytes_received)


class WatchedLink:
    """A Link over another; ``on_piece`` is called after the piece was sent, on the loop's thread.

    ``gathered`` False sends every frame by itself, where the other way frames that are ready together share one write.
    """

    def __init__(
        self,
        link: Link,
        sizes: Sequence[int],
        *,
        on_piece: Callable[[Piece], None] | None,
        gathered: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``sizes``: bytes of each of the layout's result buckets, as it lies in memory."""
        self._link, self._on_piece, self._gathered, self._clock = link, on_piece, gathered, clock
        self._sizes = sizes
        self._leases: dict[int, Lease] = {}
        self._sent = link.bytes_sent  # since the last piece; the handshake was before this link was looked at
        self._received = 0  # of which account has been given
        self._network_s = 0.0
        self._gradient_bytes = self._encoded_bytes = 0

    @property
    def caps(self) -> Caps:
        return self._link.caps

    @caps.setter
    def caps(self, caps: Caps) -> None:
        self._link.caps = caps

    @property
    def peer(self) -> str:
        return self._link.peer

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._link.bytes_received

    @property
    def encrypted(self) -> bool:
        return self._link.encrypted

    @property
    def certificate(self) -> bytes:
        return self._link.certificate

    @property
    def figures(self) -> Figures | None:
        return self._link.figures

    async def send(self, chunks: Sequence[Buffer]) -> None:
        frames = list(_frames(chunks))
        if not self._gathered:
            for frame in frames:
                await self._send(frame.chunks, [frame])
        else:
            await self._send(chunks, frames)

    async def recv(self, accept: Accept | None = None) -> Received:
        began: float | None = None

        def accepting(message: Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
            nonlocal began
            began = self._clock()
            assert accept is not None
            return accept(message, specs)

        received = await self._link.recv(None if accept is None else accepting)
        if began is not None:
            self._network_s += self._clock() - began
        if type(received.message) is Lease:
            self._leases[received.message.lease] = received.message
        return received

    async def aclose(self) -> None:
        await self._link.aclose()

    def abort(self) -> None:
        self._link.abort()

    async def _send(self, chunks: Sequence[Buffer], frames: Sequence[_Frame]) -> None:
        began = self._clock()
        await self._link.send(chunks)
        elapsed_s, total = self._clock() - began, sum(frame.nbytes for frame in frames)
        for frame in frames:
            self._sent += frame.nbytes
            self._network_s += elapsed_s * frame.nbytes / total
            if type(frame.message) is Result:
                self._gradient_bytes += self._sizes[frame.message.bucket]
                self._encoded_bytes += sum(spec.nbytes for spec in frame.specs)
            elif type(frame.message) is Done:
                self._finish(frame.message)

    def _finish(self, done: Done) -> None:
        lease = self._leases.pop(done.lease, None)
        if lease is None or not done.losses:
            return  # it was revoked before anything was computed
        received = self._link.bytes_received
        samples = sum(lease.samples)
        piece = Piece(
            lease.step,
            lease.start,
            samples,
            sum(loss * count for loss, count in zip(done.losses, lease.samples, strict=True)) / samples,
            self._sent,
            received - self._received,
            done.encode_s,
            self._network_s,
            self._gradient_bytes,
            self._encoded_bytes,
        )
        self._sent, self._received = 0, received
        self._network_s = 0.0
        self._gradient_bytes = self._encoded_bytes = 0
        if self._on_piece is not None:
            self._on_piece(piece)


class _Frame(NamedTuple):
    message: Message
    specs: tuple[BufferSpec, ...]
    chunks: Sequence[Buffer]
    nbytes: int


def _frames(chunks: Sequence[Buffer]) -> Iterator[_Frame]:
    """The frames that ``wire.frame.encode`` made these chunks of."""
    at = 0
    while at < len(chunks):
        message, specs = decode_header(memoryview(chunks[at])[LENGTH_BYTES:], SESSION_CAPS)
        end = at + 1 + sum(1 for spec in specs if spec.nbytes)
        if end > len(chunks):
            raise LocalError(f"{type(message).__name__} is sent without all of its buffers")
        yield _Frame(message, specs, chunks[at:end], sum(len(chunk) for chunk in chunks[at:end]))
        at = end


class WatchedWorker(Worker):
    """A Worker whose links are watched; ``watch`` comes before ``run``."""

    def watch(
        self,
        traffic: Traffic,
        *,
        on_piece: Callable[[Piece], None] | None = None,
        on_welcome: Callable[[Welcome], Welcome] | None = None,
        gathered: bool = True,
    ) -> None:
        """``on_welcome`` gets what is said of each run that lets it in, and may alter it, or raise."""
        self._traffic = traffic
        self._on_piece, self._on_welcome, self._gathered = on_piece, on_welcome, gathered

    async def _try_to_join(self, left_s: float, given: Link | None = None) -> Joined:
        joined = await super()._try_to_join(left_s, given)
        self._traffic.add(joined.link)
        welcome, layout = joined.welcome, joined.layout
        if self._on_welcome is not None:
            try:
                welcome = self._on_welcome(welcome)
            except BaseException:
                joined.link.abort()
                raise
        sizes = [layout.result_nbytes(bucket) for bucket in layout.result_buckets]
        link = WatchedLink(joined.link, sizes, on_piece=self._on_piece, gathered=self._gathered)
        return joined._replace(link=link, welcome=welcome)
