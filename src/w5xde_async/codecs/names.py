"""The names of codecs, for help texts and checks: without torch, which takes seconds to import."""

from __future__ import annotations

LONGEST = 64  #: characters of a name
#: Every form of a name that ``registry.codec`` knows.
NAMES = (
    "raw", "bf16", "fp16", "int8", "int4", "sign", "sparseloco", "topk:FRACTION", "lz4[:CODEC]",
    "lz4-shuffle[:bf16|fp16]",
)  # fmt: skip
_SHUFFLED = ("raw", "bf16", "fp16")  # in words of several bytes


def is_codec(name: object) -> bool:
    """Whether ``registry.codec`` makes a codec of ``name``."""
    if not isinstance(name, str) or len(name) > LONGEST:
        return False
    family, colon, argument = name.partition(":")
    if family == "lz4":
        return not colon or (is_codec(argument) and not argument.startswith("lz4"))
    if family == "lz4-shuffle":
        return not colon or argument in _SHUFFLED
    if family == "topk":
        try:
            return 0 < float(argument) <= 0.5
        except ValueError:
            return False
    return name in NAMES and ":" not in name
