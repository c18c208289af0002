"""Codecs by the name that stands on the wire, in flags and in logs; and which combinations do not converge."""

from __future__ import annotations

from w5xde_async.codecs.blocks import Int4, Int8, Sign
from w5xde_async.codecs.codec import Codec
from w5xde_async.codecs.dense import Bf16, Fp16, Raw
from w5xde_async.codecs.lossless import Lz4
from w5xde_async.codecs.names import LONGEST, NAMES
from w5xde_async.codecs.sparse import SparseLoco, TopK
from w5xde_async.errors import UsageError

_PLAIN: dict[str, type[Codec]] = {
    "raw": Raw, "bf16": Bf16, "fp16": Fp16, "int8": Int8, "int4": Int4, "sign": Sign, "sparseloco": SparseLoco,
}  # fmt: skip
_WRAPPERS = {"lz4": False, "lz4-shuffle": True}


def codec(name: str) -> Codec:
    """The codec named ``int8``, ``topk:0.01``, ``lz4:int8`` or the like. Raises UsageError that says what there is."""
    family, colon, argument = name.partition(":")
    if len(name) > LONGEST:
        raise UsageError(f"codec name of {len(name)} characters")
    try:
        if family in _WRAPPERS:
            return Lz4(codec(argument) if colon else None, shuffle=_WRAPPERS[family])
        if family == "topk":
            if not argument:
                raise UsageError("codec topk needs a number: topk:FRACTION")
            return TopK(float(argument))
    except ValueError as error:
        raise UsageError(f"codec {name}: {error}") from None
    if family not in _PLAIN:
        raise UsageError(f"unknown codec {name!r}; there are {', '.join(NAMES)}")
    if colon:
        raise UsageError(f"codec {family} takes no argument, got {name!r}")
    return _PLAIN[family]()


def refuse_divergence(chosen: Codec, *, feedback: bool) -> None:
    """Raise UsageError where training with ``chosen`` does not converge: what it leaves out would be lost for ever."""
    if chosen.needs_feedback and not feedback:
        raise UsageError(
            f"codec {chosen.name} leaves out most of each gradient and does not converge without error feedback; "
            "turn error feedback on, or choose a codec that keeps every value (bf16, int8, int4)"
        )
