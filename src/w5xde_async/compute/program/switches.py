"""What a process has told torch of how to compute: which kernels, and with what precision.

A job's file may say it at its top (``torch.set_float32_matmul_precision("high")``,
``torch.backends.mkldnn.enabled = False``). Whoever loads that file has it so; a worker without the code is told it with
the program, and has it so while it computes that. Only what is not torch's own choice travels.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import torch

from w5xde_async.errors import ProgramRefused, UsageError

Said = tuple[tuple[str, bool | str], ...]  #: names of switches and what they are set to
_torch: Any = torch._C  # most public functions for these import more than a closed sandbox lets them


class _Switch(NamedTuple):
    read: Callable[[], bool | str]
    write: Callable[[Any], object]
    usual: bool | str
    others: frozenset[str] = frozenset()  # of texts: what it may be set to


def _flag(read: str, write: str, usual: bool) -> _Switch:
    def value() -> bool:
        found = getattr(_torch, read)()
        return bool(found[0] if isinstance(found, tuple) else found)

    return _Switch(value, lambda on: getattr(_torch, write)(on), usual)


def _float32(backend: str, operation: str, usual: str = "none") -> _Switch:
    return _Switch(
        lambda: str(_torch._get_fp32_precision_getter(backend, operation)),
        lambda precision: _torch._set_fp32_precision_setter(backend, operation, precision),
        usual, frozenset(("none", "ieee", "tf32") + ("bf16",) * (backend != "cuda")),
    )  # fmt: skip


def _determinism() -> str:
    if not _torch._get_deterministic_algorithms():
        return "off"
    return "warn" if _torch._get_deterministic_algorithms_warn_only() else "on"


# Older settings and newer ones (torch.backends.fp32_precision) of the same: torch computes with nothing where the two
# contradict each other. So all of them are set, in this order, or none.
_PRECISION = {
    "float32_matmul_precision": _Switch(
        lambda: str(_torch._get_float32_matmul_precision()), lambda said: _torch._set_float32_matmul_precision(said),
        "highest", frozenset(("highest", "high", "medium")),
    ),
    "cudnn_allow_tf32": _flag("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32", True),
    "fp32_generic": _float32("generic", "all"),
    "fp32_cuda": _float32("cuda", "all"),
    "fp32_cuda_matmul": _float32("cuda", "matmul"),
    "fp32_cuda_conv": _float32("cuda", "conv", "tf32"),
    "fp32_cuda_rnn": _float32("cuda", "rnn", "tf32"),
    "fp32_mkldnn": _float32("mkldnn", "all"),
    "fp32_mkldnn_matmul": _float32("mkldnn", "matmul"),
    "fp32_mkldnn_conv": _float32("mkldnn", "conv"),
    "fp32_mkldnn_rnn": _float32("mkldnn", "rnn"),
}  # fmt: skip
#: Those of them that matrix products go by, which are read at every step.
_PRODUCTS = ("float32_matmul_precision", "fp32_cuda_matmul", "fp32_mkldnn_matmul")
_HALF = "_reduced_precision_reduction"
_SWITCHES = _PRECISION | {
    "mkldnn": _flag("_get_mkldnn_enabled", "_set_mkldnn_enabled", True),
    "mkldnn_deterministic": _flag("_get_mkldnn_deterministic", "_set_mkldnn_deterministic", False),
    "nnpack": _flag("_get_nnpack_enabled", "_set_nnpack_enabled", True),
    "cudnn": _flag("_get_cudnn_enabled", "_set_cudnn_enabled", True),
    "cudnn_benchmark": _flag("_get_cudnn_benchmark", "_set_cudnn_benchmark", False),
    "cudnn_deterministic": _flag("_get_cudnn_deterministic", "_set_cudnn_deterministic", False),
    "cublas_fp16_reduction": _flag(f"_get_cublas_allow_fp16{_HALF}", f"_set_cublas_allow_fp16{_HALF}", True),
    "cublas_bf16_reduction": _flag(f"_get_cublas_allow_bf16{_HALF}", f"_set_cublas_allow_bf16{_HALF}", True),
    "cublas_fp16_accumulation": _flag(
        "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation", False
    ),
    "attention_flash": _flag("_get_flash_sdp_enabled", "_set_sdp_use_flash", True),
    "attention_mem_efficient": _flag("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", True),
    "attention_math": _flag("_get_math_sdp_enabled", "_set_sdp_use_math", True),
    "attention_cudnn": _flag("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", True),
    "attention_math_reduction": _flag(
        "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction", False
    ),
    "deterministic": _Switch(
        _determinism, lambda said: _torch._set_deterministic_algorithms(said != "off", warn_only=said == "warn"),
        "off", frozenset(("off", "warn", "on")),
    ),
}  # fmt: skip


def said_here() -> Said:
    """What this process has told torch, where that is not torch's own choice."""
    found = _read(_SWITCHES)
    precise = all(found[name] == _SWITCHES[name].usual for name in _PRECISION if name in found)
    return tuple(
        (name, value)
        for name, value in found.items()
        if value != _SWITCHES[name].usual or (name in _PRECISION and not precise)
    )


def product_precision() -> Said:
    """With what precision float32 matrices are multiplied here; for ``set_product_precision``."""
    return tuple((name, value) for name in _PRODUCTS if (value := _value(name)) is not None)


def set_product_precision(said: Said) -> None:
    """What ``product_precision`` has said."""
    _write(said)


def contradiction(said: Sequence[tuple[str, Any]]) -> str:
    """Why no process could have said this; empty where it could."""
    for name, value in said:
        switch = _SWITCHES.get(name)
        if switch is None:
            return f"torch has no setting {name[:80]!r} that this version knows"
        if type(value) is not type(switch.usual) or (isinstance(value, str) and value not in switch.others):
            return f"torch's setting {name} is not {value!r:.40}"
    return "" if len({name for name, _ in said}) == len(said) else "a setting of torch's is there twice"


class Switched:
    """This process, told what others are, for as long as somebody computes with that. Any thread."""

    _lock = threading.Lock()
    _holders: ClassVar[set[Switched]] = set()
    _said: Said = ()
    _before: ClassVar[dict[str, bool | str]] = {}

    def say(self, said: Said) -> None:
        """Have it so from now on. Raises ProgramRefused where this torch cannot.

        Raises UsageError where somebody else here computes with something else.
        """
        own = type(self)
        with own._lock:
            self._let_go()
            if own._holders and own._said != said:
                raise UsageError(
                    "this process computes another program, for which torch is told otherwise; start a process for each"
                )
            if not own._holders:
                before = _read(_concerned(said))
                try:
                    _write(said)
                except ProgramRefused:
                    _put_back(before)
                    raise
                own._said, own._before = said, before
            own._holders.add(self)

    def close(self) -> None:
        """Have it as it was, once nobody needs it any more."""
        with type(self)._lock:
            self._let_go()

    def _let_go(self) -> None:
        own = type(self)
        if self in own._holders:
            own._holders.remove(self)
            if not own._holders:
                _put_back(own._before)
                own._said, own._before = (), {}


def _concerned(said: Said) -> set[str]:
    """What changes where this is said: each setting of precision may change the others."""
    names = {name for name, _ in said}
    return names if names.isdisjoint(_PRECISION) else names | _PRECISION.keys()


def _read(names: Iterable[str]) -> dict[str, bool | str]:
    """What can be read: torch knows no older setting where a newer one says something that there was no word for, and
    another torch may know other ones."""
    found = dict[str, bool | str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if (value := _value(name)) is not None:
                found[name] = value
    return found


def _value(name: str) -> bool | str | None:
    try:
        return _SWITCHES[name].read()
    except (RuntimeError, AttributeError):
        return None


def _put_back(before: dict[str, bool | str]) -> None:
    for name in _SWITCHES:
        if name in before:
            with suppress(ProgramRefused):  # what cannot be told was not told before
                _write(((name, before[name]),))


def _write(said: Said) -> None:
    """In the order in which torch keeps all of it. Raises ProgramRefused."""
    told = dict(said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this build of torch cannot do anyway
        for name, switch in _SWITCHES.items():
            if name in told:
                try:
                    switch.write(told[name])
                except (RuntimeError, AttributeError, TypeError) as error:
                    reason = f"torch {torch.__version__} here cannot have {name} {told[name]}: {str(error)[:200]}"
                    raise ProgramRefused(reason) from error
