"""One door for msgpack that comes from a network: lengths are checked before anything is allocated for them.

msgpack before 1.2 makes an array as long as its header announces before its items are there, at every level of
nesting: a header of 1 MiB of such announcements takes gigabytes. So what is announced is first compared with the bytes
that could hold it. Invariant: arrays and maps that are open at one time announce no more items than there are bytes
left, so what is allocated for them is within a small factor of ``len(data)``.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

__all__ = ["unpack"]

_ITEM_BYTES = 8  # of an array's item, before it is there
_DEEPEST = 1024  # levels of nesting that msgpack follows
_UNSCANNED_BYTES = 16 << 20  # what announcements could allocate at most for data that is not scanned
_UINT16, _UINT32 = struct.Struct(">H"), struct.Struct(">I")
#: Bytes that follow the first one, by the first one; strings, bytes, arrays and maps aside.
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
    0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
#: Strings, bytes and extensions: bytes of their length, and bytes beside it.
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0), 0xC7: (1, 1),
          0xC8: (2, 1), 0xC9: (4, 1)}  # fmt: skip


def unpack(data: bytes | bytearray | memoryview, *, use_list: bool = False, **limits: Any) -> Any:
    """``msgpack.unpackb`` of one value. Raises ValueError, RecursionError, msgpack.UnpackException.

    ``limits`` are ``unpackb``'s own (``max_array_len`` ...). Extension types are refused.
    """
    whole = data if isinstance(data, (bytes, bytearray)) else bytes(data)
    length = len(whole)
    announced = whole.count(0xDD) * length + whole.count(0xDC) * min(length, 0xFFFF)
    if min(announced, _DEEPEST * length) * _ITEM_BYTES > _UNSCANNED_BYTES:
        _scan(whole)
    return msgpack.unpackb(whole, use_list=use_list, raw=False, strict_map_key=True, max_ext_len=0, **limits)


def _scan(data: bytes | bytearray) -> None:
    """Raises ValueError where open arrays and maps announce more than can follow."""
    at, size = 0, len(data)
    awaited = 1  # values that are still to come, of all that are open
    while awaited:
        if awaited > size - at:
            raise ValueError("more is announced than there is")
        first = data[at]
        at += 1
        awaited -= 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0x90:
            awaited += 2 * (first & 0x0F)
        elif first < 0xA0:
            awaited += first & 0x0F
        elif first < 0xC0:
            at += first & 0x1F
        elif first >= 0xDC:
            wide = first in (0xDD, 0xDF)
            number = _UINT32 if wide else _UINT16
            if at + number.size > size:
                raise ValueError("it is cut off")
            count = number.unpack_from(data, at)[0]
            at += number.size
            awaited += count if first < 0xDE else 2 * count
        elif first in _SIZED:
            width, beside = _SIZED[first]
            at += width + beside + int.from_bytes(data[at : at + width], "big")
        elif first in _FIXED:
            at += _FIXED[first]
        else:
            raise ValueError("a byte that begins nothing")
    # Whether anything follows is for the parser to say.
