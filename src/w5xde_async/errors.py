"""One tree of exceptions.

The type says what the caller does next::

    W5xdeError
        LocalError              our own bug or our own machine: stop and report
            ProtocolViolation   we were about to break the protocol ourselves
            DeviceLost          the device is of no use to this process any more: start another, exit code 7
            ReaderDied          a process that reads the dataset died over the same samples again and again
            ReadersLost         no process can be had that reads the dataset
            IslandBroken        a leaf failed on some ranks of an island: start all of them again, exit code 8
        UsageError              the person must change something: one line, exit code 2
            JobError            the job cannot be loaded or cannot work; says what and where
            PortInUse           exit code 6
        RemoteError             the peer broke the protocol: drop the peer, keep serving
            FrameTooLarge       a size over its cap, found before anything was allocated
            MalformedFrame      bytes that are not a frame of this protocol
            UnexpectedMessage   a valid message in a state that does not allow it
            ProgramRefused      a program that this worker does not run
                ProgramKilled   it ended the process that it ran in
        LinkLost                the connection is gone: reconnect or forget the peer
            Unreachable         nothing answered within the deadline: exit code 3
        Refused                 the peer said no, with a code, a reason and a hint
        LeafFailed              the user's code failed repeatedly on one leaf: stop the run
        UpdateFailed            the job's optimizer or scheduler raised: stop the run
        StoreError              disk: nothing was lost, say what and where
            CheckpointCorrupt   a record that does not match its own digests
            CheckpointMismatch  a whole record of another model or job
            RunDirBusy          another coordinator holds the run directory
            DiskHangs           the end of a run waited too long for it: end the process, threads of it may hang
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from enum import IntEnum

_TRACEBACK = "Traceback (most recent call last):"
_HEADLINE = 500  # characters of what was raised
_TRACEBACK_CHARACTERS = 8000  #: of one traceback that is kept
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)')
_LIBRARY = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<", re.IGNORECASE)
_CUT = "  ... ({:,} characters left out)"
_SAMPLES_NAMED = 8
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ExitCode(IntEnum):
    """Exit codes of both programs."""

    OK = 0
    ERROR = 1
    USAGE = 2
    UNREACHABLE = 3
    AUTHENTICATION = 4
    MISMATCH = 5
    PORT_IN_USE = 6
    DEVICE_LOST = 7
    ISLAND_LOST = 8
    DRAINED = 75  # EX_TEMPFAIL of sysexits.h: what starts workers for a living starts another
    INTERRUPTED_TWICE = 130


class RefusalCode(IntEnum):
    """Why a peer was refused; on the wire in REFUSED and BYE. Never renumbered."""

    PROTOCOL_VERSION = 1
    AUTHENTICATION = 2
    MODEL_MISMATCH = 3
    RUN_FULL = 4
    PROTOCOL_ERROR = 5
    TERM = 6
    SHUTTING_DOWN = 7
    NO_PROGRAM = 8
    QUARANTINED = 9
    RUN_FINISHED = 10
    RUN_FAILED = 11
    ISLAND = 12
    NUMERICS = 13


_REFUSAL_EXIT = {
    RefusalCode.PROTOCOL_VERSION: ExitCode.MISMATCH,
    RefusalCode.AUTHENTICATION: ExitCode.AUTHENTICATION,
    RefusalCode.MODEL_MISMATCH: ExitCode.MISMATCH,
    RefusalCode.NO_PROGRAM: ExitCode.MISMATCH,
    RefusalCode.ISLAND: ExitCode.MISMATCH,
    RefusalCode.NUMERICS: ExitCode.MISMATCH,
}


class W5xdeError(Exception):
    """Root of every error this package raises on purpose. Its text is fit for the wire and for any file."""

    exit_code: ExitCode = ExitCode.ERROR

    def __init__(self, *args: object) -> None:
        super().__init__(*(utf8(arg) if isinstance(arg, str) else arg for arg in args))


class LocalError(W5xdeError):
    """Our bug or our machine's failure."""


LACKS_MEMORY = "this process may have no more memory: raise its limit (ulimit -v, or the container's), or free some"


class ProtocolViolation(LocalError):
    """Our own side was about to break the protocol."""


class DeviceLost(LocalError):
    """The device fails at every call, as CUDA does after a device-side assert or an illegal address.

    Only another process gets it back. Fields: ``device``, ``reason``.
    """

    exit_code = ExitCode.DEVICE_LOST

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, reason
        super().__init__(f"{device} is lost to this process: {reason}; only a new process gets it back")


class ReaderDied(LocalError):
    """A process that reads the dataset ended while it read. Fields: ``how`` it ended, what it was ``doing``.

    ``again``: so did others, with nothing read beside them.
    """

    def __init__(self, how: str, doing: str, *, again: bool = False) -> None:
        self.how, self.doing = how, doing
        advice = (
            ", and so did those before it: something that it calls crashes, or memory is short; --loader-processes 0 "
            "reads without such processes"
        )
        super().__init__(f"a reading process {how} while it {doing}" + advice * again)


class ReadersLost(LocalError):
    """No process can be had that reads the dataset. Field: ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"reading processes {reason}; memory may be short, or what ulimit allows: give more of it, or fewer "
            "--loader-processes (with 0, threads read)"
        )


class IslandBroken(LocalError):
    """The job failed on a leaf that this rank of an island computed, and not on all ranks: the others wait for it.

    Fields: ``step``, ``leaf``, ``reason``.
    """

    exit_code = ExitCode.ISLAND_LOST

    def __init__(self, step: int, leaf: int, reason: str) -> None:
        self.step, self.leaf, self.reason = step, leaf, reason
        super().__init__(
            f"step {step}, leaf {leaf}: {reason}; not all ranks of the island share the failure, so it begins anew"
        )


class UsageError(W5xdeError):
    """Wrong input from the person who started the program; shown as one line."""

    exit_code = ExitCode.USAGE


def need(holds: bool, text: str) -> None:
    """Raises UsageError with ``text`` where a setting does not hold."""
    if not holds:
        raise UsageError(text)


class JobError(UsageError):
    """A job that cannot be loaded or cannot work.

    Fields: ``reference`` (what was asked for), ``reason``, ``hint`` (what to do).
    """

    def __init__(self, reference: str, reason: str, hint: str = "") -> None:
        self.reference, self.reason, self.hint = reference, reason, hint
        super().__init__(f"job {reference}: {reason}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type[JobError], tuple[str, str, str]]:
        return type(self), (self.reference, self.reason, self.hint)  # a reading process may raise it


class PortInUse(UsageError):
    """The address to listen on is taken. Fields: ``host``, ``port``."""

    exit_code = ExitCode.PORT_IN_USE

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        super().__init__(f"{host}:{port} is in use; stop what listens there or choose another --port (0: any free one)")


class RemoteError(W5xdeError):
    """The peer broke the protocol. Drop the peer; the run goes on."""


class FrameTooLarge(RemoteError):
    """A size over its cap. Fields: ``field``, ``nbytes``, ``limit``."""

    def __init__(self, field: str, nbytes: int, limit: int) -> None:
        self.field, self.nbytes, self.limit = field, nbytes, limit
        super().__init__(f"{field} of {nbytes} bytes is over the limit of {limit}")


class MalformedFrame(RemoteError):
    """Bytes that are not a frame of this protocol. Field: ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"malformed frame: {reason}")


class UnexpectedMessage(RemoteError):
    """A valid message at the wrong time. Fields: ``message`` (its name), ``state``."""

    def __init__(self, message: str, state: str) -> None:
        self.message, self.state = message, state
        super().__init__(f"{message} is not allowed in state {state}")


class ProgramRefused(RemoteError):
    """A program that is not run here. Fields: ``node`` (its number; -1: none), ``operator``, ``reason``."""

    exit_code = ExitCode.MISMATCH

    def __init__(self, reason: str, *, node: int = -1, operator: str = "") -> None:
        self.node, self.operator, self.reason = node, operator, reason
        where = f", node {node} ({operator})" if node >= 0 else ""
        super().__init__(f"program refused{where}: {reason}")


class ProgramKilled(ProgramRefused):
    """A program that ended the process of its own that it ran in. It is not tried again."""


class LinkLost(W5xdeError):
    """The connection ended. Fields: ``peer``, ``reason``."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, peer: str, reason: str) -> None:
        self.peer, self.reason = peer, reason
        super().__init__(f"connection to {peer} lost: {reason}")


class Unreachable(LinkLost):
    """Nothing answered within the deadline, or (``answered``) nobody was taken in. ``heard``: what a coordinator that
    was lost did when last heard of; ``advice``: what to do, where that is not to look at the address and the network.
    """

    def __init__(
        self, peer: str, reason: str, waited_s: float, heard: str = "", advice: str = "", *, answered: bool = False
    ) -> None:
        super().__init__(peer, reason)
        self.waited_s, self.heard = waited_s, heard
        usual = "check the address, that the coordinator runs, and the firewall between"
        advice = advice or ("it may take workers in later; its log says more" if answered else usual)
        if heard:
            advice = f"when it was last heard of it was at {heard}, and it may have ended since"
        what = "not taken in by the coordinator at" if answered else "no coordinator reachable at"
        self.args = (f"{what} {peer} within {waited_s:.{'0f' if waited_s >= 1 else '2g'}} s ({reason}); {advice}",)


class Refused(W5xdeError):
    """The peer said no. Fields: ``code``, ``reason``, ``hint``."""

    def __init__(self, code: RefusalCode, reason: str, hint: str = "") -> None:
        self.code, self.reason, self.hint = code, reason, hint
        self.exit_code = _REFUSAL_EXIT.get(code, ExitCode.ERROR)
        super().__init__(f"refused ({code.name.lower()}): {reason}" + (f"; {hint}" if hint else ""))


class LeafFailed(W5xdeError):
    """The user's code failed on one leaf more often than allowed.

    Fields: ``step``, ``leaf``, ``indices`` (the samples of the leaf), ``attempts``, ``traceback`` (text), ``sample``
    (the one that it failed on, None where that is not known). The first line says where, and what was raised:
    ``step 8, leaf 3: ValueError: corrupt JPEG (data.py:15), sample 57``.
    """

    def __init__(
        self, step: int, leaf: int, indices: list[int], attempts: int, traceback: str, *, sample: int | None = None
    ) -> None:
        self.step, self.leaf, self.indices, self.attempts, self.traceback = step, leaf, indices, attempts, traceback
        self.sample = indices[0] if len(indices) == 1 else sample
        named = f"sample {self.sample}" if self.sample is not None else f"samples {_listed(indices, _SAMPLES_NAMED)}"
        where = f"leaf {leaf} failed {attempts} time(s); sample indices [{_listed(indices, 64)}]"
        super().__init__(f"step {step}, leaf {leaf}: {headline(traceback)}, {named}\n{where}\n{traceback}")

    @staticmethod
    def shown(error: BaseException) -> str:
        """The traceback from the first frame outside of this package: the user's, or the called library's; of a process
        that died, how it did.

        At most 8,000 characters: a longer one is cut in the middle.
        """
        if isinstance(error, ReaderDied):  # it was raised by nobody's code
            return str(error)
        made = traceback.TracebackException.from_exception(error)
        one: traceback.TracebackException | None = made
        while one is not None:
            own = [frame.filename.startswith(_PACKAGE) for frame in one.stack]
            begin = own.index(True) if True in own else 0
            if False in own[begin:]:
                del one.stack[: own.index(False, begin)]
            one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        return shortened(utf8("".join(made.format())))


def utf8(text: str) -> str:
    """``text`` without halves of characters (``surrogateescape``), as the name of a file has them that is no UTF-8, and
    with it what is raised because of that file. As long as before."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shortened(text: str, limit: int = _TRACEBACK_CHARACTERS) -> str:
    """``text`` in about ``limit`` characters: the middle is left out, as both ends of a traceback say the most."""
    if len(text) <= limit:
        return text
    head = text[: limit // 4]
    tail = text[len(text) - (limit - limit // 4) :]
    if "\n" in tail.rstrip("\n"):
        tail = tail.partition("\n")[2]
    return f"{head}\n{_CUT.format(len(text) - len(head) - len(tail))}\n{tail}"


def users_frames(told: str) -> str:
    """``told`` with the caller's own frames alone in each traceback, not those of this package, of installed libraries
    and of Python. Where no frame is the caller's, those of this package are left out."""
    lines = told.splitlines(keepends=True)
    found = any(_is_callers(path) for path, _ in _frames(lines))
    kept: list[str] = []
    theirs = True
    for line in lines:
        if (frame := _FRAME.match(line)) is not None:
            theirs = _is_callers(frame[1]) if found else not frame[1].startswith(_PACKAGE)
        elif not line.startswith("  "):  # frames are indented, and so are the lines of code below them
            theirs = True
        if theirs:
            kept.append(line)
    return "".join(kept)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came of as a traceback tells it, each once: ``raise error from error`` makes a ring."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__context__ if one.__cause__ is None and not one.__suppress_context__ else one.__cause__


def in_one_line(error: BaseException) -> str:
    """``headline`` of an error that was caught. Reads no file: it may be asked on an event loop."""
    frames = [(frame.f_code.co_filename, str(line)) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, str(error.lineno)))
    said = utf8(str(error)).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {said[0]}"[:_HEADLINE] + _place(frames) if said else kind + _place(frames)


def headline(told: str) -> str:
    """What a traceback says in one line: ``ValueError: corrupt JPEG (data.py:15)``.

    The place is the innermost frame outside of installed libraries, or the innermost of all; none where this package
    raised it and no frame is the caller's. The last line of a text that is no traceback.
    """
    lines = [line for line in told.splitlines() if line.strip()] or ["it failed"]
    if _TRACEBACK not in lines:
        return lines[-1].strip()[:_HEADLINE]
    after = lines[len(lines) - lines[::-1].index(_TRACEBACK) :]
    raised = next((line for line in after if not line[0].isspace()), lines[-1].strip())
    return raised[:_HEADLINE] + _place(_frames(after))


def marked(error: Exception, name: str, value: object) -> Exception:
    """``error`` with such an attribute. In its place a RuntimeError in its words, where its class lets nobody set one,
    as a frozen dataclass."""
    try:
        setattr(error, name, value)
    except Exception:
        told = RuntimeError(headline(LeafFailed.shown(error)))
        told.__cause__ = error
        setattr(told, name, value)
        return told
    return error


def noted(error: Exception, note: str) -> Exception:
    """``error`` with one more note, as ``marked``."""
    return marked(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def _frames(lines: list[str]) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for line in lines if (found := _FRAME.match(line)) is not None]


def _place(frames: list[tuple[str, str]]) -> str:
    """The innermost of those ``(file, line)`` that is the caller's, in words."""
    theirs = [frame for frame in frames if _is_callers(frame[0])]
    if not theirs and (not frames or frames[-1][0].startswith(_PACKAGE)):
        return ""
    path, number = (theirs or frames)[-1]
    file = path.replace("\\", "/").rpartition("/")[2]
    return f" ({file}:{number})"


def _is_callers(path: str) -> bool:
    return not path.startswith(_PACKAGE) and not _LIBRARY.search(path)


def _listed(numbers: list[int], most: int) -> str:
    more = f", ... ({len(numbers)} in all)" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


class UpdateFailed(W5xdeError):
    """The job's optimizer or scheduler raised. Fields: ``step``, ``traceback`` (text). ``hint``: what to do, if known.

    Where the optimizer did, parameters may be half updated, and the last checkpoint is what counts. Where the scheduler
    did, they are those of the step before, which are saved.
    """

    def __init__(self, step: int, error: BaseException, traceback: str, hint: str = "") -> None:
        self.step, self.traceback = step, traceback
        frames = _frames(traceback.splitlines())
        place = _place(frames)
        if frames and not place and not isinstance(error, W5xdeError):
            path, number = frames[-1]
            place = f" in w5xde-async itself, not in the job's code ({path[len(_PACKAGE) :]}:{number})"
        place += f"; {hint}" if hint else ""
        super().__init__(f"the update after step {step} raised {type(error).__name__}: {error}{place}\n{traceback}")


class StoreError(W5xdeError):
    """The disk said no. Fields: ``path``, ``reason``."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


class CheckpointCorrupt(StoreError):
    """A record that does not match its own manifest."""


class CheckpointMismatch(StoreError):
    """A whole record, of another model or job; ``reason`` names the first difference."""

    exit_code = ExitCode.MISMATCH


class RunDirBusy(StoreError):
    """Another coordinator holds the run directory."""

    exit_code = ExitCode.USAGE


class DiskHangs(StoreError):
    """The end of a run has waited long enough, and goes on without. Fields: ``path``, ``what`` hangs."""

    def __init__(self, path: str, what: str) -> None:
        self.what = what
        super().__init__(
            path, f"{what} did not end in time, as where a disk hangs; what was saved before is whole, and the same "
            "command goes on from it",
        )  # fmt: skip
