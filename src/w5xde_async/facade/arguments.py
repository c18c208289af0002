"""What the arguments of the facades' calls accept: looked at before anything is done with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from w5xde_async.codecs.names import NAMES, is_codec
from w5xde_async.config import Kind, number, one_of, text, whole
from w5xde_async.errors import UsageError
from w5xde_async.wire.messages import SILENCE_S

_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes(**kinds: Kind) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a call whose arguments are checked first, by their names; a default always holds.

    The call raises UsageError, in one line that begins with the argument's name.
    """

    def decorate(call: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(call)

        @functools.wraps(call)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                default = signature.parameters[name].default
                if name in kinds and not (type(value) is type(default) and value == default):
                    kinds[name].check(name, value)
            return call(*args, **kwargs)

        return checked

    return decorate


def of_type(kind: type[Any], accepts: str) -> Kind:
    """Instances of a class."""
    return Kind(accepts, "", str, lambda value: isinstance(value, kind))


def or_none(kind: Kind) -> Kind:
    """``kind``, or None where that is no default."""
    return kind._replace(accepts=f"{kind.accepts}, or None", holds=lambda value: value is None or kind.holds(value))


def _is_criterion(value: object) -> bool:
    """Raises UsageError for what often stands in a criterion's place."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        raise UsageError(f"criterion is the class {value.__name__}; give an instance: {value.__name__}()")
    reduced = {"none": "a loss for each sample", "sum": "a loss that grows with the samples"}
    reduction = getattr(value, "reduction", "mean")
    if callable(value) and isinstance(reduction, str) and reduction in reduced:
        raise UsageError(f'criterion has reduction="{reduction}", {reduced[reduction]}; give reduction="mean"')
    return callable(value)


CALLABLE = Kind("a function", "", str, callable)
MODEL = Kind("a torch.nn.Module, or a class or function that makes one", "", str, callable)
MODULE = of_type(nn.Module, "a torch.nn.Module")
CRITERION = Kind("criterion(output, target) -> mean loss", "", str, _is_criterion)
SETTINGS = of_type(Mapping, "a dict")
TEXT = text("a text in one line", "", r"[^\x00-\x1f]+")
HOST = text("a host name or address", "", r"[^\x00-\x1f]{1,255}")
COUNT, SEED = whole(1), whole(0)
PORT_TO_LISTEN, PORT = whole(0, 65535), whole(1, 65535)
LOG = one_of("silent", "normal", "verbose")
DEVICE = Kind(
    "cpu, cuda:0, mps or a torch.device", "", str, lambda value: TEXT.holds(value) or isinstance(value, torch.device)
)
DASHBOARD = Kind(
    "HOST or HOST:PORT, or True for loopback", "", str, lambda value: TEXT.holds(value) or isinstance(value, bool)
)
CODEC = Kind(
    f"auto, or one of {', '.join(NAMES)}", "", str,
    lambda name: is_codec(name) or (isinstance(name, str) and name == "auto"),
)  # fmt: skip
#: A hundredth of a second: signs of life come four times as often.
SILENCE = number(f"of seconds from 0.01 to {SILENCE_S[1]:.0f}", lambda seconds: 0.01 <= seconds <= SILENCE_S[1])
MINUTES = Kind("minutes > 0, at most 10000000", "", str, number("", lambda minutes: 0 < minutes <= 1e7).holds)
