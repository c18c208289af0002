"""Whether an update calls code that may do anything: that is not torch's, and no mere function of a step's number.

Such code may draw, freeze parameters, or change buffers, and is looked after (``updates.sync``), which takes time. What
``LambdaLR`` is given hardly ever does: ``lambda step: 0.95**step``. So functions are read: as far as one uses nothing
but numbers, ``math``, numpy and other such functions it can only compute. Of all else nothing is supposed.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_MOST_READ = 10_000  # objects
_MODULES = {"cmath", "math", "numpy", "operator"}
_COMPUTE = {
    "abs", "bool", "complex", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
    "pow", "range", "reversed", "round", "sorted", "sum", "tuple", "zip",
}  # fmt: skip
_DATA = (bool, int, float, complex, str, bytes, types.NoneType, np.number, np.bool_)
_WRITE = {"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "IMPORT_NAME", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"}


def has_hooks(optimizer: Any) -> bool:
    """Whether its steps call code of the user's."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def is_foreign(made: object) -> bool:
    """Whether the code of an optimizer, or of a part of a scheduler, is not torch's: its class, or what it holds."""
    return made is not None and (not _of_torch(type(made)) or bool(held_code(made)))


def held_code(made: object) -> dict[str, list[object]]:
    """Functions that an optimizer, or a part of a scheduler, holds and that may do anything, as one put in place of
    ``step``, or a factor by the step; by attribute."""
    held: dict[str, list[object]] = {}
    for name, value in vars(made).items():
        own = getattr(type(made), name, None)
        if callable(own) and callable(value) and inspect.unwrap(value) is inspect.unwrap(own):
            continue  # its class's ``step``, which a scheduler of torch's counts the calls of
        for part in _parts(value):
            if callable(part) and not _computes([part]):
                held.setdefault(name, []).append(part)
    return held


def forgets(made: object) -> list[str]:
    """Those attributes of ``held_code`` that keep what no ``state_dict`` has: of other objects than functions torch's
    schedulers save what they are made of."""
    functions = types.FunctionType, types.MethodType, functools.partial
    return [name for name, parts in held_code(made).items() if any(isinstance(part, functions) for part in parts)]


def _parts(value: object) -> Iterable[object]:
    """What a list or the like holds, or else the value itself; of classes torch's schedulers keep none."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | tuple) else (value,)


def _of_torch(made: Any) -> bool:
    return str(getattr(made, "__module__", "")).partition(".")[0] == "torch"


def _computes(values: list[object]) -> bool:
    """Whether calls of these can only compute, as far as they can be read."""
    read: set[int] = set()
    while values:
        value = values.pop()
        if id(value) in read or isinstance(value, _DATA) or (isinstance(value, np.ndarray) and value.dtype != object):
            continue
        read.add(id(value))
        if len(read) > _MOST_READ:
            return False
        if isinstance(value, list | tuple | set | frozenset):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend([*value.keys(), *value.values()])
        elif type(value) in (argparse.Namespace, types.SimpleNamespace):
            values.extend(vars(value).values())
        elif isinstance(value, functools.partial):
            values.extend([value.func, value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            if not _of_torch(type(value.__self__)) or value.__func__.__globals__.get("__name__", "")[:6] != "torch.":
                return False
        elif isinstance(value, types.FunctionType):
            wrapped = getattr(value, "__wrapped__", None)
            if value.__globals__.get("__name__", "")[:6] == "torch.":
                values.extend([] if wrapped is None else [wrapped])
            elif (used := _used(value)) is None:
                return False
            else:
                values.extend(used)
        elif isinstance(value, types.ModuleType):
            if value.__name__ not in _MODULES:
                return False
        elif isinstance(value, types.BuiltinFunctionType | types.BuiltinMethodType):
            of = value.__self__
            if isinstance(of, types.ModuleType):
                if of.__name__ != "math" and not (of is builtins and value.__name__ in _COMPUTE):
                    return False
            elif of is not None:
                values.append(of)
        elif not isinstance(value, np.ufunc) and not (
            isinstance(value, type) and (issubclass(value, np.number) or getattr(builtins, value.__name__, 0) is value)
        ):
            return False
    return True


def _used(function: types.FunctionType) -> list[object] | None:
    """What a function has beside its arguments; None where it writes anywhere, imports, or uses what is not there."""
    cells = function.__closure__ or ()
    found: list[object] = [function.__defaults__, function.__kwdefaults__]
    codes = [function.__code__]
    try:
        found += [cell.cell_contents for cell in cells]
    except ValueError:  # not filled yet
        return None
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for instruction in dis.get_instructions(code):
            name, what = instruction.opname, instruction.argval
            if name in _WRITE or (name in ("LOAD_ATTR", "LOAD_METHOD") and what == "random"):
                return None
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                if what in function.__globals__:
                    found.append(function.__globals__[what])
                elif what in _COMPUTE or isinstance(getattr(builtins, what, None), type):
                    continue
                else:
                    return None
    return found
