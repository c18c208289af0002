"""From a settings class to a command line: the parser, its help, and messages that a person can act on.

A program's settings are one pydantic-settings class; its fields are the flags. What this module adds to
pydantic-settings: help with default and environment name of each flag, the TOML table, near names for typos, and
errors of one line that name where the value came from.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

import w5xde_async
from w5xde_async.errors import StoreError, UsageError
from w5xde_async.store.toml import to_toml

__all__ = ["Answer", "Described", "Program", "described", "flag_names", "programs", "read", "setting", "to_mapping"]

_PREFIX = "W5XDE_"
_NO_TOKEN_FLAG = (
    "there is no --token: whoever is on this machine could read it from the list of processes; set W5XDE_TOKEN, or "
    "write it to a file of mode 0600 and give --token-file"
)


class Answer(Exception):  # not an error: --help, --version and --print-config end here
    """The command line asked for a text, not for a run. Field: ``text``; the exit code is 0."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)


class Program(BaseSettings):
    """Base of both programs' settings. ``table`` is their table in the TOML file."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")
    table: ClassVar[str]
    usage: ClassVar[str]
    about: ClassVar[str]
    ending: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = init_settings().get("config") or env_settings().get("config")
        table = _table(cls, Path(path)) if path else {}
        return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    def defaults(self) -> Mapping[str, object]:
        """Values of fields that were not given and follow from others."""
        return {}

    def check(self) -> None:
        """What no single field can say. Raises UsageError."""

    def require(self) -> None:
        """What a run cannot do without. Raises UsageError."""


_P = TypeVar("_P", bound=Program)


def setting(
    default: Any,
    meaning: str,
    *,
    group: str,
    accepts: str,
    metavar: str = "",
    shown: str = "",
    hidden: bool = False,
    positional: bool = False,
) -> Any:
    """A field of a program. ``accepts`` completes "give ..."; ``shown`` stands for a default that is computed."""
    extra: Any = {
        "group": group, "accepts": accepts, "metavar": metavar, "shown": shown, "hidden": hidden,
        "positional": positional,
    }  # fmt: skip
    return Field(default, description=meaning, json_schema_extra=extra)


def programs() -> list[type[Program]]:
    """The programs whose settings have been imported: those that name their table, by its name."""
    found: list[type[Program]] = []
    waiting = list(Program.__subclasses__())
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        found += [kind] if "table" in vars(kind) else []
    return sorted(found, key=lambda kind: kind.table)


class Described(NamedTuple):
    """One setting in words, for the table of docs/settings.md. ``key`` is "" where the TOML file cannot give it."""

    group: str
    flag: str
    variable: str
    key: str
    default: str
    accepts: str
    meaning: str


def described(program: type[Program]) -> list[Described]:
    """Every setting that the help shows, group by group in the order of the help."""
    groups: dict[str, list[Described]] = {}
    for name, info in program.model_fields.items():
        extra = _extra(info)
        if extra["hidden"]:
            continue
        option = "--" + name.replace("_", "-")
        if extra["positional"]:
            option = extra["metavar"]
        elif info.annotation is bool:
            option = f"{option}, --no-{option[2:]}" if info.default else option
        else:
            option = f"{option} {extra['metavar'] or 'N'}"
        key = "" if name in ("config", "join") else name
        text = info.description or ""
        row = Described(
            extra["group"], option, _PREFIX + name.upper(), key, _default(info, extra), extra["accepts"], text
        )
        groups.setdefault(row.group, []).append(row)
    return [row for rows in groups.values() for row in rows]


def flag_names(program: type[Program]) -> tuple[str, ...]:
    """All flags, in the order of the help."""
    parser = _parser(program, "")
    return tuple(option for action in parser._actions for option in action.option_strings if option.startswith("--"))


def read(program: type[_P], arguments: Sequence[str], *, prog: str) -> tuple[_P, frozenset[str]]:
    """The settings, and the names of the fields that were given as arguments.

    Raises UsageError, and Answer for --help, --version and --print-config.
    """
    given = _parse(program, arguments, prog)
    printing = given.pop("print_config", False)
    try:
        first = program(**given)
        # The class is built a second time so that what follows from other fields is validated like the rest.
        derived = {name: value for name, value in first.defaults().items() if getattr(first, name) is None}
        settings = program(**given, **derived) if derived else first
    except ValidationError as error:
        raise UsageError(_explain(program, error, given)) from None
    settings.check()
    if printing:
        raise Answer(to_toml(to_mapping(settings)).rstrip("\n"))
    settings.require()
    return settings, frozenset(given)


def to_mapping(settings: Program) -> dict[str, object]:
    """The resolved settings as a TOML file takes them; None where something is not set."""
    values = {
        name: getattr(settings, name)
        for name, info in type(settings).model_fields.items()
        if name not in ("config", "join") and not _extra(info)["hidden"]
    }
    return {settings.table: values}


# -- arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.replace("argument ", "", 1))


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=80)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def _extra(info: Any) -> dict[str, Any]:
    return info.json_schema_extra  # type: ignore[no-any-return]


def _parser(program: type[Program], prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog, usage=f"{prog} {program.usage}", description=program.about, epilog=program.ending, add_help=False,
        allow_abbrev=False, formatter_class=_Formatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    groups: dict[str, Any] = {}
    for name, info in program.model_fields.items():
        extra = _extra(info)
        if extra["group"] not in groups:
            groups[extra["group"]] = parser.add_argument_group(extra["group"])
        group, text = groups[extra["group"]], argparse.SUPPRESS if extra["hidden"] else _help(name, info, extra)
        option = "--" + name.replace("_", "-")
        if extra["positional"]:
            group.add_argument(name, metavar=extra["metavar"], nargs="?", help=text)
        elif info.annotation is bool:
            kind: Any = "store_true" if info.default is False else argparse.BooleanOptionalAction
            group.add_argument(option, dest=name, action=kind, help=text)
        else:
            group.add_argument(option, dest=name, metavar=extra["metavar"] or "N", help=text)
    last = next(reversed(groups.values()))
    last.add_argument("--print-config", action="store_true", help="print the resolved settings as TOML and exit")
    last.add_argument("--version", action="store_true", help="print the version and exit")
    last.add_argument("--help", "-h", action="store_true", help="this text")
    return parser


def _help(name: str, info: Any, extra: dict[str, Any]) -> str:
    text = f"{info.description} [{_default(info, extra)}; {_PREFIX}{name.upper()}]"
    return text.replace("%", "%%")


def _default(info: Any, extra: dict[str, Any]) -> str:
    default = extra["shown"] or info.default
    if default is None or default == "":
        return "none"
    if default is True or default is False:
        return "yes" if default else "no"
    return str(default)


def _parse(program: type[Program], arguments: Sequence[str], prog: str) -> dict[str, Any]:
    parser = _parser(program, prog)
    known = [option for action in parser._actions for option in action.option_strings]
    plain: list[str] = []
    values_left = False  # the token before wants a value
    for index, argument in enumerate(arguments):
        if argument == "--":
            plain += arguments[index:]
            break
        flag, equals, value = argument.partition("=")
        if values_left and flag not in known:
            values_left = False
        elif argument.startswith("-") and len(argument) > 1:
            flag = "--" + flag[2:].replace("_", "-") if flag.startswith("--") else flag
            if flag == "--token":
                raise UsageError(_NO_TOKEN_FLAG)
            if flag not in known:
                near = difflib.get_close_matches(flag, known, 1, 0.6)
                raise UsageError(f"there is no {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
            argument = flag + equals + value
            values_left = not equals and any(
                flag in action.option_strings and action.nargs is None for action in parser._actions
            )
        plain.append(argument)
    given, rest = parser.parse_known_args(plain)
    values = vars(given)
    if values.pop("help", False):
        raise Answer(parser.format_help().rstrip("\n"))
    if values.pop("version", False):
        raise Answer(f"w5xde-async {w5xde_async.__version__}")
    if rest:
        raise UsageError(f"{rest[0]!r} is one argument too many; see --help")
    return values


# -- TOML and messages


def _table(program: type[Program], path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    tables = [kind.table for kind in programs()]
    for name in document:
        if name not in tables:
            raise UsageError(f"{path}: {name!r} stands outside of the tables [{'], ['.join(tables)}]")
    table = document.get(program.table, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {program.table} is not a table; write [{program.table}] and the settings below it")
    values: dict[str, Any] = {}
    names = [name for name, info in program.model_fields.items() if name != "config" and not _extra(info)["hidden"]]
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in ("token", "join"):
            raise UsageError(
                f"{path}: a secret does not belong into this file; write token_file = PATH, or W5XDE_TOKEN"
            )
        if name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else "--print-config shows all"
            raise UsageError(f"{path}: [{program.table}] has no {key}; {hint}")
        values[name] = value
    return values


def _explain(program: type[Program], error: ValidationError, given: Mapping[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    value = first["input"]
    accepts = _extra(program.model_fields[name])["accepts"]
    variable = _PREFIX + name.upper()
    if name in given:
        where = program.model_fields[name]
        place = _extra(where)["metavar"] if _extra(where)["positional"] else "--" + name.replace("_", "-")
    elif os.environ.get(variable):
        place = variable
    else:
        place = f"[{program.table}] {name} of the TOML file"
    shown = value if isinstance(value, str) else _plain(value)
    return f"{place}: {shown!r} will not do; give {accepts}"


def _plain(value: object) -> object:
    try:
        to_toml({"value": value})
    except StoreError:
        return type(value).__name__
    return value
