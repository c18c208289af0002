"""From the declared settings of a program to a command line: parser, help, and messages that a person can act on.

A program's settings are the fields of its own class and of the configs that it makes (``parts``), wherever these are
nested (``w5xde_async.config``). Flags, environment variables, TOML keys, the help, docs/settings.md and the configs are
all made of those declarations.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import w5xde_async
from w5xde_async.config import (
    BESIDE_FILE,
    FOLDER,
    PATH,
    TIME,
    USER,
    YES_OR_NO,
    Answer,
    Config,
    Parser,
    Setting,
    one_of,
    setting,
    setting_of,
    whole,
)
from w5xde_async.errors import UsageError
from w5xde_async.store.toml import to_toml, toml_value

_PREFIX = "W5XDE_"
_TABLES = ("coordinator", "worker")
_NOT_IN_TOML = ("config", "join")
_MOST_BYTES = 1 << 20  # of a TOML file
_NO_TOKEN_FLAG = (
    "there is no --token: whoever is on this machine could read it from the list of processes; set W5XDE_TOKEN, or "
    "write it to a file of mode 0600 and give --token-file"
)
_T = TypeVar("_T")
_P = TypeVar("_P", bound="Program")


@dataclass(frozen=True, kw_only=True)
class Program(Config):
    """Base of both programs' settings: what both have. Further settings are those of the configs in ``parts``.

    ``table``: the program's in the TOML file. ``first``: settings that come first, which also puts their groups in
    order; the rest follows as declared. ``defaults`` and ``changed`` say what is otherwise in this program: its
    default, or something else of its ``Setting``. ``alternatives``: settings that say the same in several ways; where
    one of them was given, those of a source that it wins over are passed over.
    """

    table: ClassVar[str]
    usage: ClassVar[str]
    about: ClassVar[str]
    ending: ClassVar[str]
    everyday: ClassVar[str] = ""  # what --help shows, where that is not all
    parts: ClassVar[tuple[type, ...]]
    first: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]] = {}
    changed: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    alternatives: ClassVar[tuple[str, ...]] = ()

    values: Mapping[str, Any] = dataclasses.field(repr=False)  #: of all settings, by flag; None: not set
    told: frozenset[str]  #: the flags of those that were given anywhere
    environment: Mapping[str, str] = dataclasses.field(repr=False)  #: variables that were heeded, none with a secret
    token_file: Path | None = setting(None, "file with the shared secret, readable by its owner alone", PATH, "network")
    loop: str = setting(
        "auto", "event loop: auto, uvloop or asyncio", one_of("auto", "uvloop", "asyncio", metavar="KIND"), "program"
    )
    exit_on_drain: int = setting(
        0, "exit code after SIGTERM before the run's end; 75 has a job engine start it again", whole(0, 255), "program"
    )
    profile_memory: Path | None = setting(
        None, "note what allocates memory; SIGUSR2 and the end write a report there (it costs time and memory)",
        FOLDER, "program",
    )  # fmt: skip
    exit_with_stdin: bool = setting(
        False, "end when standard input does: whoever holds its other end is gone", YES_OR_NO, "program", hidden=True
    )
    config: Path | None = setting(None, "TOML file with the tables [coordinator] and [worker]", PATH, "program")

    @classmethod
    def derived(cls, values: Mapping[str, Any]) -> Mapping[str, object]:
        """Values of settings that were not given and follow from others."""
        return {}

    def require(self) -> None:
        """What a run cannot do without. Raises UsageError."""

    def make(self, part: type[_T], **more: Any) -> _T:
        """A config of these settings and ``more``. Raises UsageError for what does not go together."""
        return _make(part, self.values, more)


def _make(part: type[_T], values: Mapping[str, Any], more: Mapping[str, Any]) -> _T:
    given = dict(more)
    for one in dataclasses.fields(part):  # type: ignore[arg-type]
        told, nested = setting_of(one), _nested(one)
        if one.name in given:
            continue
        if nested is not None:
            given[one.name] = _make(nested, values, {})
        elif told is not None and told.group and values[told.flag or one.name] is not None:
            given[one.name] = values[told.flag or one.name]
    return part(**given)


def _nested(field: dataclasses.Field[Any]) -> Any:
    """The config that a field holds, or None."""
    kind: Any = field.default_factory
    return kind if dataclasses.is_dataclass(kind) else None


class Declared(NamedTuple):
    """A setting as one program has it. ``name``: its flag with underscores; ``default`` None: it is not set.

    ``computed``: the default depends on the machine.
    """

    name: str
    default: object
    setting: Setting
    computed: bool

    @property
    def option(self) -> str:
        return self.setting.kind.metavar if self.setting.positional else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()

    @property
    def in_toml(self) -> bool:
        return self.name not in _NOT_IN_TOML

    @property
    def usage(self) -> str:
        """The flag with what follows it."""
        if self.setting.kind is YES_OR_NO:
            return f"{self.option}, --no-{self.option[2:]}" if self.default else self.option
        return self.option if self.setting.positional else f"{self.option} {self.setting.kind.metavar}"

    @property
    def shown(self) -> str:
        """The default in words."""
        if self.setting.shown or self.default is None:
            return self.setting.shown or "none"
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default:g}s" if self.setting.kind.metavar == TIME.metavar else str(self.default)

    def value(self, sources: Sequence[tuple[Callable[[Declared], str], Mapping[str, object]]]) -> object:
        """Of the first source that has it; each comes with what names the place there. Raises UsageError."""
        for place, source in sources:
            if self.name in source:
                told = source[self.name]
                shown = repr(told) if isinstance(told, str) else toml_value(told)
                return self.setting.kind.value_at(place(self), told, shown)
        return self.default


def declared(program: type[Program]) -> dict[str, Declared]:
    """All settings of a program by name, group by group in the order of the help."""
    found = [one for part in (program, *program.parts) for one in _declared(part)]
    for index, one in enumerate(found):
        told = one.setting._replace(**program.changed.get(one.name, {}))
        found[index] = one._replace(default=program.defaults.get(one.name, one.default), setting=told)
    first = program.first.split()
    found.sort(key=lambda one: first.index(one.name) if one.name in first else len(first))
    groups = list(dict.fromkeys(one.setting.group for one in found))
    return {one.name: one for one in sorted(found, key=lambda one: groups.index(one.setting.group))}


def _declared(part: Any) -> Iterator[Declared]:
    for one in dataclasses.fields(part):
        told, nested = setting_of(one), _nested(one)
        if nested is not None:
            yield from _declared(nested)
        elif told is not None and told.group:
            made = one.default_factory
            computed = callable(made)
            default = made() if callable(made) else one.default
            yield Declared(told.flag or one.name, default if told.kind.holds(default) else None, told, computed)


def flag_names(program: type[Program]) -> tuple[str, ...]:
    """All flags, in the order of the help."""
    parser = _parser(program, "")
    return tuple(option for action in parser._actions for option in action.option_strings if option.startswith("--"))


def read(
    program: type[_P], arguments: Sequence[str], *, prog: str, environment: Mapping[str, str] = os.environ
) -> tuple[_P, frozenset[str]]:
    """The settings, and the names of those that were given as arguments.

    Raises UsageError, and Answer for --help, --version and --print-config.
    """
    given = _parse(program, arguments, prog)
    printing = given.pop("print_config", False)
    known = declared(program)
    said = {name: environment[one.variable] for name, one in known.items() if environment.get(one.variable)}
    path = given.get("config") or said.get("config")
    table = _table(program, PATH.read(path)) if path else {}
    others = program.alternatives
    said = {name: value for name, value in said.items() if name not in others or given.keys().isdisjoint(others)}
    above, beside = given.keys() | said.keys(), environment.get(BESIDE_FILE, "").split(",")
    table = {name: value for name, value in table.items() if name not in others or above.isdisjoint(others)}
    table = {name: value for name, value in table.items() if name not in beside}
    sources = (
        (lambda one: one.option, given), (lambda one: one.variable, said),
        (lambda one: f"{path}: [{program.table}] {one.name}", table),
    )  # fmt: skip
    values = {name: one.value(sources) for name, one in known.items()}
    derived = program.derived(values)
    values |= {name: value for name, value in derived.items() if values[name] is None}
    told = frozenset(given) | frozenset(said) | frozenset(table)
    heeded = {
        known[name].variable: value
        for name, value in said.items()
        if name not in given and name != "join" and not USER.search(value)
    }
    settings = _make(program, values, {"values": values, "told": told, "environment": heeded})
    if printing:
        raise Answer(to_toml(to_mapping(settings)).rstrip("\n"))
    settings.require()
    return settings, frozenset(given)


def to_mapping(settings: Program) -> dict[str, object]:
    """The settings as a TOML file takes them: what was given or has a plain default.

    None stands for what is not set and what follows from others or the machine: read again, it follows from what holds
    then.
    """
    values = {
        name: settings.values[name] if name in settings.told or not (one.default is None or one.computed) else None
        for name, one in declared(type(settings)).items()
        if one.in_toml and not one.setting.hidden
    }
    return {settings.table: {name: ",".join(v) if isinstance(v, tuple) else v for name, v in values.items()}}


# -- arguments


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=80)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text


def _parser(program: type[Program], prog: str, *, everyday: bool = False) -> Parser:
    """``everyday``: with a help of those settings alone that most runs need."""
    few = program.everyday.split() if everyday else []
    parser = Parser(
        prog=prog, usage=f"{prog} {program.usage}", description=program.about, epilog=program.ending, add_help=False,
        allow_abbrev=False, formatter_class=_Formatter, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    groups: dict[str, Any] = {}
    for name, one in declared(program).items():
        told = one.setting
        if told.group not in groups:
            groups[told.group] = parser.add_argument_group(told.group)
        group = groups[told.group]
        meaning = f"{told.meaning} [{one.shown}; {one.variable}]".replace("%", "%%")
        text = argparse.SUPPRESS if told.hidden or (few and name not in few) else meaning
        if told.positional:
            group.add_argument(name, metavar=one.option, nargs="?", help=text)
        elif told.kind is YES_OR_NO:
            kind: Any = argparse.BooleanOptionalAction if one.default else "store_true"
            group.add_argument(one.option, dest=name, action=kind, help=text)
        else:
            group.add_argument(one.option, dest=name, metavar=told.kind.metavar, help=text)
    last = next(reversed(groups.values()))
    last.add_argument("--print-config", action="store_true", help="print the resolved settings as TOML and exit")
    last.add_argument("--version", action="store_true", help="print the version and exit")
    last.add_argument("--help", "-h", action="store_true", help="this text")
    if program.everyday:
        last.add_argument("--help-all", action="store_true", help="the same with every flag")
    return parser


def _parse(program: type[Program], arguments: Sequence[str], prog: str) -> dict[str, Any]:
    parser = _parser(program, prog)
    known = parser._option_string_actions
    plain = list(arguments)
    for index, argument in enumerate(plain):
        if argument == "--":
            break
        flag, equals, value = argument.partition("=")
        if (dashed := flag.replace("_", "-")) in known:
            plain[index] = dashed + equals + value
    given, rest = parser.parse_known_args(plain)
    values = vars(given)
    if rest and rest[0].startswith("-"):
        flag = rest[0].partition("=")[0].replace("_", "-")
        if flag == "--token":
            raise UsageError(_NO_TOKEN_FLAG)
        raise parser.unknown(flag)
    if values.pop("help", False):
        raise Answer(_parser(program, prog, everyday=True).format_help().rstrip("\n"))
    if values.pop("help_all", False):
        raise Answer(parser.format_help().rstrip("\n"))
    if values.pop("version", False):
        raise Answer(f"w5xde-async {w5xde_async.__version__}")
    if rest:
        raise UsageError(f"{rest[0]!r} is one argument too many; see --help")
    return values


# -- TOML


def _table(program: type[Program], path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:  # it may be a pipe; and a device, which does not end
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"--config {path} is larger than {_MOST_BYTES >> 20} MiB; give a file of settings")
        document = tomllib.loads(content.decode("utf-8-sig"))  # Notepad begins a file with a mark
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    for name in document:
        if name not in _TABLES:
            raise UsageError(f"{path}: {name!r} stands outside of the tables [{'], ['.join(_TABLES)}]")
    table = document.get(program.table, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {program.table} is not a table; write [{program.table}] and the settings below it")
    names = [name for name, one in declared(program).items() if one.in_toml and not one.setting.hidden]
    values: dict[str, Any] = {}
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
        if name in values:
            raise UsageError(f"{path}: [{program.table}] has {name} twice, with a dash too; leave one out")
        values[name] = value
    return values
