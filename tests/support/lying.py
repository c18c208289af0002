"""A real worker whose words are changed on their way out: one field of one message set to what nobody should say.

It computes honestly, so that whatever the coordinator tolerates may count, and changes nothing.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from w5xde_async.errors import Unreachable, W5xdeError
from w5xde_async.job import Job
from w5xde_async.net import endpoint
from w5xde_async.runtime import Runtime
from w5xde_async.wire.frame import Buffer
from w5xde_async.wire.handshake import COORDINATOR
from w5xde_async.wire.messages import MESSAGES, Done, Message
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

__all__ = ["EXTREMES", "SAID", "Lie", "lies", "tell"]

_PATIENCE_S = 0.1

#: What a worker may say.
SAID = sorted({kind for _, kind in COORDINATOR}, key=lambda kind: kind.TYPE)

_RAW_SURROGATE = msgpack.ExtType(0, b"")  # stands for a string that is not UTF-8; see ``_packed``
EXTREMES: tuple[Any, ...] = (
    0, -1, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, float("nan"), float("inf"), float("-inf"), 1.7e308, -1.7e308,
    -0.0, 5e-324, 1.0, -1.0, "", "x" * (1 << 20), "\x00\x1b[2J\n\u202e", _RAW_SURROGATE, b"", bytes(1 << 16), None,
    True, (), (0, 0), (0,) * 4096, (float("nan"),), ("loss", "loss"), ("m" * 4096,), tuple(map(str, range(100))),
    (1 << 62,), {"a": 1},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lie:
    """``kind`` with its field ``field`` set to ``value``."""

    kind: type[Message]
    field: int
    value: Any

    def __str__(self) -> str:
        return f"{self.kind.__name__}.{self.kind.__struct_fields__[self.field]} = {repr(self.value)[:40]}"


def lies(kind: type[Message], *, everything: bool) -> Iterator[Lie]:
    """All of one message; else a few of each field, others for each."""
    for index in range(len(kind.__struct_fields__)):
        for number, value in enumerate(EXTREMES):
            if everything or (number + index) % 8 == 0:
                yield Lie(kind, index, value)


#: Messages that every worker says on each link on its own.
_ALWAYS_SAID = {"Hello", "Proof", "Introduction", "Ready", "Result", "Done"}
#: Messages that a worker at work says now and then, as it would say them. ``None`` stands for its lease.
_SAMPLES: dict[str, tuple[Any, ...]] = {
    "Failed": (None, 0, "ValueError: no", "Traceback"),
    "Unread": (None, "no such file"),
    "Heartbeat": ("idle",),
    "Report": (1, 1, 1, 1.0, 1.0, 1.0),
    "Drain": ("leaving", 1.0),
    "Bye": (3, "leaving"),
    "ProgramRequest": (1, b""),
    "Probe": (0, b""),
    "Volunteer": ("dp=2", 2, "", 1),
}


class Tongue:
    """What is still to be said, and what has been."""

    def __init__(self, told: Sequence[Lie]) -> None:
        self.waiting = deque(told)
        self.said: list[Lie] = []
        self.all_said = asyncio.Event()

    def change(self, chunks: list[Buffer]) -> list[Buffer]:
        """The frames of one ``send``, with a lie in the place of one of them or before it."""
        out: list[Buffer] = []
        at = 0
        while at < len(chunks):
            number, values, specs = msgpack.unpackb(bytes(chunks[at])[4:], use_list=False)
            stop = at + 1 + sum(1 for spec in specs if spec[4])
            lie = self.waiting[0] if self.waiting else None
            if lie is None:
                pass
            elif MESSAGES[number] is lie.kind:
                out.append(self._told(lie, list(values), specs))
                out.extend(chunks[at + 1 : stop])
                at = stop
                continue
            elif MESSAGES[number] is Done and lie.kind.__name__ in _SAMPLES:
                sample = [values[0] if value is None else value for value in _SAMPLES[lie.kind.__name__]]
                out.append(self._told(lie, sample, ()))
            out.extend(chunks[at:stop])
            at = stop
        return out

    def _told(self, lie: Lie, values: list[Any], specs: Any) -> bytes:
        self.said.append(self.waiting.popleft())
        values[lie.field] = lie.value
        return _packed(lie.kind.TYPE, values, specs)


def _packed(number: int, values: list[Any], specs: Any) -> bytes:
    parts = [msgpack.Packer().pack_array_header(3), msgpack.packb(number)]
    parts.append(msgpack.Packer().pack_array_header(len(values)))
    parts.extend(b"\xa3\xed\xa0\x80" if value is _RAW_SURROGATE else msgpack.packb(value) for value in values)
    header = b"".join([*parts, msgpack.packb(specs)])
    return struct.pack(">I", len(header)) + header


class _LyingLink:
    def __init__(self, link: Any, tongue: Tongue) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_tongue", tongue)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._link, name, value)

    def send_now(self, chunks: list[Buffer]) -> None:
        """Everything goes by ``send``, where it is changed."""

    async def send(self, chunks: list[Buffer]) -> None:
        await self._link.send(self._tongue.change(chunks))
        if not self._tongue.waiting:
            self._tongue.all_said.set()


async def tell(told: Sequence[Lie], server: str, job: Job, config: WorkerConfig) -> list[Lie]:
    """Have workers say ``told``, one after the other, on as many links as it takes. Returns what was said.

    Where a lie is borne and the worker gets nothing to do any more, it goes: another has the next one. Raises
    Unreachable once nobody listens there any more.
    """
    for name in sorted({lie.kind.__name__ for lie in told} - _ALWAYS_SAID):
        assert name in _SAMPLES, f"no sample of {name}: add one to _SAMPLES in tests/support/lying.py"
    tongue = Tongue(told)

    async def connect(*arguments: Any, **named: Any) -> Any:
        return _LyingLink(await endpoint.connect(*arguments, **named), tongue)

    runtime = Runtime(connect=connect)
    patience_s = _PATIENCE_S
    while not tongue.all_said.is_set():
        first = len(tongue.said)
        running = asyncio.create_task(Worker(server, job=job, config=config, runtime=runtime).run())
        before = -1
        while before < len(tongue.said) and not running.done() and not tongue.all_said.is_set():
            before = len(tongue.said)
            heard = asyncio.create_task(tongue.all_said.wait())
            await asyncio.wait([running, heard], return_when=asyncio.FIRST_COMPLETED, timeout=patience_s)
            heard.cancel()
        # One that came to say nothing had not the time for it: on a busy machine the next one gets more.
        patience_s = 2 * patience_s if len(tongue.said) == first else _PATIENCE_S
        running.cancel()
        (found,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(found, Unreachable):
            raise found
        assert not isinstance(found, BaseException) or isinstance(found, W5xdeError | asyncio.CancelledError), found
    return tongue.said
