"""Messages of this package in the words of a facade, whose users know its arguments and no flags.

Errors and warnings of the rooms below name the setting to change as the command line has it (``--run-dir``), or a field
of a config (``prefetch_leaves is 0``). A facade says under which name it has that setting; one that it does not have is
named with the class that does.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from w5xde_async.config import setting_of
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run_result import RunResult
from w5xde_async.errors import W5xdeError
from w5xde_async.telemetry.events import CheckpointFailed, Event, JournalFailed, RunFinished, Warned
from w5xde_async.updates.config import UpdateConfig
from w5xde_async.worker.config import WorkerConfig

_VALUES = r"never|auto|off|on|sync|raw|lz4|checkpoint|asyncio|uvloop|[0-9][0-9.]*[a-z]*"
_FLAG = re.compile(rf"(?<![\w-])--([a-z][a-z0-9-]*)(?:[ =]({_VALUES})(?![\w-]))?")
_FIELD = re.compile(r"^([a-z_]+) is ")
_FIELD_OF_JOB = re.compile(r"(?<=: )([a-z_]+) is ")
_TWICE = re.compile(r"\b(\w+) or \1\b")  # two settings that are one argument
#: Phrases that say too little, or too much, to somebody who has written no job file and no command.
_PHRASES = (
    ("the run that was here lies in", 'trains anew (resume="auto" goes on instead): the run that was here lies in'),
    ("give --job to run your own code, or --sandbox off", "give --sandbox off"),
    ("workers need --job: ", "workers without the model's code cannot compute it: "),
    ("workers need no --job", "workers need no code"),
    ("workers with --job compute", "workers with the model's code compute"),
    ("start the worker with the coordinator's --job", "use a worker that has the model's code"),
    ("(--join-file)", "(join_file=, W5XDE_JOIN_FILE)"),
    ("(--token-file, W5XDE_TOKEN)", "(token=, W5XDE_TOKEN)"),
    ("W5XDE_TOKEN or --token-file", "token= or W5XDE_TOKEN"),
    ("(W5XDE_TOKEN, --token-file)", "(token=, W5XDE_TOKEN)"),
    (" or its authority (--tls-ca-file); --insecure goes without encryption, for a network that you trust", ""),
    ("use its join file", "give its join file (join_file=, W5XDE_JOIN_FILE)"),
    (", or leave out --insecure", ""),
    (" or --insecure, --tls-ca-file, --tls-cert", ""),
)  # fmt: skip
#: What this package advises within a traceback, of which nothing else is put in other words: it is the caller's.
ADVICE = "leave none alone (batch_size, microbatch_size, drop_last)"
_ELSEWHERE = {
    "token-file": "W5XDE_TOKEN_FILE", "job": "the model's code", "loop": "the event loop",
    "tls-cert": "a TLS certificate", "tls-key": "its key", "tls-ca-file": "a TLS authority",
}  # fmt: skip


def _of_the_core() -> Mapping[str, str]:
    """Flags, as ``field of class``."""
    named: dict[str, str] = {}
    for kind in (WorkerConfig, UpdateConfig, CoordinatorConfig):
        for field in dataclasses.fields(kind):
            declared = setting_of(field)
            flag = (declared.flag if declared else "") or field.name
            named[flag.replace("_", "-")] = f"{field.name} of w5xde_async.{kind.__name__}"
    return named | _ELSEWHERE


_CORE = _of_the_core()


class Words:
    """``words(text)`` is the text in a facade's words.

    ``flags``: from a flag without its dashes, ``fields``: from a config's or job's field, each to the argument's name;
    from a flag with a value to all that is written instead.
    """

    def __init__(
        self,
        flags: Mapping[str, str],
        fields: Mapping[str, str] | None = None,
        phrases: Mapping[str, str] | None = None,
    ) -> None:
        """``phrases`` go before those that are alike in all facades."""
        self._flags, self._fields, self._phrases = flags, fields or {}, (*(phrases or {}).items(), *_PHRASES)

    def __call__(self, text: str) -> str:
        for theirs, ours in self._phrases:
            text = text.replace(theirs, ours)
        text = _TWICE.sub(r"\1", _FLAG.sub(self._argument, text))
        text = _FIELD.sub(self._field, text, count=1)
        return _FIELD_OF_JOB.sub(self._field, text) if text.startswith("job ") else text

    def _argument(self, found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if (written := self._flags.get(f"{name} {value}")) is not None:
            return written
        argument = self._flags.get(name)
        if argument is None:
            argument = _CORE.get(name, name.replace("-", "_"))
            return argument if value is None else f"{argument} ({value})"
        if value is None:
            return argument
        is_number = value[0].isdigit() and value.count(".") < 2
        return f"{argument}={value}" if is_number else f'{argument}="{value}"'

    def _field(self, found: re.Match[str]) -> str:
        return f"{self._fields.get(found[1], found[1])} is "

    @contextmanager
    def said(self) -> Iterator[None]:
        """What this package raises within is raised in these words, but for what an error shows of a traceback."""
        try:
            yield
        except W5xdeError as error:
            put = self._of_traceback if hasattr(error, "traceback") else self
            error.args = tuple(put(value) if isinstance(value, str) else value for value in error.args)
            for name in ("reason", "hint", "traceback"):
                if isinstance(told := getattr(error, name, None), str):
                    setattr(error, name, put(told))
            raise

    def _of_traceback(self, text: str) -> str:
        return text.replace(ADVICE, dict(self._phrases).get(ADVICE, ADVICE))

    def of_event(self, event: Event) -> Event:
        """An event with its text in these words."""
        match event:
            case Warned():
                return replace(event, text=self(event.text))
            case CheckpointFailed() | JournalFailed():
                return replace(event, reason=self(event.reason))
            case RunFinished():
                put = self._of_traceback if event.outcome == "failed" else self
                return replace(event, reason=put(event.reason))
            case _:
                return event

    def of_result(self, result: RunResult) -> RunResult:
        """How a run ended, in these words."""
        return replace(result, reason=self(result.reason))

    def formatter(self) -> logging.Formatter:
        """Of log records."""
        return _Formatter(self)


class _Formatter(logging.Formatter):
    def __init__(self, words: Callable[[str], str]) -> None:
        super().__init__()
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        return self._words(super().format(record))
