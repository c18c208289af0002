"""Frames: round trips, caps before allocation, and no bytes that raise anything but a RemoteError."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from w5xde_async.errors import FrameTooLarge, MalformedFrame, ProtocolViolation, RemoteError
from w5xde_async.wire.frame import (
    DTYPE_BYTES,
    HANDSHAKE_CAPS,
    LENGTH_BYTES,
    SESSION_CAPS,
    BufferSpec,
    Caps,
    decode_header,
    encode,
    header_length,
)
from w5xde_async.wire.messages import MESSAGES, Failed, Heartbeat, Message, Result

SPEC = ("w", "float32", (2, 3), "raw", 24)


def packed(kind: object = Result.TYPE, fields: object = (1, 2, 0), specs: object = ()) -> bytes:
    return msgpack.packb((kind, fields, specs))


def split(chunks: list) -> tuple[bytes, list]:
    head = bytes(chunks[0])
    assert int.from_bytes(head[:LENGTH_BYTES], "big") == len(head) - LENGTH_BYTES
    return head[LENGTH_BYTES:], chunks[1:]


specs = st.builds(
    lambda name, dtype, shape, codec, nbytes: (
        BufferSpec(name, dtype, shape, codec, nbytes)
        if codec != "raw"
        else BufferSpec(name, dtype, shape, codec, _product(shape) * DTYPE_BYTES[dtype])
    ),
    st.text(max_size=20),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from(["raw", "bf16", "topk"]),
    st.integers(0, 300),
)


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


@given(st.lists(specs, max_size=5))
def test_round_trip_of_any_buffers(made: list[BufferSpec]):
    payloads = [bytes(spec.nbytes) for spec in made]
    header, rest = split(encode(Result(1, 2), list(zip(made, payloads, strict=True))))
    assert decode_header(header, SESSION_CAPS) == (Result(1, 2), tuple(made))
    assert b"".join(rest) == b"".join(payloads)


@given(st.text(st.characters(exclude_categories=()), max_size=200))
@example("cannot read caf\udce9.txt")
def test_any_text_can_be_sent(text: str):
    header, _ = split(encode(Failed(1, 2, text, text)))
    message, _ = decode_header(header, SESSION_CAPS)
    assert isinstance(message, Failed)
    assert len(message.error) == len(message.traceback) == len(text)
    if text.isprintable():
        assert message.error == text


def test_buffers_are_not_copied():
    data = memoryview(bytearray(24))
    chunks = encode(Result(1, 2), [(BufferSpec(*SPEC), data)])
    assert chunks[1] is data


def test_empty_buffers_have_no_chunk():
    assert len(encode(Result(1, 2), [(BufferSpec("e", "uint8", (0,), "raw", 0), b"")])) == 1


@pytest.mark.parametrize("data", [b"", bytes(23), bytes(25), memoryview(bytearray(24)).cast("I")])
def test_a_buffer_unlike_its_spec_is_never_sent(data: bytes):
    with pytest.raises(ProtocolViolation):
        encode(Result(1, 2), [(BufferSpec(*SPEC), data)])


def test_a_header_may_lie_in_a_view():
    header, _ = split(encode(Heartbeat("x")))
    padded = memoryview(b"??" + header + b"??")[2:-2]
    assert decode_header(padded, HANDSHAKE_CAPS)[0] == Heartbeat("x")


# -- whatever comes, a message or a RemoteError

wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.binary(max_size=200), st.sampled_from([HANDSHAKE_CAPS, SESSION_CAPS]))
@example(b"\x93\x0e\x91\xc1\x90", SESSION_CAPS)  # a byte that msgpack never uses
@example(b"\x93\x0e\x91\xa1\xff\x90", SESSION_CAPS)  # not UTF-8
@example(b"\x91" * 200, SESSION_CAPS)  # nested
@example(b"\xdd\xff\xff\xff\xff", SESSION_CAPS)  # an array of four thousand million
@example(b"\x93\x0e\xc7\x00\x05\x90", SESSION_CAPS)  # an extension type
@example(b"\x93\x0e\x91\x81\x90\x01\x90", SESSION_CAPS)  # a map with an array as its key
def test_any_bytes_are_a_message_or_a_remote_error(header: bytes, caps: Caps):
    try:
        message, found = decode_header(header, caps)
    except RemoteError:
        return
    assert type(message) in MESSAGES.values()
    assert all(type(spec) is BufferSpec for spec in found)


@given(st.sampled_from(sorted(MESSAGES)), wire_values, wire_values)
def test_any_values_are_a_message_or_a_remote_error(kind: int, fields: object, raw_specs: object):
    try:
        message, _ = decode_header(packed(kind, fields, raw_specs), SESSION_CAPS)
    except RemoteError:
        return
    assert isinstance(message, Message)


@given(st.tuples(*[wire_values] * 5) | wire_values)
def test_any_buffer_description_is_a_spec_or_a_remote_error(raw: object):
    try:
        _, (spec,) = decode_header(packed(specs=(raw,)), SESSION_CAPS)
    except RemoteError:
        return
    assert spec.nbytes <= SESSION_CAPS.buffer_bytes


def test_a_cut_header_is_malformed():
    header, _ = split(encode(Heartbeat("a beat")))
    for cut in range(len(header)):
        with pytest.raises(MalformedFrame):
            decode_header(header[:cut], SESSION_CAPS)


def test_bytes_after_the_header_are_malformed():
    header, _ = split(encode(Heartbeat("x")))
    with pytest.raises(MalformedFrame):
        decode_header(header + b"\x00", SESSION_CAPS)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 5), (0, b"w"), (1, "float33"), (1, 4), (2, 6), (2, (-1, 3)), (2, (2.0, 3)), (2, (True, 3)), (2, (1,) * 17),
        (3, None), (4, -1), (4, "24"), (4, 23), (4, 25), (4, True),
    ],
)  # fmt: skip
def test_a_wrong_buffer_field_is_malformed(position: int, value: object):
    raw = list(SPEC)
    raw[position] = value
    with pytest.raises(MalformedFrame):
        decode_header(packed(specs=(raw,)), SESSION_CAPS)


@pytest.mark.parametrize("header", [packed(kind=99), packed(kind=True), packed(kind="9"), packed(fields=(1,)), b"\x01"])
def test_an_unknown_or_misshapen_message_is_malformed(header: bytes):
    with pytest.raises(MalformedFrame):
        decode_header(header, SESSION_CAPS)


# -- caps, before anything is allocated


def test_length_is_checked_against_the_cap():
    assert header_length((4096).to_bytes(4, "big"), HANDSHAKE_CAPS) == 4096
    with pytest.raises(FrameTooLarge) as caught:
        header_length((4097).to_bytes(4, "big"), HANDSHAKE_CAPS)
    assert (caught.value.field, caught.value.nbytes, caught.value.limit) == ("header", 4097, 4096)
    with pytest.raises(MalformedFrame):
        header_length((2).to_bytes(4, "big"), HANDSHAKE_CAPS)


def test_no_buffer_before_authentication():
    with pytest.raises(FrameTooLarge):
        decode_header(packed(specs=(SPEC,)), HANDSHAKE_CAPS)


def test_buffer_count_and_size_have_caps():
    caps = Caps(header_bytes=4096, buffers=2, buffer_bytes=24)
    decode_header(packed(specs=(SPEC,) * 2), caps)
    with pytest.raises(FrameTooLarge):
        decode_header(packed(specs=(SPEC,) * 3), caps)
    with pytest.raises(FrameTooLarge):
        decode_header(packed(specs=(("w", "uint8", (25,), "raw", 25),)), caps)


def test_announced_sizes_allocate_nothing():
    hostile = [
        b"\x93\x09\xdd\x7f\xff\xff\xff\x90",  # fields: an array of 2^31
        b"\x93\x0e\x91\xdb\x7f\xff\xff\xff\x90",  # a string of 2 GiB
        b"\x93\x03\x91\xc6\x7f\xff\xff\xff\x90",  # bytes of 2 GiB
        b"\x93\x09\xdf\x7f\xff\xff\xff\x90",  # a map of 2^31
        packed(specs=(("w", "uint8", (1 << 60,), "raw", 1 << 60),)),
    ]
    tracemalloc.start()
    try:
        for header in hostile:
            with pytest.raises(RemoteError):
                decode_header(header, SESSION_CAPS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
