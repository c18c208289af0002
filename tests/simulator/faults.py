"""Faults: what can go wrong, as seeded schedules. A fault counts at the moment of its effect.

Every run draws its own few kinds of fault (swarm testing: a run with all of them at once hides what two alone would
show), and how often they come.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulator.cluster import Cluster
from tests.simulator.loop import Host, Killed
from tests.simulator.network import Connection
from tests.simulator.rogues import add_deaf_peer, add_stranger

__all__ = ["FAULTS", "JUDGED", "MORE", "heal", "schedule"]

Fault = Callable[[Cluster, random.Random], bool]
FAULTS: dict[str, Fault] = {}
MORE: dict[str, Fault] = {}  # which the integer-vector model knows nothing of
JUDGED: dict[str, Fault] = {}  # which do no harm where results are judged, and only there
SAFETY_S = 40.0  # how long faults go on in safety mode


def _fault(name: str, *, among: dict[str, Fault] = FAULTS) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        among[name] = fault
        return fault

    return register


def _connection(world: Cluster, rng: random.Random) -> Connection | None:
    found = world.network.open_connections()
    return rng.choice(found) if found else None


def _worker(world: Cluster, rng: random.Random) -> Host | None:
    found = [host for host in world.live_workers() if host.state == Host.RUNNING]
    return rng.choice(found) if found else None


def _running(world: Cluster) -> Host | None:
    host = world.coordinator
    return host if host is not None and host.state == Host.RUNNING else None


# -- the network -----------------------------------------------------------------------------------------------


@_fault("link reset")
def _reset(world: Cluster, rng: random.Random) -> bool:
    connection = _connection(world, rng)
    if connection is not None:
        connection.reset()
    return connection is not None


@_fault("link closed")
def _close(world: Cluster, rng: random.Random) -> bool:
    connection = _connection(world, rng)
    if connection is not None:
        connection.close()
    return connection is not None


@_fault("half-close")
def _half_close(world: Cluster, rng: random.Random) -> bool:
    connection = _connection(world, rng)
    if connection is not None:
        pipe = rng.choice([connection.forth, connection.back])
        pipe.finish()
    return connection is not None


@_fault("cut in mid-frame")
def _cut(world: Cluster, rng: random.Random) -> bool:
    connection = _connection(world, rng)
    if connection is not None:
        rng.choice([connection.forth, connection.back]).cut_after = rng.randint(1, 700)
    return False  # counted when the bytes end


@_fault("small slices")
def _slices(world: Cluster, rng: random.Random) -> bool:
    connection = _connection(world, rng)
    if connection is not None:
        rng.choice([connection.forth, connection.back]).slice_left = rng.randint(50, 400)
    return connection is not None


@_fault("delay spike")
def _spike(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        world.network.spiked[worker.machine] = world.loop.now + rng.uniform(0.5, 4.0)
    return False  # counted for each delivery that is late


def _block(world: Cluster, ways: list[tuple[str, str]], rng: random.Random) -> None:
    for way in ways:
        world.network.block(*way)
    world.loop.call_later(rng.choice([0.5, 3.0, 8.0, 20.0]), lambda: [world.network.heal(*way) for way in ways])


@_fault("one-way partition, to the coordinator")
def _mute(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        _block(world, [(worker.machine, "c")], rng)
    return worker is not None


@_fault("one-way partition, from the coordinator")
def _deafen(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        _block(world, [("c", worker.machine)], rng)
    return worker is not None


@_fault("partition")
def _partition(world: Cluster, rng: random.Random) -> bool:
    machines = [worker.machine for worker in world.live_workers() if rng.random() < 0.6]
    if machines:
        _block(world, [way for machine in machines for way in (("c", machine), (machine, "c"))], rng)
    return bool(machines)


@_fault("frames replayed")
def _replay(world: Cluster, rng: random.Random) -> bool:
    """For some seconds, what workers said on earlier connections is said again on their present ones."""
    world.hostile = True
    until = world.loop.now + rng.uniform(1.0, 8.0)

    def again() -> None:
        connection = _connection(world, rng)
        if connection is not None and connection.forth.writer is None and connection.near.num_sends > 4:
            recorded = world.network.recorded.get(connection.worker.machine, ())
            earlier = [data for number, data in recorded if number != connection.forth.number]
            for data in rng.sample(earlier, min(len(earlier), rng.randint(1, 6))):
                world.hit("frames replayed")
                connection.forth.send(data)
        if world.loop.now < until and not world.stopped_faults:
            world.loop.call_later(rng.uniform(0.02, 0.3), again)

    again()
    return False  # counted for each


# -- workers ---------------------------------------------------------------------------------------------------


@_fault("worker killed")
def _worker_crash(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        world.kill(worker, power=False)
    return worker is not None


@_fault("worker without power")
def _worker_power(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        world.kill(worker, power=True)
    return worker is not None


@_fault("worker stopped (SIGSTOP)")
def _worker_pause(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        worker.pause()
        world.loop.call_later(rng.choice([0.5, 2.0, 6.0, 25.0]), worker.resume)
    return worker is not None


@_fault("worker ten times slower")
def _slow(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        worker.slow_until = world.loop.now + rng.choice([2.0, 20.0])
    return worker is not None


@_fault("worker hangs in its step", among=MORE)
def _hang(world: Cluster, rng: random.Random) -> bool:
    """Its compute thread stands, its loop goes on and says so. Somebody else is there, or comes."""
    worker = _worker(world, rng)
    if worker is not None:
        worker.hangs = True
        if all(other.hangs for other in world.live_workers()):
            world.add_worker(1.0)
    return worker is not None


@_fault("worker lies about time", among=MORE)
def _lie(world: Cluster, rng: random.Random) -> bool:
    """Its times are absurd, and those that are no times at all are refused. Somebody else is there, or comes."""
    worker = _worker(world, rng)
    if worker is not None:
        worker.lies, worker.lied = rng.randint(1, 5), True
        if all(other.lies for other in world.live_workers()):
            world.add_worker(1.0)
    return worker is not None


@_fault("worker computes no numbers", among=JUDGED)
def _broken(world: Cluster, rng: random.Random) -> bool:
    """As one with bad memory: what it computes is not a number, from now on. While that is judged it may go, or break
    the protocol. Somebody else has to be there all the time: of one alone nobody can tell."""
    worker = _worker(world, rng)
    if worker is None or len(world.live_workers()) < 2 or any(other.broken for other in world.live_workers()):
        return False
    worker.broken = worker.lied = True

    def more() -> None:
        if worker.state != Host.RUNNING:
            return
        if what == "gone":
            world.kill(worker, power=False)
        for connection in world.network.open_connections():
            if connection.worker is worker and what == "cut off":
                connection.reset()
            elif connection.worker is worker and what == "breaks":
                connection.forth.send(b"\xff" * 8)  # no length that a frame may have

    what, in_s = rng.choice(["gone", "cut off", "breaks", "breaks", ""]), rng.uniform(0.0, 0.4)
    if what:
        worker.when_broken = lambda: world.loop.call_soon_threadsafe(world.loop.call_later, in_s, more)
    return True


@_fault("worker reads nothing")
def _deaf(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        worker.deaf_until = world.loop.now + rng.choice([1.0, 15.0])
    return worker is not None


@_fault("worker reads nothing at first")
def _deaf_at_first(world: Cluster, rng: random.Random) -> bool:
    """A worker's successor is slow to take what it is sent when it has joined."""
    worker = _worker(world, rng)
    if worker is not None:
        world.pauses_at_joining_s[worker.machine] = rng.uniform(0.3, 4.0)
        world.hit("worker killed")
        world.kill(worker, power=False)
    return False  # counted when it has joined


@_fault("worker drained")
def _drain(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is None or worker.service is None:
        return False
    worker.spawn(_call(lambda: worker.service.drain("a notice")), "notice")
    return True


@_fault("everybody drained", among=MORE)
def _drain_all(world: Cluster, rng: random.Random) -> bool:
    """All that are there are asked to leave at once, and for a minute nobody comes back."""
    workers = [host for host in world.live_workers() if host.state == Host.RUNNING and host.service is not None]
    world.away_until = world.loop.now + 60.0
    for worker in workers:
        worker.spawn(_call(partial(worker.service.drain, "a notice")), "notice")
    return bool(workers)


@_fault("leaf failed")
def _leaf(world: Cluster, rng: random.Random) -> bool:
    worker = _worker(world, rng)
    if worker is not None:
        worker.failing_leaf = True
    return worker is not None


@_fault("late joiner")
def _joiner(world: Cluster, rng: random.Random) -> bool:
    if world.num_slots >= 7:
        return False
    world.add_worker()
    return True


@_fault("peer that never reads")
def _deaf_peer(world: Cluster, rng: random.Random) -> bool:
    if world.faults["peer that never reads"] >= 5:
        return False
    add_deaf_peer(world)
    return True


@_fault("stranger")
def _stranger(world: Cluster, rng: random.Random) -> bool:
    add_stranger(world, rng.randbytes(rng.randint(0, 64)))
    return True


# -- the coordinator -------------------------------------------------------------------------------------------


@_fault("coordinator killed")
def _coordinator_crash(world: Cluster, rng: random.Random) -> bool:
    host = _running(world)
    if host is not None:
        world.kill(host, power=False)
    return host is not None


@_fault("coordinator without power")
def _coordinator_power(world: Cluster, rng: random.Random) -> bool:
    host = _running(world)
    if host is not None:
        world.kill(host, power=True)
    return host is not None


@_fault("coordinator dies while it writes")
def _disk_crash(world: Cluster, rng: random.Random) -> bool:
    host = _running(world)
    if host is None or host.filesystem is None:
        return False
    power, calls = rng.random() < 0.6, rng.randint(1, 30)

    def doom(host: Host) -> None:
        def die() -> None:
            world.hit("coordinator dies while it writes")
            world.kill(host, power=power)
            raise Killed

        assert host.filesystem is not None
        host.filesystem.die, host.filesystem.dies_in = die, calls

    if rng.random() < 0.25:  # the next one, among the first things that it writes: they take no time
        world.doom_next = doom
        world.kill(host, power=False)
    else:
        doom(host)
    return False  # counted at its death


@_fault("coordinator stopped in good order")
def _stop(world: Cluster, rng: random.Random) -> bool:
    host = _running(world)
    if host is None or host.service is None:
        return False
    host.spawn(_call(lambda: host.service.request_stop("a restart")), "notice")
    return True


@_fault("coordinator stopped (SIGSTOP)")
def _coordinator_pause(world: Cluster, rng: random.Random) -> bool:
    host = _running(world)
    if host is not None:
        host.pause()
        world.loop.call_later(rng.choice([0.3, 2.0, 8.0]), host.resume)
    return host is not None


@_fault("two coordinators")
def _takeover(world: Cluster, rng: random.Random) -> bool:
    """The old one is stopped; once every worker has missed it, a new one takes over; then the old one goes on."""
    old = _running(world)
    if old is None or old.term == 0 or world.faults["two coordinators"] >= 2:
        return False
    silence_s = world.config.silence_s + 2 * world.config.heartbeat_s + 1.0
    back_s = silence_s + rng.uniform(0.5, 6.0)
    old.pause()
    world.loop.call_later(silence_s, world.supersede, old)
    world.loop.call_later(back_s, old.resume)
    for _ in range(rng.randint(0, 3)):  # workers look for the run again, and may be sent to the old one
        world.loop.call_later(back_s + rng.uniform(0.0, 4.0), _reset, world, rng)
    world.loop.call_later(back_s + rng.uniform(2.0, 12.0), world.retire, old)
    return True


def _disk_fault(number: int) -> Fault:
    def fail(world: Cluster, rng: random.Random) -> bool:
        world.disk.error = number

        def mend() -> None:
            world.disk.error = 0

        world.loop.call_later(rng.choice([0.5, 2.0, 6.0]), mend)
        return True

    return fail


FAULTS["disk full"] = _disk_fault(errno.ENOSPC)
FAULTS["disk errors"] = _disk_fault(errno.EIO)


async def _call(action: Callable[[], Any]) -> None:
    action()


# -- schedules -------------------------------------------------------------------------------------------------


def heal(world: Cluster) -> None:
    """Faults stop: the network, the disk and everybody who is stopped or slow are well again."""
    for way in sorted(world.network.blocked):
        world.network.heal(*way)
    world.network.spiked.clear()
    world.disk.error = 0
    for host in world.hosts:
        host.slow_until = host.deaf_until = 0.0
        host.failing_leaf = host.hangs = False
        host.lies = 0
        if host.filesystem is not None:
            host.filesystem.dies_in = None
        if host.machine.startswith("r"):
            world.kill(host, power=False)
        elif host.superseded:
            world.retire(host)
        else:
            host.resume()
    world.doom_next = None
    for connection in world.network.open_connections():
        connection.forth.cut_after = connection.back.cut_after = None
        connection.near.inbound.wake_reader()
        connection.far.inbound.wake_reader()


async def schedule(world: Cluster) -> None:
    """Let faults happen. Returns when they have stopped."""
    rng = random.Random(f"{world.seed}/{world.mode}/faults")
    kinds = list(world.focus) or rng.sample(world.kinds, rng.randint(2, 9))
    every_s = rng.choice([0.15, 0.4, 1.0, 2.5])
    ends = SAFETY_S if world.mode == "safety" else rng.choice([2.0, 6.0, 15.0])
    await asyncio.sleep(rng.uniform(0.0, 0.6))
    while world.loop.now < ends:
        name = rng.choice(kinds)
        if (FAULTS.get(name) or MORE[name])(world, rng):
            world.hit(name)
        await asyncio.sleep(rng.expovariate(1 / every_s))
    heal(world)
