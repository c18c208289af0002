"""Named places at which a test lets the process die or the disk fail, to see what the next start makes of it.

``arm("journal.append.after=kill@3;term.store.before=error")``: the third time that the first place is passed the
process kills itself as ``kill -9`` would; the first time at the second, the disk fails. ``@3-5`` is the third to the
fifth time, ``@3-`` every time from the third on. Unarmed, a place costs one look at an empty dict.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping

from w5xde_async.errors import UsageError

#: Every place, in the order of one start and one step; at last those where memory is shared, at both sides.
FAILPOINTS: Mapping[str, str] = {
    "replay.after": "the journal's steps are applied again; nothing of this start is stored yet",
    "segment.create.before": "a new segment of the journal is about to be made",
    "segment.create.half": "its header lies under a temporary name",
    "segment.create.after": "it has its name, durably; nobody has appended to it",
    "term.store.before": "the new term is not stored",
    "term.store.after": "the new term is stored, nobody has heard of it",
    "apply.before": "a step's sum is complete and copied for the journal",
    "apply.after": "the update is applied, nobody has heard of it",
    "publish.before": "the new version counts here",
    "publish.after": "workers are sent the new version and the verdicts",
    "journal.append.before": "a record is about to be written",
    "journal.append.half": "half of it is written",
    "journal.append.after": "it is written, not synced",
    "journal.sync.before": "a batch of records is written, not synced",
    "journal.sync.after": "it is durable, nobody has heard of it",
    "commit.after": "a durable step has been told to whoever follows the run",
    "metrics.append.before": "lines of metrics.jsonl wait to be written",
    "metrics.append.half": "half of them are written",
    "metrics.append.after": "they are written",
    "checkpoint.files.before": "the record is copied, its temporary directory made",
    "checkpoint.manifest.before": "the tensors' files are written and synced",
    "checkpoint.manifest.after": "the manifest is written and synced, its directory's names are not",
    "checkpoint.rename.before": "the temporary directory is whole and durable",
    "checkpoint.rename.after": "the record has its name, not durably",
    "checkpoint.sync_directory.after": "the record is durable",
    "checkpoint.prune.before": "old records are about to go",
    "checkpoint.prune.half": "they have temporary names",
    "checkpoint.prune.after": "they are gone",
    "journal.prune.before": "old segments are about to go",
    "journal.prune.after": "they are gone",
    "shared.offer.after": "a worker has made the memory for its results, and nobody has heard of it",
    "shared.open.after": "the coordinator has a worker's memory, and the worker has not heard of it",
    "shared.result.before": "a result lies in shared memory, and nobody has heard of it",
    "shared.result.after": "its RESULT has left the worker",
    "shared.answer.after": "all of a lease has left the worker, which has had no verdict",
    "shared.lay.before": "the coordinator has read the RESULT, and its slot is empty",
    "shared.lay.after": "its slot is filled from where the result lies",
}
ACTIONS = ("kill", "exit", "error", "enospc")

_RULE = re.compile(r"(?P<name>[\w.]+)=(?P<action>\w+)(?:@(?P<first>\d+)(?P<range>-)?(?P<last>\d+)?)?")
_armed: dict[str, tuple[str, int, float]] = {}  # name -> action, first and last passing
_passed: dict[str, int] = {}
_lock = threading.Lock()


def arm(text: str) -> None:
    """Arm the places that ``text`` lists, in place of those before. Raises UsageError where it cannot be read."""
    disarm()
    for part in filter(None, (part.strip() for part in text.split(";"))):
        rule = _RULE.fullmatch(part)
        if rule is None or rule["name"] not in FAILPOINTS or rule["action"] not in ACTIONS:
            raise UsageError(f"failpoint {part!r}: give NAME=ACTION@N, an action of {', '.join(ACTIONS)}")
        first = int(rule["first"] or 1)
        last = float(rule["last"] or "inf") if rule["range"] else first
        _armed[rule["name"]] = rule["action"], first, last


def disarm() -> None:
    """Let every place pass again."""
    _armed.clear()
    _passed.clear()


def failpoint(name: str, before: Callable[[], object] | None = None) -> None:
    """Pass the place ``name``; ``before`` runs first where it is armed. Raises OSError where it is told to."""
    if _armed and name in _armed:
        _fire(name, before)


def _fire(name: str, before: Callable[[], object] | None) -> None:
    with _lock:
        _passed[name] = count = _passed.get(name, 0) + 1
        action, first, last = _armed[name]
    if not first <= count <= last:
        return
    if before is not None:
        before()
    os.write(2, f"failpoint {name}: {action}\n".encode())
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(1)
    else:
        code = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (failpoint {name})")
