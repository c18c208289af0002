"""Whether an update calls code that may do anything: that is not torch's, and no mere function of a step's number.

Such code may draw, freeze parameters, or change buffers, and is looked after (``updates.sync``), which takes time. What
``LambdaLR`` is given hardly ever does: ``lambda step: 0.95**step``. So functions are read: as far as one uses nothing
but numbers, ``math``, numpy and other such functions it can only compute. Of all else nothing is supposed. One that has
a list or the like, and anywhere calls what changes such, may keep something there from step to step.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_MOST_READ = 10_000  # objects
_MODULES = {"cmath", "math", "numpy", "operator"}
_COMPUTE = {
    "abs", "bool", "complex", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min",
    "pow", "range", "reversed", "round", "sorted", "sum", "tuple", "zip",
}  # fmt: skip
_DATA = (bool, int, float, complex, str, bytes, types.NoneType, np.number, np.bool_)
# What gives an object that nobody else has, as far as ``+=`` may change it; a call does where what is called does.
_MAKE = {
    "BINARY_OP", "BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_TUPLE", "COMPARE_OP", "LOAD_CONST", "LOAD_SMALL_INT",
    "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT",
}  # fmt: skip
_MAY_GIVE_BACK = {"max", "min", "sum"}  # what they were given
_WRITE = {"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "IMPORT_NAME", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"}

# What changes the object that it is an attribute of, and what of numpy and ``operator`` changes an argument.
_CHANGE = {
    "add", "append", "at", "clear", "difference_update", "discard", "extend", "fill", "insert", "intersection_update",
    "itemset", "partition", "pop", "popitem", "put", "remove", "resize", "reverse", "setdefault", "setfield", "sort",
    "symmetric_difference_update", "update", "__delitem__", "__setattr__", "__setitem__",
}  # fmt: skip
_IN_PLACE = {
    "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor",
}  # fmt: skip
_CHANGE_ARGUMENTS = {
    "copyto", "delitem", "fill_diagonal", "methodcaller", "place", "put", "put_along_axis", "putmask", "setitem",
    *_IN_PLACE, *(f"__{name}__" for name in _IN_PLACE),
}  # fmt: skip


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
    factors = set(map(id, values))
    can_keep = changes = False  # whether there is what can be changed, and a call that may do so
    while values:
        value = values.pop()
        if id(value) in read or isinstance(value, _DATA):
            continue
        read.add(id(value))
        if len(read) > _MOST_READ:
            return False
        can_keep |= isinstance(value, list | set | dict | np.ndarray | argparse.Namespace | types.SimpleNamespace)
        if isinstance(value, np.ndarray) and value.dtype != object:
            continue
        if isinstance(value, list | tuple | set | frozenset):
            values.extend(value)
        elif isinstance(value, dict):
            values.extend([*value.keys(), *value.values()])
        elif type(value) in (argparse.Namespace, types.SimpleNamespace):
            values.extend(vars(value).values())
        elif isinstance(value, functools.partial):
            values.extend([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, types.MethodType):
            if not _of_torch(type(value.__self__)) or value.__func__.__globals__.get("__name__", "")[:6] != "torch.":
                return False
        elif isinstance(value, types.FunctionType):
            wrapped = getattr(value, "__wrapped__", None)
            if value.__globals__.get("__name__", "")[:6] == "torch.":
                values.extend([] if wrapped is None else [wrapped])
            elif (used := _used(value, is_factor=id(value) in factors)) is None:
                return False
            else:
                values.extend(used.objects)
                changes |= used.changes
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
                changes |= value.__name__ in _CHANGE
        elif isinstance(value, np.ufunc):
            changes = True  # it is not called by its name: with what, is not known
        elif not (
            isinstance(value, type) and (issubclass(value, np.number) or getattr(builtins, value.__name__, 0) is value)
        ):
            return False
    return not (can_keep and changes)


class _Used(NamedTuple):
    objects: list[object]
    changes: bool  # it calls what changes an object


def _used(function: types.FunctionType, *, is_factor: bool) -> _Used | None:
    """What a function has beside its arguments; None where it writes anywhere, imports, or uses what is not there. A
    factor is given numbers; what others are given, may be anything."""
    cells, known = function.__closure__ or (), function.__globals__
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    codes, changes = [function.__code__], False
    try:
        held = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    except ValueError:  # not filled yet
        return None
    found += [value for value in held.values() if not isinstance(value, np.ufunc)]  # calls of those are looked at
    given = inspect.signature(function, follow_wrapped=False).parameters
    empty = inspect.Parameter.empty
    shared = {name for name, one in given.items() if one.default is not empty and not isinstance(one.default, _DATA)}
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        changes |= any(part == "out" or (isinstance(part, tuple) and "out" in part) for part in code.co_consts)
        loaded: object = None  # last, as far as it is known
        told = list(dis.get_instructions(code))
        fresh = set[int]()  # calls that give what nobody else has
        for at, instruction in enumerate(told):
            name, what = instruction.opname, instruction.argval
            if name in _WRITE or (name in ("STORE_DEREF", "DELETE_DEREF") and what in function.__code__.co_freevars):
                return None
            makes = False
            if name in ("LOAD_ATTR", "LOAD_METHOD"):
                if what == "random":
                    return None
                module = loaded if isinstance(loaded, types.ModuleType) else None
                changes |= what in _CHANGE_ARGUMENTS or (what in _CHANGE and module is None)
                loaded = getattr(module, what, None)
                makes = getattr(module, "__name__", "") in ("cmath", "math")
            elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded = known.get(what)
                makes = what in _COMPUTE - _MAY_GIVE_BACK and what not in known
            else:
                loaded = held.get(what) if name == "LOAD_DEREF" else None
            operands = _operands(loaded)
            if makes or operands is not None:
                call = _called(told, at, code.co_consts)
                if call is not None:
                    fresh.add(call.at)
                if operands is not None:
                    changes |= isinstance(loaded, np.ufunc) if call is None else call.by_place > operands
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                if isinstance(loaded, np.ufunc):
                    continue
                if what in known:
                    found.append(known[what])
                elif what in _COMPUTE or isinstance(getattr(builtins, what, None), type):
                    continue
                else:
                    return None
        given_any = not is_factor or code is not function.__code__
        changes |= _changes_in_place(told, _arguments(code) if given_any else shared, fresh)
    return _Used(found, changes)


def _arguments(code: types.CodeType) -> tuple[str, ...]:
    several = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]


def _operands(called: object) -> int | None:
    """How many arguments by place a function of numpy only reads, that writes to a further one or to what is new; None
    where it is no such function."""
    if isinstance(called, np.ufunc):
        return called.nin
    if not callable(called) or str(getattr(called, "__module__", "")) != "numpy":
        return None
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("out") if "out" in names else None


def _changes_in_place(told: Sequence[dis.Instruction], shared: Collection[str], fresh: Collection[int]) -> bool:
    """Whether one of ``+=`` and the like may change what others have, too, as arguments that are ``shared``: it is a
    new object if it was a constant, or made by arithmetic or a ``fresh`` call."""
    stored: dict[object, list[int]] = {}
    changed = set[object]()
    for at, one in enumerate(told):
        for name in _stored(one):
            stored.setdefault(name, []).append(at)
        if one.opname == "BINARY_OP" and one.argrepr.endswith("="):
            changed.update(_stored(told[at + 1])[:1])

    def is_new(at: int) -> bool:
        made_by = told[at - 1]
        makes = at - 1 in fresh or (made_by.opname in _MAKE and made_by.argrepr != "[]")
        return makes and not told[at].is_jump_target and len(_stored(told[at])) == 1

    return any(name in shared or not all(map(is_new, stored[name])) for name in changed)


def _stored(one: dis.Instruction) -> tuple[object, ...]:
    """Names that an instruction stores to: of two at once from Python 3.13 on."""
    if not one.opname.startswith("STORE_"):
        return ()
    if not isinstance(one.argval, tuple):
        return (one.argval,)
    return one.argval[:1] if "LOAD" in one.opname else one.argval


class _Call(NamedTuple):
    at: int
    by_place: int  # arguments


def _called(told: Sequence[dis.Instruction], at: int, constants: Sequence[Any]) -> _Call | None:
    """Where what was loaded at ``at`` is called; None where it is not, or with arguments that are not known."""
    depth = named = 0
    for place in range(at + 1, len(told)):
        one = told[place]
        if "JUMP" in one.opname or one.opname == "CALL_FUNCTION_EX":
            return None
        if one.opname == "PUSH_NULL" and place == at + 1:  # a part of what is called
            continue
        if one.opname == "KW_NAMES":
            named = len(constants[one.arg or 0])
        if one.opname == "CALL_KW":
            named = len(told[place - 1].argval)
        depth += dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None)
        if depth < 0:  # what is called has two places, and its result is in the first; an argument is further up
            plain = depth == -1 and one.opname in ("CALL", "CALL_KW")
            return _Call(place, (one.arg or 0) - named) if plain else None
    return None
