"""What an application that embeds a worker may hear from it, and have a say in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from w5xde_async.wire.messages import Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswered:
    """A lease's results and DONE have been handed to the socket.

    step, start     the lease's step and its first leaf
    samples         number of samples of each leaf
    losses          mean loss of each leaf

    The rest is counted since the answer before this one on the same link, messages of every kind included:

    sent_bytes      with the first answer, the handshake's too
    received_bytes  likewise
    network_s       seconds spent sending, and receiving frames that had begun to come
    gradient_bytes  results as they are in memory
    encoded_bytes   results as they were sent
    encode_s        seconds that the codec took for this lease
    """

    step: int
    start: int
    samples: tuple[int, ...]
    losses: tuple[float, ...]
    sent_bytes: int
    received_bytes: int
    network_s: float
    gradient_bytes: int
    encoded_bytes: int
    encode_s: float

    @property
    def loss(self) -> float:
        """Mean over the samples."""
        return sum(loss * count for loss, count in zip(self.losses, self.samples, strict=True)) / sum(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFailed:
    """The job's code raised, and the coordinator has been told.

    error    in one line: the exception, and where it was raised
    in_a_row  leases that have failed since one was computed
    ever     whether any has been computed on this link
    """

    error: str
    in_a_row: int
    ever: bool


@dataclass(frozen=True, kw_only=True)
class WorkerHooks:
    """Called on the event loop, between two messages: each should return soon. What one raises ends ``Worker.run``.

    on_welcome   gets what the coordinator says of the run; what it returns counts in its place
    on_answered  follows each lease that was computed, once its answer has left
    on_failed    follows each lease that failed, once that has left
    """

    on_welcome: Callable[[Welcome], Welcome] | None = None
    on_answered: Callable[[LeaseAnswered], None] | None = None
    on_failed: Callable[[LeaseFailed], None] | None = None
