"""The processes of an island on this machine: started together, ended together, started again.

They are all ranks of it, or the one of a machine that is a member of an island of several.

Nobody mends a group of which one rank is gone: the others are ended, and all begin anew, as a worker that the
coordinator has not seen before. It is no loss of work but for the lease under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from w5xde_async.cluster.ties import Ties
from w5xde_async.cluster.words import BY_OTHERS, MOST_BY_OTHERS, WORD_FD, WordReader
from w5xde_async.errors import ExitCode, LocalError, RefusalCode, Refused, UsageError
from w5xde_async.parallel.shape import STORE_FD, IslandShape
from w5xde_async.runtime import is_stopped, start_process
from w5xde_async.wire.messages import Rendezvous, Volunteer

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

#: No other start would end otherwise.
_HOPELESS = (
    ExitCode.ERROR,  # the run has failed
    ExitCode.USAGE, ExitCode.UNREACHABLE, ExitCode.AUTHENTICATION, ExitCode.MISMATCH,
)  # fmt: skip
#: The run is finished, or has no need of it; or it was told to leave.
_GOOD = (ExitCode.OK, ExitCode.DRAINED)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LASTED_S = 0.5, 30.0, 60.0
_OTHERS_S = 1.5  # what one rank ends with may only follow from another's end
_WORD_BYTES = 4096  # of what a rank says, at a time
_LOOK_S, _STOPPED_S = 0.5, 2.0  # at whether a rank is stopped, and for how long it may be
_TYING_S = 20.0  # from the meeting on, for all members to be at the place where their ranks will be
_LEAVING_S = 10.0  # for all ranks to leave once one has left in good order


class Place(NamedTuple):
    """Which ranks are started here, and where all of them meet."""

    ranks: Sequence[int]
    host: str
    port: int


class IslandProcesses:
    """Worker processes with the same ``arguments``, one for each rank that is here. Rank 0 is the head."""

    def __init__(
        self, shape: IslandShape, arguments: Sequence[str], *, threads: int,
        find: Callable[[], Awaitable[None]] | None = None,
        meet: Callable[[Volunteer], Awaitable[Rendezvous]] | None = None, host: str = "",
        lifetime_s: float | None = None, environment: Mapping[str, str] = os.environ,
        on_id: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """``threads``: torch's, of each rank, unless OMP_NUM_THREADS says it. ``find``: waits until it is known where
        the coordinator is, from which follows what ranks may do. ``meet``: finds the others, of which each is started
        by somebody else (default: all ranks are here). ``host``: this machine's address for what ranks say (default:
        loopback). ``lifetime_s``: of the island, however often it is started. ``on_id``: called with the id by which
        the coordinator knows it, at each start.

        Raises UsageError on Windows, where a process does not inherit what rank 0 listens on.
        """
        if sys.platform == "win32":
            raise UsageError(
                "--island starts processes that inherit a socket, which Windows does not do; start the worker in WSL, "
                "or the ranks by torchrun"
            )
        self._shape, self._arguments, self._threads, self._find, self._meet = shape, arguments, threads, find, meet
        self._host, self._environment, self._on_id = host or "127.0.0.1", environment, on_id
        self._lifetime_s, self._ends_at = lifetime_s, 0.0
        self._has_begun = self._expired = False
        self._processes: list[Process] = []
        self._ties = Ties()
        self._words: dict[int, tuple[int, WordReader]] = {}  # by rank: the pipe, and what was read of it
        self._by_others = 0  # starts that have ended with an exit code that says nothing
        self._left = asyncio.Event()
        self.told = ""  #: why it leaves, once it was told to

    @property
    def was_in_vain(self) -> bool:
        """Its lifetime was over before any rank was started."""
        return self._expired and not self._has_begun

    def leave(self, reason: str) -> None:
        """Leave in good order: the ranks finish their lease. Returns at once."""
        if self.told:  # by a notice, before the signal: ranks that hear two signals end at once
            return
        logger.info("the island leaves reason=%s", reason)
        self.told = reason
        self._left.set()
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def run(self) -> int:
        """Until the ranks have left in good order, or cannot work at all. Their exit code: DRAINED where they, or one
        of them, were told to leave."""
        if self._lifetime_s is None:
            return await self._keep()
        self._ends_at = time.monotonic() + self._lifetime_s
        expiring = asyncio.get_running_loop().call_later(self._lifetime_s, self._expire)
        try:
            code = await self._keep()
        finally:
            expiring.cancel()
        return ExitCode.OK if code == ExitCode.DRAINED and self._expired and not self.told else code

    def _expire(self) -> None:
        """Ranks know it themselves: each start has what was left of the lifetime."""
        logger.info("the island leaves reason=its lifetime is over")
        self._expired = True
        self._left.set()

    async def _keep(self) -> int:
        pause_s = _FIRST_PAUSE_S
        if self._find is not None:
            await self._or_left(self._find())
        while not self._left.is_set():
            began = time.monotonic()
            try:
                code, why = await self._once()
            finally:
                await self._kill()
            if code in _GOOD:
                logger.info("the island has left reason=%s", why)
                return code
            if code in _HOPELESS:
                logger.error("the island ends, no start anew would end otherwise reason=%s", why)
                return code
            if self._left.is_set():
                break
            if time.monotonic() - began > _LASTED_S:
                pause_s = _FIRST_PAUSE_S
            logger.warning("island lost, all of it is started again in %.1f s reason=%s", pause_s, why)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._left.wait()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return ExitCode.DRAINED

    async def _once(self) -> tuple[int, str]:
        """From the start of all ranks to the end of one."""
        # Rank 0 is given the port with somebody listening on it: one that were only known to be free could be another's
        # by then, and ranks would come to a stranger's.
        with socket.create_server((self._host, 0)) as listening:
            host, port = listening.getsockname()
            place: Place | None = Place(range(self._shape.ranks), host, port)
            if self._meet is not None:
                place = await self._met(self._meet, Volunteer(str(self._shape), self._shape.ranks, host, port))
            if place is None:
                return (ExitCode.DRAINED if self._left.is_set() else ExitCode.OK), ""
            if self._meet is not None:
                try:
                    await self._or_left(self._tie(place, listening))
                except (OSError, TimeoutError) as error:
                    return ExitCode.ISLAND_LOST, f"not all members came: {str(error) or 'in time'}"
                if self._left.is_set():
                    return ExitCode.DRAINED, ""
            for rank in place.ranks:
                try:
                    self._processes.append(await self._start(rank, place, listening))
                except OSError as error:
                    reason = f"{sys.executable}: {error.strerror or error}"
                    raise LocalError(f"rank {rank} of the island cannot be started: {reason}") from error
                if self._left.is_set():  # nobody has told this one, and the others have begun nothing without it
                    return ExitCode.DRAINED, ""
            self._has_begun = True
        waits = {
            asyncio.create_task(process.wait()): rank
            for rank, process in zip(place.ranks, self._processes, strict=True)
        }
        stopped = asyncio.create_task(self._stopped())
        watched: list[asyncio.Task[int]] = [stopped]
        if self._meet is not None:
            watched.append(gone := asyncio.create_task(self._ties.gone()))
        try:
            done, _ = await asyncio.wait((*waits, *watched), return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                rank = place.ranks[stopped.result()]
                return ExitCode.ISLAND_LOST, f"rank {rank} has been stopped by a signal for {_STOPPED_S:.0f} s"
            if done <= set(watched):  # a member may go first where all leave
                done, _ = await asyncio.wait(waits, timeout=_LEAVING_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return ExitCode.ISLAND_LOST, f"the member of rank {gone.result()} is gone"
            ends = {waits[task]: self._end(waits[task], task.result()) for task in done if task in waits}
            good = all(code in _GOOD for code, _ in ends.values())
            done, left = await asyncio.wait(waits, timeout=_LEAVING_S if good else _OTHERS_S)
        finally:
            for task in (*waits, *watched):
                task.cancel()
        ends |= {waits[task]: self._end(waits[task], task.result()) for task in done if waits[task] not in ends}
        if good and left:
            logger.warning("ranks %s did not leave with the others", sorted(waits[task] for task in left))
        said = "; ".join(f"rank {rank} {how}" for rank, (_, how) in sorted(ends.items()))
        self._by_others += BY_OTHERS in said
        codes = [code for code, _ in ends.values()]
        for code in _GOOD:  # the others have only lost it
            if code in codes:
                return code, said
        worst = [code for code in codes if code in _HOPELESS] or [code for code in codes if code]
        return (worst[0] if worst else ExitCode.OK), said

    async def _stopped(self) -> int:
        """Wait for a process that stands stopped (SIGSTOP), by its place among them: the others wait for it, and the
        coordinator would find it after ``--silence`` alone. One that is slow, or at a debugger, is in another state."""
        since: dict[int, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            states = await asyncio.to_thread(lambda: [is_stopped(process.pid) for process in self._processes])
            for number in _stopped_for_long(since, states, time.monotonic()):
                return number

    async def _met(self, meet: Callable[[Volunteer], Awaitable[Rendezvous]], volunteer: Volunteer) -> Place | None:
        """Where the ranks meet; None where this one is asked to leave before, or the run is finished."""
        try:
            met = await self._or_left(meet(volunteer))
            return None if met is None else Place([met.rank], met.host, met.port)
        except Refused as error:
            if error.code is RefusalCode.RUN_FINISHED:
                logger.info("left reason=the run is finished")
                return None
            raise

    async def _tie(self, place: Place, listening: socket.socket) -> None:
        """Make the ties to the other members. Raises OSError, TimeoutError where one has gone since they met."""
        if 0 in place.ranks:
            await self._ties.accept(listening, self._shape.ranks, _TYING_S)
        else:
            await self._ties.connect(place.host, place.port, place.ranks[0], _TYING_S)

    async def _or_left(self, work: Awaitable[_T]) -> _T | None:
        """What comes of ``work``; None where this one is asked to leave before."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.create_task(self._left.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            return await working if working.done() else None
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _environment_of(self, rank: int, place: Place) -> dict[str, str]:
        environment = {
            **self._environment, "RANK": str(rank), "LOCAL_RANK": str(place.ranks.index(rank)),
            "WORLD_SIZE": str(self._shape.ranks), "MASTER_ADDR": place.host, "MASTER_PORT": str(place.port),
        }  # fmt: skip
        if "OMP_NUM_THREADS" not in environment:
            environment.setdefault("W5XDE_THREADS", str(self._threads))
        return environment

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Process:
        environment = self._environment_of(rank, place)
        serves = () if rank else (listening.fileno(),)
        if serves:
            environment[STORE_FD] = str(serves[0])
        pipe, word = os.pipe()
        os.set_blocking(pipe, False)  # what the rank has started may hold its end for longer
        self._words[rank] = pipe, WordReader(self._on_id)
        asyncio.get_running_loop().add_reader(pipe, self._listen, rank)
        environment[WORD_FD] = str(word)
        lifetime: tuple[str, ...] = ()
        if self._lifetime_s is not None:
            lifetime = ("--lifetime", f"{max(self._ends_at - time.monotonic(), 0.001):.3f}")
        try:
            return await start_process(
                sys.executable, "-m", "w5xde_async.worker", *self._arguments, *lifetime, "--exit-with-stdin",
                "--exit-on-drain", str(int(ExitCode.DRAINED)), "--watch-preemption", "off", stdin=PIPE, env=environment,
                start_new_session=True, pass_fds=(*serves, word),
            )  # fmt: skip
        finally:
            os.close(word)

    def _listen(self, rank: int) -> None:
        """Read what a rank has said."""
        pipe, word = self._words[rank]
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError):
            while data := os.read(pipe, _WORD_BYTES):
                word.feed(data, loop.time())
            word.feed(b"", loop.time())
            loop.remove_reader(pipe)

    def _end(self, rank: int, code: int) -> tuple[int, str]:
        """What the end of a rank's process counts as, and how it was.

        The job's code, or a library, may end it with any code, which says nothing then: the island is lost.
        """
        why, is_own = self._last_words(rank)
        how = _how(code) + (f": {why}" if why else "")
        if is_own or code not in (*_GOOD, *_HOPELESS):
            return code, how
        if self._by_others < MOST_BY_OTHERS:
            return ExitCode.ISLAND_LOST, how + BY_OTHERS
        # 0 would say that the run is over, and nobody would start it again or miss it.
        return (code if code in _HOPELESS else ExitCode.USAGE), how + BY_OTHERS

    def _last_words(self, rank: int) -> tuple[str, bool]:
        """Why a rank has ended, where it has said that; and whether its exit code is its own."""
        if rank not in self._words:
            return "", False
        self._listen(rank)
        word = self._words[rank][1]
        return word.why, word.is_own_end(asyncio.get_running_loop().time())

    async def _kill(self) -> None:
        self._ties.close()
        processes, self._processes = self._processes, []
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            if process.stdin is not None:
                process.stdin.close()
        await asyncio.gather(*[process.wait() for process in processes])
        while self._words:
            pipe, _ = self._words.popitem()[1]
            asyncio.get_running_loop().remove_reader(pipe)
            os.close(pipe)


def _stopped_for_long(since: dict[int, float], states: Sequence[bool], now: float) -> list[int]:
    """Which have been stopped at every look for ``_STOPPED_S``. ``since``: kept from look to look."""
    for number, stopped in enumerate(states):
        if stopped:
            since.setdefault(number, now)
        else:
            since.pop(number, None)
    return [number for number, began in since.items() if now - began >= _STOPPED_S]


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
