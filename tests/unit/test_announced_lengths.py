"""Msgpack from a network: a length that is announced is not believed before its bytes are there."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.support.programs import tiny_layout

from w5xde_async.compute.batch import unflatten
from w5xde_async.compute.program.form import Document, parse
from w5xde_async.errors import MalformedFrame, ProgramRefused
from w5xde_async.wire.frame import SESSION_CAPS, decode_header

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
READERS: dict[str, Callable[[bytes], object]] = {
    "header": lambda text: decode_header(text, SESSION_CAPS),
    "batch": lambda text: unflatten(text, [torch.zeros(1)]),
    "program": lambda text: parse(Document(text, ()), tiny_layout()),
    "argument of a program": lambda text: parse(Document(ARGUMENT + text, ()), tiny_layout()),
}
#: A program up to the argument of its first node.
ARGUMENT = b"\x98\x01\xc4\x00\xc4\x00\x90\x90\x90\x90\x91\x93\x90\x91\x93\x00\x91"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", LIARS)
def test_what_announces_more_than_it_has_is_refused(reader: str, name: str) -> None:
    with pytest.raises((MalformedFrame, ProgramRefused)):
        READERS[reader](LIARS[name])


_GROWN = """
from tests.support.resident import forget_peak, peak_bytes
import tests.unit.test_announced_lengths as t
for name, read in t.READERS.items():
    def refused(text):
        try: read(text)
        except (t.MalformedFrame, t.ProgramRefused): pass
    refused(b"")
    before = forget_peak()
    for text in t.LIARS.values():
        refused(text)
    grown = peak_bytes() - before
    assert grown < 64 << 20, f"{name}: {grown >> 20} MiB"
"""


@pytest.mark.slow
def test_memory_stays_flat_under_liars() -> None:
    subprocess.run([sys.executable, "-c", _GROWN], check=True, timeout=60)
