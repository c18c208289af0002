"""Links: whole frames over a pair of a reader and a writer.

A link is what the sessions see of the network: send these chunks, receive the next message with its buffers.
Every kind of connection (TCP, TLS, a tunnel) is such a pair, so all of them read the same bytes with
the same checks. A pair of asyncio's own will do as well, with a copy more (``net.stock``).

Invariants: sizes are checked, and the caller has agreed to them (``accept``), before a payload byte is stored; one
sender and one receiver at a time; an interrupted send or receive aborts the link, nobody resumes mid-frame; a link
that ended says who ended it (:data:`CLOSED_HERE`, :data:`CLOSED_BY_PEER`). What this module does not do: decide what
a peer may say (``wire.handshake``) or notice that it says nothing (the services' ticks, by ``heard``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from w5xde_async.errors import LinkLost, LocalError, RemoteError
from w5xde_async.net.stock import our_pair
from w5xde_async.net.stream import CLOSED_BY_PEER, CLOSED_HERE, FILL_BYTES
from w5xde_async.net.tls import is_loopback
from w5xde_async.net.tuning import Figures, figures
from w5xde_async.wire.frame import HANDSHAKE_CAPS, LENGTH_BYTES, Buffer, BufferSpec, decode_header, header_length
from w5xde_async.wire.messages import Message

Accept = Callable[[Message, tuple[BufferSpec, ...]], Sequence[memoryview]]
"""Called once a header with buffers is parsed, before any payload byte is stored. Returns one writable flat ``B``
view per spec, of exactly ``spec.nbytes``; raises RemoteError to refuse."""

#: ``LinkLost.reason`` where the peer (or the network) ended in the middle of a frame.
CLOSED_MID_FRAME = "closed by peer in the middle of a frame"

#: More than heartbeats bring from one to the next. Where a length was damaged, they vanish in a frame that never ends.
_BEAT_BYTES = 512
_BEAT_S = 1.0  # the coordinator says something at every tick

_NO_BUFFERS: tuple[memoryview, ...] = ()


class Received(NamedTuple):
    """One frame. ``buffers`` are the views that ``accept`` returned, now filled."""

    message: Message
    specs: tuple[BufferSpec, ...]
    buffers: Sequence[memoryview]


class Link:
    """One peer, whole frames, in order: over any pair of a reader and a writer, which it owns from now on.

    caps         what the next header may hold; starts at HANDSHAKE_CAPS
    let_in       whether it is known to be no stranger's: of those there are few at once (net.strangers)
    on_let_in    called once it is
    certificate  the peer's (DER) under TLS, else empty: what the proof of the handshake is bound to
    encrypted    whether TLS protects the connection, whosever certificate it is
    greeted_s    seconds that it took to begin, with TLS: of those that a stranger has to prove itself
    """

    __slots__ = (
        "_filling", "_frames", "_heard", "_let_in", "_reader", "_receiving", "_refused", "_sending", "_views",
        "_writer", "caps", "certificate", "encrypted", "greeted_s", "on_let_in",
    )  # fmt: skip

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.caps, self._let_in = HANDSHAKE_CAPS, False
        self.on_let_in: Callable[[], None] | None = None
        self.greeted_s = 0.0
        self._reader, self._writer = our_pair(reader, writer)
        tls = writer.get_extra_info("ssl_object")
        self.encrypted = tls is not None
        self.certificate: bytes = b"" if tls is None else tls.getpeercert(binary_form=True) or b""
        self._sending = self._receiving = False
        self._frames, self._heard = 0, (0, 0)  # received whole; that and ``bytes_received`` when it was last ``heard``
        self._views: list[memoryview] = []  # that the frame under way fills, and which of them it is at
        self._filling = 0
        self._refused = ""  # why nothing more is read, though the connection still stands

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.peer}>"

    @property
    def peer(self) -> str:
        """The other end, for people."""
        return self._writer.peer

    @property
    def let_in(self) -> bool:
        return self._let_in

    @let_in.setter
    def let_in(self, value: bool) -> None:
        self._let_in = value
        if value and self.on_let_in is not None:
            self.on_let_in()

    @property
    def same_host(self) -> bool:
        """Whether the other end is on this machine, by the addresses of both."""
        ends = [self._writer.get_extra_info(name) for name in ("peername", "sockname")]
        if any(isinstance(end, str) for end in ends):
            return True  # a Unix socket
        hosts = [str(end[0]).removeprefix("::ffff:") for end in ends if isinstance(end, tuple)]
        return bool(hosts) and (is_loopback(hosts[0]) or (hosts[0] == hosts[-1] and len(hosts) == 2))

    @property
    def bytes_sent(self) -> int:
        """Bytes handed over so far."""
        return self._writer.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes taken in so far, read-ahead included."""
        return self._reader.bytes_received

    def heard(self, beat_s: float, silence_s: float) -> bool:
        """Whether the peer has shown that it lives since this was last true: by a whole frame, or by more of one than
        heartbeats, which come every ``beat_s``, would bring in ``silence_s``."""
        frames, received = self._frames, self.bytes_received
        known_frames, known_received = self._heard
        if received == known_received:
            return False
        # Where nobody receives, what comes may be whole frames.
        if frames == known_frames and self._receiving:
            beats = silence_s / min(beat_s, _BEAT_S) + 1.0
            if received - known_received < beats * _BEAT_BYTES:
                return False
        self._heard = frames, received
        return True

    @property
    def acked_bytes(self) -> int | None:
        """Bytes that the other machine has acknowledged; None where nobody says. Only that it grows has a meaning."""
        return None if self._writer.is_closing() else self._writer.channel.acked_bytes

    @property
    def sent_through(self) -> int | None:
        """What ``acked_bytes`` will be when all that was handed over so far has been acknowledged; None where nobody
        says."""
        if (acked := self.acked_bytes) is None:
            return None
        unacked = self._writer.channel.unacked_bytes  # afterwards: what is acknowledged in between is never waited for
        return None if unacked is None else acked + unacked

    @property
    def figures(self) -> Figures | None:
        """Round trip and retransmissions by the kernel; None where it does not say."""
        sock = None if self._writer.is_closing() else self._writer.get_extra_info("socket")
        return None if sock is None else figures(sock)

    async def send(self, chunks: Sequence[Buffer]) -> None:
        """Send one or more encoded frames. The buffers may be overwritten once this returns.

        Raises LinkLost; LocalError for a second send at once. Cancelled, it aborts the link.
        """
        if self._sending:
            raise LocalError(f"two sends at once on the link to {self.peer}")
        self._sending = True
        try:
            self._writer.writelines(chunks)
            await self._writer.drain()
        except LinkLost as lost:
            # The receiving side stays: what the peer said before it went (a refusal, say) is still to be read.
            raise LinkLost(self.peer, lost.reason) from None
        except BaseException:
            self._writer.abort()
            raise
        finally:
            self._sending = False

    def send_now(self, chunks: Sequence[Buffer]) -> bool | None:
        """Send frames without waiting, and without a turn of the event loop.

        True: the kernel has taken them whole, and the buffers may be overwritten. False: a ``send`` of nothing waits
        until it has, or says why not. None: they were not taken, because something else is being sent.
        """
        if self._sending or not self._writer.drained:
            return None
        self._writer.writelines(chunks)
        return self._writer.drained

    async def recv(self, accept: Accept | None = None) -> Received:
        """The next frame; without suspending where it is read ahead already.

        Raises LinkLost at the end, FrameTooLarge or MalformedFrame for bad bytes, RemoteError for a refusal by
        ``accept`` or for buffers where it is None, LocalError for a second recv at once. After a RemoteError
        nothing more can be received, but a last message may still be sent to say why. Cancelled, it aborts.
        """
        if self._receiving:
            raise LocalError(f"two receives at once on the link to {self.peer}")
        if self._refused:
            raise LinkLost(self.peer, self._refused)
        reader = self._reader
        begun = False
        self._receiving = True
        try:
            if reader.end - reader.start < LENGTH_BYTES:
                await reader.fill(LENGTH_BYTES)
            begun = True
            start = reader.start
            body = start + LENGTH_BYTES
            length = header_length(reader.ahead[start:body], self.caps)
            if LENGTH_BYTES + length > FILL_BYTES:  # rare: a lease with thousands of buffers
                reader.start = body
                header = bytearray(length)
                await reader.readinto(memoryview(header))
                message, specs = decode_header(header, self.caps)
            else:
                if reader.end - body < length:
                    await reader.fill(LENGTH_BYTES + length)
                    body = reader.start + LENGTH_BYTES
                reader.start = body + length
                message, specs = decode_header(reader.ahead[body : body + length], self.caps)
            if not specs:
                self._frames += 1
                return Received(message, specs, _NO_BUFFERS)
            if accept is None:
                raise RemoteError(f"{type(message).__name__} came with {len(specs)} buffers where none is expected")
            buffers = accept(message, specs)
            if len(buffers) != len(specs):
                raise LocalError(f"accept returned {len(buffers)} views for {len(specs)} buffers")
            views = self._views = list(buffers)
            for number, spec in enumerate(specs):
                view, size, self._filling = views[number], spec.nbytes, number
                if not size == len(view) == view.nbytes:
                    raise LocalError(f"accept returned {view.nbytes} bytes for buffer {spec.name!r} of {size}")
                start = reader.start
                if reader.end - start >= size:
                    view[:] = reader.ahead[start : start + size]
                    reader.start = start + size
                else:
                    await reader.readinto(view)
            self._frames += 1
            return Received(message, specs, buffers)
        except RemoteError as error:
            self._refused = f"nothing is read after a protocol error ({error})"
            raise
        except LinkLost as lost:
            cut = lost.reason == CLOSED_BY_PEER and (begun or reader.end > reader.start)
            reason = CLOSED_MID_FRAME if cut else lost.reason
            self._writer.abort(reason)
            raise LinkLost(self.peer, reason) from None
        except BaseException:
            self._writer.abort()
            raise
        finally:
            self._receiving = False
            self._views = []

    def divert(self, view: memoryview) -> bool:
        """Have the payload that is being received stored in ``view`` from here on, which is as long as all its buffers:
        nothing is written into the memory that ``accept`` gave any more, and what is in ``view`` then has no meaning.
        False where a thread is writing there."""
        views, number = self._views, self._filling
        if not self._reader.divert(view[: len(views[number])]):
            return False
        views[number:] = [view[: len(other)] for other in views[number:]]
        return True

    async def aclose(self) -> None:
        """End in good order: what was sent arrives, pending calls raise LinkLost. May be called twice."""
        self._refused = self._refused or CLOSED_HERE
        if self._sending:
            self._writer.abort()  # a frame cut in half cannot end in good order
        await self._writer.aclose()

    def abort(self) -> None:
        """End now; pending calls raise LinkLost. May be called twice."""
        self._writer.abort()
