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
from collections.abc import Iterable
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
_GIVE_BACK = (max, min, sum)  # may give what they were given
_NEVER_GOES_ON = {"JUMP_BACKWARD", "JUMP_FORWARD", "RAISE_VARARGS", "RERAISE", "RETURN_CONST", "RETURN_VALUE"}
_JUMPS_WITH_IT = {"JUMP_FORWARD", "JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"}  # what lies on top, lies there still
_NO_PLAIN_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WRITE = {"DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "IMPORT_NAME", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"}

# What changes the object that it is an attribute of, and what of numpy and ``operator`` changes an argument.
_CHANGE = {
    "add", "append", "at", "byteswap", "clear", "difference_update", "discard", "extend", "fill", "insert",
    "intersection_update", "itemset", "partition", "pop", "popitem", "put", "remove", "resize", "reverse",
    "setdefault", "setfield", "sort", "symmetric_difference_update", "update", "__delitem__", "__setattr__",
    "__setitem__",
}  # fmt: skip
_IN_PLACE = {
    "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor",
}  # fmt: skip
_CHANGE_ARGUMENTS = {
    "copyto", "delitem", "fill_diagonal", "methodcaller", "nan_to_num", "place", "put", "put_along_axis", "putmask",
    "setitem", *_IN_PLACE, *(f"__{name}__" for name in _IN_PLACE),
}  # fmt: skip


_WRITE_INTO = {"out", "overwrite_input"}  # arguments by which functions of numpy write into others


#: Attributes in which torch's optimizers hold the hooks of their steps.
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def has_hooks(optimizer: Any) -> bool:
    """Whether its steps call code of the user's."""
    own = any(getattr(optimizer, name) for name in HOOKS)
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
    known = function.__globals__
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    codes, changes = [function.__code__], False
    held = _held(function)
    if held is None:
        return None
    found += [value for value in held.values() if not isinstance(value, np.ufunc)]  # calls of those are looked at
    while codes:
        code = codes.pop()
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        for part in code.co_consts:
            changes |= not _WRITE_INTO.isdisjoint(part if isinstance(part, tuple) else (part,))
        body = _Body(function, code, held, given_numbers=is_factor and code is function.__code__)
        for at, instruction in enumerate(body.told):
            name, what, loaded = instruction.opname, instruction.argval, body.loaded[at]
            if name in _WRITE or (name in ("STORE_DEREF", "DELETE_DEREF") and what in function.__code__.co_freevars):
                return None
            of_array = False
            if name in ("LOAD_ATTR", "LOAD_METHOD"):
                if what == "random":
                    return None
                by_module = at > 0 and isinstance(body.loaded[at - 1], types.ModuleType)
                changes |= what in _CHANGE_ARGUMENTS or (what in _CHANGE and not by_module)
                of_array = not by_module and hasattr(np.ndarray, what)
            operands = _operands(getattr(np, what, None)) if of_array else _operands(loaded)
            if operands is not None:
                call = body.called(at)
                if call is not None:
                    changes |= call.by_place > operands - of_array
                else:
                    changes |= isinstance(loaded, np.ufunc)
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                if isinstance(loaded, np.ufunc):
                    continue
                if what in known:
                    found.append(known[what])
                elif what in _COMPUTE or isinstance(getattr(builtins, what, None), type):
                    continue
                else:
                    return None
        changes |= body.changes_in_place()
    return _Used(found, changes)


def _held(function: types.FunctionType) -> dict[str, Any] | None:
    """What a function has around it, by name; None where that is not there yet."""
    cells = function.__closure__ or ()
    try:
        return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    except ValueError:
        return None


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


class _Call(NamedTuple):
    at: int
    by_place: int  # arguments
    named: int  # further ones
    made_at: list[int]  # where each of them was made, in their order


class _Body:
    """The code of a function, or of one within it, as far as it tells which of its values are *new*: numbers, and
    objects that nobody else has, so that ``+=`` may change them. Of what is not known nothing is supposed."""

    def __init__(
        self, function: types.FunctionType, code: types.CodeType, held: dict[str, Any], *, given_numbers: bool,
        within: frozenset[types.CodeType] = frozenset(),
    ) -> None:  # fmt: skip
        self.told = list(dis.get_instructions(code))
        self._constants, self._within = code.co_consts, within | {code}
        several = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
        plain = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._arguments = code.co_varnames[: len(plain) + several]
        defaults = dict(zip(reversed(plain[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
        self._numbers = {name for name in plain if given_numbers and isinstance(defaults.get(name, 0), _DATA)}
        self.loaded: list[object] = []  # by each instruction, as far as it is known
        self._stored: dict[object, list[int]] = {}
        self._jumps: dict[int, list[int]] = {}  # by where they go
        for at, one in enumerate(self.told):
            before, loaded = self.loaded[-1] if self.loaded else None, None
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded = function.__globals__.get(one.argval, getattr(builtins, one.argval, None))
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(before, types.ModuleType):
                loaded = getattr(before, one.argval, None)
            elif one.opname == "LOAD_DEREF":
                loaded = held.get(one.argval)
            self.loaded.append(loaded)
            for name in _stored(one):
                self._stored.setdefault(name, []).append(at)
            if "JUMP" in one.opname or one.opname in ("FOR_ITER", "SEND"):
                self._jumps.setdefault(one.argval, []).append(at)
        calls = [(loaded, self.called(at)) for at, loaded in enumerate(self.loaded) if callable(loaded)]
        self._calls = {call.at: (loaded, call) for loaded, call in calls if call is not None}

    def changes_in_place(self) -> bool:
        """Whether one of ``+=`` and the like may change what others have, too."""
        return not all(
            self._is_new(name)
            for at, one in enumerate(self.told)
            if one.opname == "BINARY_OP" and one.argrepr.endswith("=")
            for name in _stored(self.told[at + 1])[:1]
        )

    def returns_new(self) -> bool:
        """Whether all that it returns is new."""
        return all(self._top_is_new(at) for at, one in enumerate(self.told) if one.opname == "RETURN_VALUE")

    def _is_new(self, name: object, within: frozenset[object] = frozenset()) -> bool:
        """Whether a name of its own never has anything else."""
        if name in within:  # as far as it is made of itself
            return True
        if name in self._arguments and name not in self._numbers:
            return False
        stored = self._stored.get(name, [])
        known = bool(stored) or name in self._numbers
        return known and all(
            len(_stored(self.told[at])) == 1 and self._top_is_new(at, within | {name}) for at in stored
        )

    def _top_is_new(self, at: int, within: frozenset[object] = frozenset()) -> bool:
        """Whether what lies on top of the stack before this instruction is new, wherever it comes from."""
        if self.told[at - 1].opname not in _NEVER_GOES_ON and not self._gives_new(at - 1, within):
            return False
        return all(
            self.told[jump].opname in _JUMPS_WITH_IT and self._top_is_new(jump, within)
            for jump in self._jumps.get(self.told[at].offset, ())
        )

    def _gives_new(self, at: int, within: frozenset[object]) -> bool:
        one, loaded = self.told[at], self.loaded[at]
        if one.opname == "BINARY_SUBSCR" or one.argrepr == "[]":
            return at > 1 and _has_numbers(self.loaded[at - 2])
        if one.opname in _MAKE or (loaded is not None and isinstance(loaded, _DATA)):
            return True
        if "LOAD_FAST" in one.opname:
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            return all(self._is_new(name, within) for name in (names[1:] if "STORE" in one.opname else names))
        return at in self._calls and self._call_is_new(*self._calls[at], within)

    def _call_is_new(self, called: Any, call: _Call, within: frozenset[object]) -> bool:
        if isinstance(called, types.FunctionType) and _operands(called) is None:
            if called.__code__ in self._within:  # as far as it calls itself
                return True
            numbers, held = all(self._gives_new(made, within) for made in call.made_at), _held(called)
            plain = held is not None and not called.__code__.co_flags & _NO_PLAIN_FUNCTION
            return plain and _Body(
                called, called.__code__, held or {}, given_numbers=numbers, within=self._within
            ).returns_new()  # fmt: skip
        if any(called is one for one in _GIVE_BACK):
            if called is sum and call.by_place == 1 and not call.named:
                return True
            several = call.by_place > 1 and not call.named
            return several and all(self._gives_new(made, within) for made in call.made_at)
        of = getattr(called, "__module__", "")
        return of in ("cmath", "math") or _operands(called) is not None or _is_builtin(called)

    def called(self, at: int) -> _Call | None:
        """Where what was loaded at ``at`` is called; None where it is not, or with arguments that are not known."""
        depth = named = 0
        made_at: list[int] = []  # what lies above it on the stack
        for place in range(at + 1, len(self.told)):
            one = self.told[place]
            if "JUMP" in one.opname or one.opname == "CALL_FUNCTION_EX":
                return None
            if one.opname == "PUSH_NULL" and place == at + 1:  # a part of what is called
                continue
            if one.opname == "KW_NAMES":
                named = len(self._constants[one.arg or 0])
            if one.opname == "CALL_KW":
                named = len(self.told[place - 1].argval)
            effect = dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None)
            depth += effect
            if depth < 0:  # what is called has two places, and its result is in the first; an argument is further up
                plain = depth == -1 and one.opname in ("CALL", "CALL_KW")
                given = one.arg or 0
                return _Call(place, given - named, named, made_at[:given]) if plain else None
            if one.opname not in ("PRECALL", "KW_NAMES"):
                made_at = [*made_at[: depth - max(effect, 1)], *[place] * max(effect, 1)]
        return None


def _is_builtin(called: Any) -> bool:
    name = getattr(called, "__name__", "")
    return name in _COMPUTE and getattr(builtins, name) is called


def _has_numbers(value: object) -> bool:
    """Whether it is a list or the like, and has numbers alone."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, dict | list | tuple) and all(isinstance(part, _DATA) for part in parts)


def _stored(one: dis.Instruction) -> tuple[object, ...]:
    """Names that an instruction stores to: of two at once from Python 3.13 on."""
    if not one.opname.startswith("STORE_"):
        return ()
    if not isinstance(one.argval, tuple):
        return (one.argval,)
    return one.argval[:1] if "LOAD" in one.opname else one.argval
