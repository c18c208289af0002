"""Counting of bytes and seconds on a worker's links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from w5xde_async.net.link import Accept, Link, Received
from w5xde_async.net.outbox import Outbox
from w5xde_async.wire.frame import BufferSpec
from w5xde_async.wire.messages import Done, Lease, Message
from w5xde_async.worker.hooks import LeaseAnswered


class Traffic:
    """The totals of one worker over all its links."""

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


class Meter:
    """What passes one link between one answered lease and the next. Belongs to the event loop.

    Everything is measured, with one exception: frames that share a write share its time in proportion to their bytes.
    """

    def __init__(
        self, link: Link, outbox: Outbox, on_answered: Callable[[LeaseAnswered], None], clock: Callable[[], float]
    ) -> None:
        self._link, self._outbox, self._on_answered, self._clock = link, outbox, on_answered, clock
        self._handshake_bytes = link.bytes_sent
        self._receiving_s = 0.0
        self._told = (0, 0, 0.0)  # bytes sent and received, and seconds, of which account has been given
        self._gradient_bytes = self._encoded_bytes = 0  # of results that were posted since the last answer

    async def recv(self, accept: Accept) -> Received:
        """As ``Link.recv``, timed from the moment at which a frame with buffers has begun to come."""
        began: float | None = None

        def accepting(message: Message, specs: tuple[BufferSpec, ...]) -> Sequence[memoryview]:
            nonlocal began
            began = self._clock()
            return accept(message, specs)

        received = await self._link.recv(accepting)
        if began is not None:
            self._receiving_s += self._clock() - began
        return received

    def result(self, gradient_bytes: int, encoded_bytes: int) -> None:
        """A RESULT was posted."""
        self._gradient_bytes += gradient_bytes
        self._encoded_bytes += encoded_bytes

    def answered(self, lease: Lease, done: Done) -> Callable[[], None]:
        """DONE is being posted; the result is to be called when it has left."""
        gradient_bytes, encoded_bytes = self._gradient_bytes, self._encoded_bytes
        self._gradient_bytes = self._encoded_bytes = 0

        def left() -> None:
            sent_before, received_before, seconds_before = self._told
            sent, received = self._handshake_bytes + self._outbox.sent_bytes, self._link.bytes_received
            seconds = self._outbox.sending_s + self._receiving_s
            self._told = (sent, received, seconds)
            self._on_answered(
                LeaseAnswered(
                    step=lease.step,
                    start=lease.start,
                    samples=lease.samples,
                    losses=done.losses,
                    sent_bytes=sent - sent_before,
                    received_bytes=received - received_before,
                    network_s=seconds - seconds_before,
                    gradient_bytes=gradient_bytes,
                    encoded_bytes=encoded_bytes,
                    encode_s=done.encode_s,
                )
            )

        return left
