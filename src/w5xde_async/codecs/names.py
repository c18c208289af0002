"""The names of codecs, for help texts: without torch, which takes seconds to import."""

from __future__ import annotations

#: Every form of a name that ``registry.codec`` knows.
NAMES = (
    "raw", "bf16", "fp16", "int8", "int4", "sign", "sparseloco", "topk:FRACTION", "lz4[:CODEC]",
    "lz4-shuffle[:CODEC]",
)  # fmt: skip
