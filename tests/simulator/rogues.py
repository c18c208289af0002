"""Peers that are no workers: one that joins and never reads again, one that sends bytes without meaning."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.simulator.loop import HOST, Host
from tests.simulator.network import ADDRESS

from w5xde_async.errors import W5xdeError
from w5xde_async.net.link import Link
from w5xde_async.params.layout import Layout
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Heartbeat, Ready
from w5xde_async.worker.connection.handshake import join

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster

__all__ = ["add_deaf_peer", "add_stranger"]


def _host(world: Cluster) -> Host:
    number = sum(host.machine.startswith("r") for host in world.hosts)
    return world.new_host(f"r{number}", f"r{number}")


def add_deaf_peer(world: Cluster) -> None:
    """A member that takes leases, says that it lives and reads nothing, until its link is ended."""
    host = _host(world)
    layout = Layout.of(world.make_model(), bucket_bytes=world.config.bucket_bytes)

    async def work() -> None:
        link: Link = await world.network.connect(*ADDRESS, timeout_s=5.0)
        try:
            await join(link, key=host.name, name=host.name, token=world.config.token, terms={})
            await link.send(encode(Ready(layout.fingerprint, "cpu", "cpu", 1, "0")))
            while True:
                await asyncio.sleep(1.0)
                await link.send(encode(Heartbeat("at it")))
        except W5xdeError:
            link.abort()

    host.main(_quietly(work()))


def add_stranger(world: Cluster, data: bytes) -> None:
    """A connection with bytes in place of a greeting, or silence."""
    host = _host(world)

    async def work() -> None:
        link: Link = await world.network.connect(*ADDRESS, timeout_s=5.0)
        try:
            if data:
                await link.send([data])
            await link.recv()
        except W5xdeError:
            link.abort()

    host.main(_quietly(work()))


async def _quietly(work: object) -> None:
    assert HOST.get() is not None
    try:
        await work  # type: ignore[misc]
    except W5xdeError:  # nobody listens, say
        return
