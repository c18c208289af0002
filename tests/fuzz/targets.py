"""What the fuzzer feeds, and what must hold for any bytes: a message that is encoded and parsed again to the same one,
or an error of the RemoteError family. Plain Python, so that the kept corpus runs as a test too."""

from __future__ import annotations

import math
from pathlib import Path

from msgspec import structs

from w5xde_async.errors import RemoteError
from w5xde_async.wire.frame import (
    HANDSHAKE_CAPS,
    LENGTH_BYTES,
    SESSION_CAPS,
    BufferSpec,
    decode_header,
    encode,
    header_length,
)
from w5xde_async.wire.handshake import COORDINATOR, WORKER, State, advance
from w5xde_async.wire.messages import Message

__all__ = ["GOLDEN", "both"]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames"


def same(one: object, other: object) -> bool:
    """Equal, NaN included."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def again(message: Message, specs: tuple[BufferSpec, ...]) -> None:
    """What was parsed is written and parsed to the same."""
    if any(spec.nbytes > 4096 for spec in specs):
        return
    chunks = encode(message, [(spec, bytes(spec.nbytes)) for spec in specs])
    header = bytes(chunks[0])[LENGTH_BYTES:]
    repeated, repeated_specs = decode_header(header, SESSION_CAPS)
    assert type(repeated) is type(message)
    assert same(structs.astuple(repeated), structs.astuple(message))
    assert repeated_specs == specs


def one_input(data: bytes) -> None:
    """A stream of frames, as a coordinator (first byte even) or a worker (odd) would read it."""
    if not data:
        return
    table = WORKER if data[0] & 1 else COORDINATOR
    state, at = State.GREETING, 1
    while at + LENGTH_BYTES <= len(data):
        caps = HANDSHAKE_CAPS if state in (State.GREETING, State.PROVING) else SESSION_CAPS
        try:
            length = header_length(data[at : at + LENGTH_BYTES], caps)
            at += LENGTH_BYTES
            message, specs = decode_header(data[at : at + length], caps)
            at += length
            assert caps is SESSION_CAPS or not specs, "buffers before the proof"
            again(message, specs)
            state = advance(table, state, message)
        except RemoteError:
            return
        at += sum(spec.nbytes for spec in specs)


def one_header(data: bytes) -> None:
    """A header by itself, so that no length has to be guessed."""
    try:
        message, specs = decode_header(data, SESSION_CAPS)
    except RemoteError:
        return
    again(message, specs)


def both(data: bytes) -> None:
    one_input(data)
    one_header(data)
