"""What config classes are made of: a setting is declared once, as a field beside its owner.

The declaration says all of it: default, meaning, what it accepts. The config's range check is made of it, and, where it
names a group, the programs' flag with its help, environment variable, TOML key and line in docs/settings.md
(``w5xde_async.settings``).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn

from w5xde_async.errors import UsageError, need

#: Names of settings, with commas, of which a process's parent knows better than the file of ``--config``.
BESIDE_FILE = "WORKER_BESIDE_FILE"
USER = re.compile(r"//[^/\s]*@")  #: in a URL: a password may stand there
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_PLAIN = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE | re.ASCII)
_MOST = 2**63 - 1
_LONGEST_PATH = 4096  # bytes
_LONGEST_DAYS = 10_000  # a message holds up to 1e9 seconds
_YES, _NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class Kind(NamedTuple):
    """What a setting accepts. ``accepts`` completes "give ...", ``in_python`` does where a text is no value.

    ``read`` makes a value of a text; it raises ValueError, and gives None for a text that says "not set". ``holds``:
    whether a value is of the right type and in range.
    """

    accepts: str
    metavar: str
    read: Callable[[str], Any]
    holds: Callable[[Any], bool]
    in_python: str = ""

    def value(self, told: object) -> Any:
        """Of a text, or of what a TOML file holds. Raises ValueError."""
        value = self.read(told) if isinstance(told, str) else told
        if value is not None and not self.holds(value):
            raise ValueError(f"give {self.accepts}")
        return value

    def check(self, name: str, value: object) -> None:
        """Raises UsageError, in one line, where ``value`` of an argument or field ``name`` will not do."""
        need(self.holds(value), f"{name} is {_as_told(value)}; give {self.in_python or self.accepts}")

    def value_at(self, where: str, told: object, shown: str = "") -> Any:
        """As ``value``, of what was told at ``where`` and is ``shown`` as it stands there. Raises UsageError."""
        try:
            return self.value(told)
        except ValueError:
            told = USER.sub("//...@", shown or repr(told))
            raise UsageError(f"{where}: {told} will not do; give {self.accepts}") from None


class Setting(NamedTuple):
    """A declaration. ``group``: its heading in the help; "" where no program has a flag for it. ``flag``: the flag's
    name with underscores, where it is not the field's. ``shown`` stands for a default that is computed."""

    meaning: str
    kind: Kind
    group: str = ""
    flag: str = ""
    shown: str = ""
    positional: bool = False
    hidden: bool = False


def setting(default: Any, meaning: str, kind: Kind, group: str = "", **more: Any) -> Any:
    """A field of a config class; ``more`` goes to ``Setting``. A function as ``default`` is called for it.

    A default that ``kind`` does not hold, such as None or "", means: not set.
    """
    made: Any = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**made, metadata={"setting": Setting(meaning, kind, group, **more)})


def setting_of(field: dataclasses.Field[Any]) -> Setting | None:
    """What is declared of a field."""
    return field.metadata.get("setting")


def same_as(config: Any, name: str) -> Any:
    """A field whose setting is declared in another class."""
    declared = config.__dataclass_fields__[name]
    return dataclasses.field(default=declared.default, metadata=declared.metadata)


class Config:
    """Base of dataclasses whose fields are settings: checks their ranges, adds their meaning to the docstring."""

    def __init_subclass__(cls) -> None:
        told = {name: setting_of(one) for name, one in vars(cls).items() if isinstance(one, dataclasses.Field)}
        lines = [f"\n    {name}  {one.meaning}" for name, one in told.items() if one is not None and one.meaning]
        cls.__doc__ = (cls.__doc__ or "").rstrip() + ("\n" if lines else "") + "".join(lines)

    def __post_init__(self) -> None:
        """Raises UsageError."""
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value, declared = getattr(self, one.name), setting_of(one)
            if declared is not None and (type(value) is not type(one.default) or value != one.default):
                declared.kind.check(one.name, value)


class Answer(Exception):  # not an error: --help, --version and --print-config end here
    """The command line asked for a text, not for a run. Field: ``text``; the exit code is 0."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)


class Parser(argparse.ArgumentParser):
    """Of a command line. Raises UsageError, in one line that begins with the flag, and Answer for its own --help."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # a value, which its kind refuses: -1ms, -5MiB too

    def error(self, message: str) -> NoReturn:
        message = re.sub(r": ignored explicit argument .*", " takes no value", message, flags=re.DOTALL)
        raise UsageError(message.replace("argument -", "-"))

    def print_help(self, file: object = None) -> NoReturn:
        raise Answer(self.format_help().rstrip("\n"))

    def unknown(self, flag: str) -> UsageError:
        """What is said of a flag that is none."""
        near = difflib.get_close_matches(flag, self._option_string_actions, 1, 0.6)
        return UsageError(f"there is no {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help"))

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """``parse_args``, but a flag that is none is told before what is then missing. Raises as the class says."""
        for argument in arguments:
            flag = argument.partition("=")[0]
            is_one = flag.startswith("--") and " " not in flag  # argparse takes what has a space for a value
            if is_one and not any(known.startswith(flag) for known in self._option_string_actions):
                raise self.unknown(flag)
        return self.parse_args(arguments)


# -- kinds


def whole(least: int, most: int = _MOST) -> Kind:
    """Whole numbers in a range."""
    bounds = f">= {least}" if most == _MOST else f"from {least} to {most}"
    return Kind(f"a whole number {bounds}", "N", _whole, lambda value: _is_whole(value) and least <= value <= most)


def number(bounds: str, holds: Callable[[float], bool]) -> Kind:
    """Finite numbers; ``bounds`` in words."""
    return Kind(f"a number {bounds}", "X", _number, lambda value: _is_number(value) and holds(value))


def one_of(*names: str, metavar: str = "HOW") -> Kind:
    """One of these words."""
    few = f"{', '.join(names[:-1])} or {names[-1]}"
    accepts = few if len(names) < 4 else f"one of {', '.join(names)}"
    return Kind(accepts, metavar, str, lambda value: isinstance(value, str) and value in names)


def text(accepts: str, metavar: str, pattern: str = r"(?s).+") -> Kind:
    """Texts that are not empty and match ``pattern``."""
    return Kind(accepts, metavar, str, lambda value: _is_text(value) and bool(re.fullmatch(pattern, value)))


def path_or(kind: Kind) -> Kind:
    """A kind of text that begins with a path, or is none: its ``~`` is a home, as in a path."""
    return kind._replace(read=os.path.expanduser)


def size(accepts: str, holds: Callable[[int], bool]) -> Kind:
    """Numbers of bytes."""
    return Kind(accepts, "SIZE", size_bytes, lambda value: _is_whole(value) and holds(value))


def duration_s(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``5m``, ``1h30m``. Raises ValueError for what is not a duration."""
    text = text.strip().lower()
    if _PLAIN.fullmatch(text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("not a duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def size_bytes(text: str) -> int:
    """Bytes of ``4096``, ``512KiB``, ``1GB``: k, M, G, T count thousands, Ki, Mi, Gi, Ti 1024s. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError("not a size")
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    if math.isinf(size):
        raise ValueError("not a size")
    return int(size)


def _whole(text: str) -> int:
    return int(text.encode("ascii"))  # int(text) takes the digits of every script


def _number(text: str) -> float:
    return float(text.encode("ascii"))


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _is_text(value: object) -> bool:
    """Not so bytes of an argument that are no UTF-8: Python has surrogates in their place."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise ValueError("neither true nor false")
    return text.lower() in _YES


def _path(text: str) -> Path:
    if not text:  # "$DIR" that is not set: Path("") would be the working directory
        raise ValueError("an empty text")
    return Path(os.path.expanduser(text))  # in --flag=~/file, variables and TOML no shell has done it


def _folder(text: str) -> Path:
    path = _path(text)
    try:
        there = next(known for known in (path, *path.parents, Path()) if known.exists())
    except OSError as error:  # a name that is too long, a directory above it that is closed to us
        raise ValueError("cannot be looked for") from error
    if not there.is_dir():
        raise ValueError("not a directory")
    return path


def _is_path(value: object) -> bool:
    try:
        written = os.fsencode(value) if isinstance(value, str | PurePath) else b""
        return 0 < len(written) < _LONGEST_PATH and min(written) >= 0x20
    except UnicodeError:
        return False


def _is_time(value: object) -> bool:
    return _is_number(value) and 0 <= value <= _LONGEST_DAYS * _SECONDS["d"]  # type: ignore[operator]


_TELLS = reprlib.Repr()
_TELLS.maxstring = _TELLS.maxother = 200


def _as_told(value: object) -> str:
    """In one line, a long one cut in the middle."""
    return USER.sub("//...@", " ".join(_TELLS.repr(value).split()))


YES_OR_NO = Kind("true or false", "", _yes_or_no, lambda value: isinstance(value, bool))
TIME = Kind(
    f"a time above 0, like 90, 90s, 5m or 2h, at most {_LONGEST_DAYS}d", "TIME", duration_s,
    lambda value: _is_time(value) and value > 0, f"seconds > 0, at most {_LONGEST_DAYS * 86400}",
)  # fmt: skip
TIME_OR_0 = Kind(
    f"a time like 0, 10s or 5m, at most {_LONGEST_DAYS}d", "TIME", duration_s, _is_time,
    f"seconds >= 0, at most {_LONGEST_DAYS * 86400}",
)  # fmt: skip
PATH = Kind("a path", "FILE", _path, _is_path)
THREADS = whole(1, 4096)  #: one process may have
MOST_NAMED = 100  #: characters of a name
NAME = text(
    f"a text of 1 to {MOST_NAMED} characters without '/', not blank",
    "NAME",
    rf"(?!\.{{1,2}}$)(?=.*\S)[^/\x00-\x1f]{{1,{MOST_NAMED}}}",
)
FOLDER = Kind("a directory, which need not exist yet", "DIR", _folder, _is_path)
