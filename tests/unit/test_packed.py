"""Msgpack from a network: what is announced is not believed."""

from __future__ import annotations

import struct
import subprocess
import sys

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w5xde_async.errors import MalformedFrame
from w5xde_async.wire import packed
from w5xde_async.wire.frame import SESSION_CAPS, decode_header
from w5xde_async.wire.packed import unpack

SIZE = 1 << 20


def announcement(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


#: Each as long as a header may be.
LIARS = {
    "arrays in arrays, each as long as the whole": announcement(SIZE) * (SIZE // 5),
    "a thousand, each of a fifth": (announcement(SIZE // 5) * 1000).ljust(SIZE, b"\0"),
    "short ones": (b"\xdc\xff\xff" * (SIZE // 3)).ljust(SIZE, b"\0"),
    "maps in maps": (b"\xdf" + struct.pack(">I", SIZE // 2)) * (SIZE // 5),
}


@pytest.mark.parametrize("name", LIARS)
def test_a_header_that_announces_more_than_it_has_is_malformed(name: str) -> None:
    with pytest.raises(MalformedFrame):
        decode_header(LIARS[name], SESSION_CAPS)


def test_it_is_found_before_the_parser_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgpack before 1.2 takes gigabytes for these: it must not see them."""

    def believed(*arguments: object, **named: object) -> None:
        raise AssertionError("it reached the parser")

    monkeypatch.setattr(msgpack, "unpackb", believed)
    for text in list(LIARS.values())[:3]:
        with pytest.raises(ValueError, match="announced"):
            unpack(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=8),
    max_leaves=40,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(values)
def test_what_is_whole_passes_the_scan(value: object) -> None:
    data = msgpack.packb(value)
    packed._scan(data)
    assert unpack(data, use_list=True) == value


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_the_scan_ends_on_any_bytes(data: bytes) -> None:
    try:
        packed._scan(data)
    except ValueError:
        with pytest.raises((ValueError, msgpack.UnpackException)):
            msgpack.unpackb(data, raw=False)


@pytest.mark.parametrize("count", [16, 65_535, 65_536, 200_000])
def test_long_arrays_still_pass(count: int) -> None:
    assert unpack(msgpack.packb([[0xDD] * count]), max_array_len=SIZE) == ((0xDD,) * count,)


@pytest.mark.slow
def test_memory_stays_flat_under_liars() -> None:
    script = (
        "import resource, tests.unit.test_packed as t\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for text in t.LIARS.values():\n"
        "    try: t.decode_header(text, t.SESSION_CAPS)\n"
        "    except t.MalformedFrame: pass\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grown < 64 << 10, f'{grown} KiB'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
