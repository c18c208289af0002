"""Where the ranks of an island meet, and what becomes of its members, with processes that are none."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulator.loop import VirtualLoop
from tests.support import forking, jobs
from tests.support.circle import Circle
from tests.support.cluster import QUICK_WORKER, Commits, settings, train

from w5xde_async.cluster import island_processes, words
from w5xde_async.cluster.island_processes import IslandProcesses, Place
from w5xde_async.cluster.ties import Ties
from w5xde_async.cluster.words import MOST_BY_OTHERS, WORD_FD
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import ExitCode, LocalError, UsageError
from w5xde_async.hub.members import roster
from w5xde_async.parallel import group
from w5xde_async.parallel.group import join_store, open_store
from w5xde_async.parallel.shape import IslandShape
from w5xde_async.plan.shares import Share
from w5xde_async.runtime import Runtime, loop_factory, start_process
from w5xde_async.wire.messages import Rendezvous, Volunteer
from w5xde_async.worker.connection.connection import Departure
from w5xde_async.worker.connection.dialing import Dialer
from w5xde_async.worker.service import Worker

SHAPE = IslandShape("dp", 2)


class Told:
    """A process that is none: it ends when it is told to, or ``ends``."""

    pid, stdin = 0, None

    def __init__(self, ends: asyncio.Task[int] | None = None) -> None:
        self.returncode: int | None = None
        self._end: asyncio.Future[int] = ends or asyncio.get_running_loop().create_future()
        self._end.add_done_callback(self._note)

    def _note(self, end: asyncio.Future[int]) -> None:
        self.returncode = -signal.SIGKILL if end.cancelled() else end.result()

    async def wait(self) -> int:
        await asyncio.wait((self._end,))
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self._end.cancel()

    def send_signal(self, number: int) -> None:
        self._end.cancel()


class Island(IslandProcesses):
    """Its ranks are no processes, and end by themselves."""

    def _last_words(self, rank: int) -> tuple[str, bool]:
        return "", True


class Starting(Island):
    """Says which ranks it starts, and where."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, threads=1, **kwargs)
        self.started: list[tuple[int, Place, int]] = []

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
        self.started.append((rank, place, listening.fileno()))
        assert listening.getsockname()[1]
        process = Told()
        asyncio.get_running_loop().call_soon(process._end.set_result, 0)
        return process


@pytest.mark.allow_leaks  # libuv keeps a pipe for the process
def test_a_port_that_is_taken_is_given_with_who_listens_on_it() -> None:
    """Rank 0 serves on the socket that it is given, though nobody else could have that port any more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
        store = open_store("127.0.0.1", port, os.dup(listening.fileno()))
    join_store("127.0.0.1", port).set("key", "value")
    assert (store.port, store.get("key")) == (port, b"value")


@pytest.mark.allow_leaks  # the store's threads end with it
def test_a_rank_waits_for_one_that_does_not_come_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own groups have to be patient, and are so while they form."""
    monkeypatch.setattr(group, "_GATHERING", timedelta(milliseconds=10))
    with pytest.raises(RuntimeError) as caught:
        group.Group(open_store("127.0.0.1"), 0, 2)
    assert group.is_rank_gone(caught.value)


def test_a_rank_waits_for_connections_to_one_that_has_come_and_gone_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_CONNECTING_S", 0.01)
    gone = threading.Event()
    with pytest.raises(RuntimeError, match="not all connected") as caught:
        group._in_time(lambda: gone.wait(60) and None)
    assert group.is_rank_gone(caught.value)
    gone.set()
    monkeypatch.setattr(group, "_CONNECTING_S", 60.0)
    with pytest.raises(UsageError, match="another thread's"):
        group._in_time(_refuse)


def _refuse() -> None:
    raise UsageError("another thread's")


async def test_a_members_port_is_its_own_from_the_first_word_to_the_coordinator_on() -> None:
    """However long it waits for the others."""
    told: list[Volunteer] = []

    async def meet(volunteer: Volunteer) -> Rendezvous:
        told.append(volunteer)
        with pytest.raises(OSError, match="in use"):
            socket.create_server((volunteer.host, volunteer.port))
        others.append(asyncio.create_task(other.connect(volunteer.host, volunteer.port, 1, 20.0)))
        return Rendezvous(0, volunteer.host, volunteer.port)

    other, others = Ties(), list[asyncio.Task[None]]()
    member = Starting(SHAPE, (), meet=meet)
    assert await member.run() == ExitCode.OK
    await others[0]
    other.close()
    ((rank, place, _),) = member.started
    assert (rank, place.host, place.port) == (0, told[0].host, told[0].port)
    assert told[0].host == "127.0.0.1"


class Waiting(Island):
    """A member whose rank does nothing until it is ended, as one does that waits for others."""

    def __init__(self, ranks: list[int], addresses: list[tuple[str, int]]) -> None:
        super().__init__(IslandShape("fsdp", 3), (), threads=1, meet=self._meets)
        self.started, self.met = asyncio.Event(), 0
        self._ranks, self._addresses = ranks, addresses

    async def _meets(self, volunteer: Volunteer) -> Rendezvous:
        self.met += 1
        if self.met > 1:
            await asyncio.Event().wait()  # nobody else comes
        self._addresses.append((volunteer.host, volunteer.port))
        rank = self._ranks.pop(0)
        return Rendezvous(rank, *self._addresses[0])

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
        self.started.set()
        return Told()


@pytest.mark.parametrize("leaves", [0, 1, 2])
async def test_a_member_that_goes_while_the_ranks_start_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leaves: int
) -> None:
    """Whichever: the others look for members anew, and would wait minutes for its rank."""
    monkeypatch.setattr(island_processes, "_LEAVING_S", 0.05)
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.01)
    ranks, addresses = [0, 1, 2], list[tuple[str, int]]()
    members = [Waiting(ranks, addresses) for _ in range(3)]
    running = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(20):
        await asyncio.gather(*(member.started.wait() for member in members))
        members[leaves].leave("told")
        assert await running[leaves] == ExitCode.DRAINED
        others = [member for number, member in enumerate(members) if number != leaves]
        while not all(member.met == 2 for member in others):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for member in others:
            member.leave("the test ends")
        await asyncio.gather(*running)
    assert f"the member of rank {leaves} is gone" in caplog.text


async def test_a_member_that_goes_before_it_has_come_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(island_processes, "_TYING_S", 0.05)
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.01)
    for rank in (0, 1):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nobody = silent.getsockname()
            member = Waiting([rank], [] if rank == 0 else [nobody])
            running = asyncio.create_task(member.run())
            async with asyncio.timeout(20):
                while member.met < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                member.leave("the test ends")
                assert await running == ExitCode.DRAINED
            assert not member.started.is_set()
    assert caplog.text.count("not all members came") == 2


async def test_all_ranks_of_this_machine_meet_at_one_that_listens() -> None:
    island = Starting(SHAPE, ())
    assert await island.run() == ExitCode.OK
    assert [rank for rank, _, _ in island.started] == [0, 1]
    ((_, place, _), (_, other, _)) = island.started
    assert place == other


def dialer(address: str) -> Dialer:
    return Dialer(address, QUICK_WORKER, Runtime())


async def test_a_volunteer_that_goes_is_nobodys_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_MEETING_S", 1e6)  # it is not that nobody waits that long
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=1, handshake_s=1e6)) as coordinator:
        gone = asyncio.create_task(dialer(coordinator.address).meet(Volunteer("dp=2", 2, "gone", 1)))
        meeting = coordinator._training.roster._meeting  # type: ignore[union-attr]
        async with asyncio.timeout(20):
            while not meeting.num_waiting("dp=2", 2):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            gone.cancel()  # and with it its link
            while meeting.num_waiting("dp=2", 2):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


class Member(Island):
    """One whose rank is a worker of this process. Those who meet at one address are one island."""

    def __init__(self, address: str, circles: dict[tuple[str, int], Circle]) -> None:
        self.formed = 0
        super().__init__(SHAPE, (), threads=1, meet=self._meets)
        self._address, self._circles = address, circles
        self._worker: Worker | None = None

    async def _meets(self, volunteer: Volunteer) -> Rendezvous:
        return await dialer(self._address).meet(volunteer)

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
        circle = self._circles.setdefault((place.host, place.port), Circle(2, Share.BLOCK, seed=place.port))
        self._worker = Worker(self._address, job=jobs.mlp_sgd(), config=QUICK_WORKER, rank=circle.rank(rank))
        self.formed += 1
        return _Rank(self._worker, circle)


class _Rank(Told):
    def __init__(self, worker: Worker, circle: Circle) -> None:
        self._worker = worker
        super().__init__(asyncio.create_task(self._work(worker, circle)))

    async def _work(self, worker: Worker, circle: Circle) -> int:
        """As the program says how it has ended."""
        try:
            departure = await worker.run()
        except Exception:
            return ExitCode.ISLAND_LOST
        finally:
            circle.end()
        if departure is not Departure.DRAINED:
            return ExitCode.OK
        return ExitCode.DRAINED if worker.was_asked_to_leave else ExitCode.ISLAND_LOST

    def send_signal(self, number: int) -> None:
        self._worker.drain("told")


@pytest.mark.slow
@pytest.mark.parametrize("leaving", [0, 1])
async def test_a_member_that_waits_takes_the_place_of_one_that_leaves(leaving: int) -> None:
    expected = await train(jobs.mlp_sgd)
    commits, circles = Commits(), dict[tuple[str, int], Circle]()
    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=1), bus=commits.bus) as coordinator:
        members: Sequence[Member] = [Member(coordinator.address, circles) for _ in range(3)]
        first = [asyncio.create_task(member.run()) for member in members[:2]]
        while not all(member.formed for member in members[:2]):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(members[2].run())
        meeting = coordinator._training.roster._meeting  # type: ignore[union-attr]
        while not meeting.num_waiting("dp=2", 2):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await commits.reach(2)
        members[leaving].leave("told")
        assert await first[leaving] == ExitCode.DRAINED
        assert members[leaving].told == "told"
        result = await coordinator.wait()
        assert await asyncio.gather(first[1 - leaving], waiting) == [ExitCode.OK] * 2
    assert result.digest == expected.digest
    assert [member.formed for member in members] == [2 - (n == leaving) for n in range(2)] + [1]


async def test_ranks_that_have_met_and_come_after_the_runs_end_hear_of_it() -> None:
    """They would look for the coordinator until --connect-timeout."""
    async with Coordinator(jobs.mlp_sgd(), config=settings()) as coordinator:
        volunteers = [dialer(coordinator.address).meet(Volunteer("dp=2", 2, "here", port)) for port in (1, 2)]
        await asyncio.gather(*volunteers)
        worker = Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER)
        assert await worker.run() is Departure.FINISHED
        ended = asyncio.create_task(coordinator.wait())
        done, _ = await asyncio.wait((ended,), timeout=0.5)
        assert not done
        circle = Circle(2, Share.BLOCK)
        ranks = [Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER, rank=circle.rank(number))
                 for number in range(2)]  # fmt: skip
        assert await asyncio.gather(*[rank.run() for rank in ranks]) == [Departure.FINISHED] * 2
        async with asyncio.timeout(5):
            await ended


async def test_a_rank_that_goes_while_the_model_is_built_is_no_fault_of_the_model() -> None:
    """A UsageError would end the island for good: its program takes it for one that every start would meet again."""

    def gone(*_: object) -> Any:
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    async with Coordinator(jobs.mlp_sgd(), config=settings(min_workers=1)) as coordinator:
        rank = replace(Circle(2, Share.BLOCK).rank(1), build=gone)
        with pytest.raises(RuntimeError, match=r"^\[.*Connection closed by peer"):
            await Worker(coordinator.address, job=jobs.mlp_sgd(), config=QUICK_WORKER, rank=rank).run()


class Sleeping(IslandProcesses):
    """Ranks that do nothing, until they are ended."""

    def __init__(self) -> None:
        super().__init__(SHAPE, (), threads=1)
        self.starts = 0
        self.all_here = asyncio.Event()

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
        self.starts += 1
        if self.starts == 4:
            self.all_here.set()
        return await start_process("sleep", "60")


class Ending(Island):
    """Ranks that end with these codes, in this order."""

    def __init__(self, codes: Sequence[int]) -> None:
        super().__init__(SHAPE, (), threads=1)
        self._codes = iter(codes)

    async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
        process = Told()
        process._end.set_result(next(self._codes))
        return process


LOST, DRAINED = ExitCode.ISLAND_LOST, ExitCode.DRAINED


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((DRAINED, DRAINED), DRAINED),
        ((LOST, DRAINED), DRAINED),  # one was told, the other has only lost it
        ((DRAINED, LOST), DRAINED),
        ((0, DRAINED), 0),  # told when the run was finished
        ((0, LOST), 0),
        ((DRAINED, 1), DRAINED),
        ((LOST, LOST, DRAINED, DRAINED), DRAINED),  # told after a start anew
    ],
)
async def test_what_an_island_ends_with(codes: Sequence[int], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.0)
    assert await Ending(codes).run() == code


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 75])
async def test_a_rank_whose_process_the_job_ends_is_lost_whatever_its_exit_code(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run would be taken for finished, or for one that no start anew ends otherwise."""
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.0)
    caplog.set_level("INFO")
    starts = 0

    async def start(*_: str, env: dict[str, str], **__: Any) -> Any:
        nonlocal starts
        starts += 1
        word, process = int(env[WORD_FD]), Told()
        if starts == 2:
            process._end.set_result(code)
        elif starts > 2:
            await asyncio.to_thread(os.write, word, b"why it is over\nends\n")
            process._end.set_result(0)
        return process

    monkeypatch.setattr(island_processes, "start_process", start)
    monkeypatch.setattr(island_processes, "_OTHERS_S", 0.0)
    assert await IslandProcesses(SHAPE, (), threads=1).run() == 0
    assert starts == 4
    assert (
        f"island lost, all of it is started again in 0.0 s reason=rank 1 ended with exit code {code} (by" in caplog.text
    )
    assert "the island has left reason=rank 0 ended with exit code 0: it is over; rank 1" in caplog.text


@pytest.mark.parametrize("code", [0, 5])
async def test_an_island_whose_processes_the_job_ends_each_time_ends_with_an_error(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be started again for ever: its ranks cannot say that they end. With 0 nobody would miss it."""
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.0)
    starts = 0

    async def start(*_: str, **__: Any) -> Any:
        nonlocal starts
        starts += 1
        process = Told()
        process._end.set_result(code)
        return process

    monkeypatch.setattr(island_processes, "start_process", start)
    assert await IslandProcesses(SHAPE, (), threads=1).run() == (code or ExitCode.USAGE)
    assert starts == 2 * (1 + MOST_BY_OTHERS)


async def test_what_ranks_tell_is_read_while_they_run() -> None:
    """By what id the coordinator knows the island, at each start; and that one has closed what it would tell it by."""
    told, ends = asyncio.Queue[str](), list[Told]()

    class Here(IslandProcesses):
        async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
            await super()._start(rank, place, listening)
            ends.append(Told())
            return ends[-1]

    async def start(*_: str, env: dict[str, str], **__: Any) -> None:
        await asyncio.to_thread(os.write, int(env[WORD_FD]), f"id of rank {env['RANK']}\n".encode())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(island_processes, "start_process", start)
        patch.setattr(words, "_MUTE_S", -1.0)
        running = asyncio.create_task(Here(SHAPE, (), threads=1, on_id=told.put_nowait).run())
        async with asyncio.timeout(20):
            assert {await told.get(), await told.get()} == {"of rank 0", "of rank 1"}
            for process in ends:
                process._end.set_result(0)
            assert await running == 0
    assert len(ends) == 2


async def test_why_an_island_ends_for_good_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await Ending((ExitCode.USAGE, LOST)).run() == ExitCode.USAGE
    assert "no start anew would end otherwise reason=rank 0 ended with exit code 2" in caplog.text


async def test_a_member_that_waits_for_others_is_told_to_leave() -> None:
    asked = asyncio.Event()

    async def meet(volunteer: Volunteer) -> Rendezvous:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    member = Starting(SHAPE, (), meet=meet)
    running = asyncio.create_task(member.run())
    await asked.wait()
    member.leave("told")
    assert await running == DRAINED
    assert not member.started


async def test_ranks_hear_of_it_once_however_often_an_island_is_told_to_leave() -> None:
    told, here = list[int](), asyncio.Event()

    class Rank(Told):
        def send_signal(self, number: int) -> None:
            told.append(number)

    class Here(Island):
        async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
            asyncio.get_running_loop().call_soon(here.set)
            return Rank()

    island = Here(SHAPE, (), threads=1)
    running = asyncio.create_task(island.run())
    await here.wait()
    ranks: Any = island._processes.copy()
    island.leave("SIGUSR1")
    island.leave("SIGTERM")
    for rank in ranks:
        rank._end.set_result(DRAINED)
    assert await running == DRAINED
    assert (told, island.told) == ([signal.SIGTERM] * 2, "SIGUSR1")


@pytest.mark.parametrize("at", [0, 1])
async def test_an_island_that_is_told_to_leave_while_ranks_are_started_leaves(at: int) -> None:
    ended: list[Told] = []

    class Here(Island):
        async def _start(self, rank: int, place: Place, listening: socket.socket) -> Any:
            ended.append(Told())
            if rank == at:
                self.leave("SIGTERM")
            return ended[-1]

    assert await Here(SHAPE, (), threads=1).run() == DRAINED
    assert [process.returncode for process in ended] == [-signal.SIGKILL] * (at + 1)


async def test_a_rank_that_cannot_be_started_is_told_of_in_one_line_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Told] = []

    async def start(*_: str, **__: Any) -> Any:
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(Told())
        return started[-1]

    monkeypatch.setattr(island_processes, "start_process", start)
    with pytest.raises(LocalError, match=r"^rank 1 of the island cannot be started: .*: Resource temporarily unava"):
        await IslandProcesses(SHAPE, (), threads=1).run()
    assert started[0].returncode == -signal.SIGKILL


class Unwritten(VirtualLoop):
    """Its pipes are watched, and nobody writes to them."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        pass

    def remove_reader(self, fd: Any) -> bool:
        return True


def test_an_island_has_one_lifetime_however_often_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    async def start(*command: str, **_: Any) -> Any:
        given.append(float(command[len(command) - command[::-1].index("--lifetime")]))
        process = Told()
        lost_s, left_s = 10.0, given[-1]
        loop = asyncio.get_running_loop()
        loop.call_later(min(lost_s, left_s), process._end.set_result, LOST if lost_s < left_s else 0)
        return process

    monkeypatch.setattr(island_processes, "start_process", start)
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(island_processes, "_LOOK_S", 1e6)

    async def live(lifetime_s: float, find_s: float) -> tuple[int, bool]:
        monkeypatch.setattr(island_processes, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        given.clear()
        island = Island(
            SHAPE, ("--lifetime", "1h"), threads=1, lifetime_s=lifetime_s, find=lambda: asyncio.sleep(find_s)
        )
        code = await island.run()
        return code, island.was_in_vain

    with asyncio.Runner(loop_factory=Unwritten) as runner:
        assert runner.run(live(25.0, 3.0)) == (0, False)
        assert given == pytest.approx([22.0] * 2 + [11.0] * 2, abs=0.1)
        assert runner.run(live(13.5, 3.0)) == (0, False)  # it is over in the pause
        assert runner.run(live(2.0, 3.0)) == (0, True)
        assert not given


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
async def test_a_rank_that_is_stopped_is_found_by_who_has_started_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(island_processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(island_processes, "_STOPPED_S", 0.05)
    monkeypatch.setattr(island_processes, "_FIRST_PAUSE_S", 0.0)
    island = Sleeping()
    running = asyncio.create_task(island.run())
    while len(island._processes) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    os.kill(island._processes[1].pid, signal.SIGSTOP)
    async with asyncio.timeout(20):
        await island.all_here.wait()
    island.leave("told")
    assert await running == ExitCode.DRAINED
    assert "reason=rank 1 has been stopped by a signal" in caplog.text


ORPHAN = """
import os, signal, subprocess, sys
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.PIPE)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    os.kill(os.getpid(), signal.SIGKILL)
from w5xde_async.worker.__main__ import _go_on_when_orphaned
_go_on_when_orphaned()
os.kill(os.getpid(), signal.SIGSTOP)
sys.stdin.read()
print("it leaves")
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is not asked")
def test_a_rank_that_is_stopped_goes_on_when_who_has_started_it_is_killed(tmp_path: Path) -> None:
    """It would stay, with its memory, until somebody finds it: its standard input has ended, and it does not look."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    env = {**os.environ, "PYTHONPATH": forking.SEARCHED}
    with subprocess.Popen([forking.PYTHON, str(script)], stdout=subprocess.PIPE, env=env, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=30)  # the orphan has the pipe too
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert said == "it leaves\n"


def test_a_rank_that_stands_for_moments_is_left_alone() -> None:
    since: dict[int, float] = {}
    looks = [(True, True), (True, False), (True, True), (False, True), (True, True), (True, True), (True, True)]
    found = [island_processes._stopped_for_long(since, states, float(now)) for now, states in enumerate(looks)]
    assert [sorted(one) for one in found] == [[], [], [0], [], [1], [1], [0, 1]]


async def test_processes_start_in_a_directory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one that was removed meanwhile torch would end them."""

    async def begun() -> str:
        process = await start_process("pwd", "-P", stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode().strip()

    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    assert await begun() == str(there)
    there.rmdir()
    assert await begun() == "/"
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.allow_leaks  # uvloop forgets the copies of files that it made for a start that it refuses
async def test_loops_of_several_threads_start_processes_at_once() -> None:
    """uvloop refuses where another of its loops is just doing so: four members of one process came to three."""
    gate = threading.Barrier(4)

    async def many() -> list[int]:
        codes = []
        for _ in range(10):
            gate.wait(20)
            process = await start_process(sys.executable, "-IS", "-c", "")
            codes.append(await process.wait())
        return codes

    def run() -> list[int]:
        with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
            return runner.run(many())

    ends = await asyncio.gather(*[asyncio.to_thread(run) for _ in range(4)])
    assert ends == [[0] * 10] * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1"), ({"OMP_NUM_THREADS": "2"}, None), ({"OMP_NUM_THREADS": "2", "W5XDE_THREADS": "3"}, "3")],
)
def test_ranks_have_the_threads_that_somebody_has_asked_for(given: dict[str, str], expected: str | None) -> None:
    """As a worker of one process has."""
    island = Starting(IslandShape.parse("dp=2"), [], environment=given)
    told = island._environment_of(1, Place((0, 1), "127.0.0.1", 1234))
    assert (told.get("W5XDE_THREADS"), told["RANK"]) == (expected, "1")
