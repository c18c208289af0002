"""connect, listen, parse_address: what they promise when all goes well and when it does not."""

from __future__ import annotations

import asyncio
import datetime
import errno
import gc
import hashlib
import logging
import resource
import socket
import ssl
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ports import free_port

from w5xde_async.errors import LinkLost, PortInUse, Refused, Unreachable, UsageError
from w5xde_async.net import endpoint, racing
from w5xde_async.net.endpoint import DEFAULT_PORT, bare_host, connect, format_address, listen, parse_address, valid_host
from w5xde_async.net.link import Link
from w5xde_async.net.tls import TlsFiles, client_context
from w5xde_async.wire.frame import encode
from w5xde_async.wire.messages import Heartbeat

# -- addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", DEFAULT_PORT)),
        ("host:1234", ("host", 1234)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        (" host:80 ", ("host", 80)),
        ("[::1]", ("::1", DEFAULT_PORT)),
        ("[::1]:5556", ("::1", 5556)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("[fe80::1%eth0.100]:1", ("fe80::1%eth0.100", 1)),
        ("my_service.lan.:80", ("my_service.lan.", 80)),
        (f"{'a' * 63}.org:80", (f"{'a' * 63}.org", 80)),
        ("xn--4ca.org:80", ("xn--4ca.org", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]):
    assert parse_address(text, listens=True) == expected
    assert parse_address(format_address(*expected), listens=True) == expected


@pytest.mark.parametrize(
    "text",
    ["", ":", ":80", "host:", "host:x", "host:-1", "host:65536", "host:999999", "host:8 0", "host:\u0661", "::1",
     "::1:80", "[::1", "[::1]80", "[]:80", "[host]:80", "::1]:80", "a b:80"],
)  # fmt: skip
def test_nonsense_is_a_usage_error_that_quotes_it(text: str):
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [
    "tcp://hush:80", "hush@host:80", " w5xde://hush@host:80", "W5XDE://hush@host:80?cert=sha256:00", "w5xde:\t//hush@h",
    "[w5xde://hush", "hush@host,w5xde://hush@host", "hush@host:x", "hush@host"])  # fmt: skip
def test_what_may_be_a_join_string_is_shown_to_nobody(text: str):
    for read in (parse_address, bare_host, valid_host):
        with pytest.raises(UsageError) as caught:
            read(text)
        assert "hush" not in str(caught.value)


_NO_HOSTS = [
    "train..example.org", "a..b", ".", "..", ".a", "a..", "h" * 64, f"a.{'h' * 64}.org", ".".join(["h" * 50] * 6),
    "h" * 300, "x?y", "ex?also=evil", "a&b", "a#b", "a\\b", "a\0b", "a%b", "1.2.3.4.5", "1.2.3", "256.1.1.1", "12",
    "\udc80", "\u00e4" * 70, "a\u3002\u3002b", "*",
]  # fmt: skip


@pytest.mark.parametrize("host", _NO_HOSTS)
@pytest.mark.parametrize("read", [parse_address, lambda text: parse_address(f"{text}:80"), bare_host])
def test_what_no_resolver_can_be_asked_for_is_refused_where_it_is_read(read: Any, host: str):
    with pytest.raises(UsageError):
        read(host)


@pytest.mark.parametrize("host", [
    "a:b:c", "fe80::1%", "fe80::1%a b", "::1%eth0/64", "1::2::3", "fe80::1%" + "e" * 16,
    "fe80::1%..", "fe80::1%a..b", "fe80::1%.a", "fe80::1%a."])  # fmt: skip
def test_what_is_no_ipv6_address_is_refused(host: str):
    for read in (lambda: parse_address(f"[{host}]:80"), lambda: bare_host(host)):
        with pytest.raises(UsageError):
            read()


def test_a_name_of_another_script_becomes_ascii():
    """What comes after can then neither fail over it nor take it for another."""
    assert parse_address("\u00e4.org:80") == ("xn--4ca.org", 80)
    assert bare_host("\uff11\uff12\uff17.0.0.1") == "127.0.0.1"


def test_port_0_is_for_those_who_listen():
    assert parse_address("host:0", listens=True) == ("host", 0)
    with pytest.raises(UsageError, match="port 0"):
        parse_address("host:0")


@pytest.mark.parametrize("text", ["-1", "-host:80", "a/b", "a b:1"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="has no valid host"):
        parse_address(text)


@pytest.mark.parametrize("text", ["-", "-a", "\uff0da"])  # IDNA writes the last one with a hyphen
def test_a_host_without_a_port_that_looks_like_a_flag_is_refused_too(text: str) -> None:
    with pytest.raises(UsageError, match="it begins with a hyphen"):
        bare_host(text)


@pytest.mark.parametrize("text", ["192.0.2.2:6001,192.0.2.3:6001", "a,b", "[::1]:1,[::2]:1"])
def test_several_addresses_are_not_one(text: str) -> None:
    with pytest.raises(UsageError, match="names several; give one, as in host:5555"):
        parse_address(text)


# Nearly right ones as well as any text: names from a resolver's point of view are bytes with limits.
_PIECES = st.sampled_from(["a", "a" * 63, "a" * 64, ".", "..", "-", "_", ":", "[", "]", "%", "%25", "?", "&also=", "@",
                           "/", "#", ",", "0", "127.0.0.1", "::1", "fe80::1", ":0", ":80", "\u00e4", "\u3002", "\u00df",
                           "\udc80", "\0", "\u0661", "xn--", "xn--a", " ", "\t"])  # fmt: skip
_ADDRESSES = st.one_of(st.text(max_size=30), st.lists(_PIECES, max_size=12).map("".join))


@given(_ADDRESSES)
def test_any_text_is_an_address_that_can_be_looked_up_or_a_usage_error(text: str):
    for read in (parse_address, lambda told: (bare_host(told), 1)):
        try:
            host, port = read(text)
        except UsageError:
            continue
        assert 0 < port <= 65535
        assert host.isascii()
        host.encode("idna")  # as the resolver and TLS do with it
        assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize("host", ["a..b", "h" * 64, "h" * 300])
async def test_a_name_that_is_none_is_one_that_does_not_resolve(host: str):
    """However it got past those who read addresses."""
    with pytest.raises(Unreachable, match="does not resolve"):
        await connect(host, 80, timeout_s=5)
    with pytest.raises(UsageError, match="cannot listen"):
        await listen(host, 0, echo)


# -- both ends


async def echo(link: Link) -> None:
    while True:
        received = await link.recv()
        await link.send(encode(received.message))


async def beat(link: Link, text: str = "x") -> None:
    await link.send(encode(Heartbeat(text)))
    assert (await link.recv()).message == Heartbeat(text)


@pytest.mark.both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", ""])
async def test_connect_and_listen(host: str):
    if host == "::1":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    listener = await listen(host, 0, echo)
    assert listener.port > 0
    link = await connect(host or "localhost", listener.port, timeout_s=5)
    await beat(link)
    assert link.peer == format_address(host or "localhost", listener.port)
    await asyncio.gather(link.aclose(), listener.aclose())


def _link_local() -> str:
    """An address of this machine's that needs its interface to be said; "" where there is none."""
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "20":
                return f"{ip_address(bytes.fromhex(digits))}%{name}"
    return ""


@pytest.mark.both_loops
@pytest.mark.skipif(sys.platform != "linux", reason="lo is the name of Linux")
async def test_the_interface_of_an_address_is_kept():
    """uvloop drops it where it looks addresses up, and where it connects."""
    if not (address := _link_local()):
        pytest.skip("no link-local address here")
    (_, found), *_ = await endpoint._look_up(address, 80)
    assert found[3] == socket.if_nametoindex(address.partition("%")[2])
    listener = await listen(address, 0, echo)
    assert listener.host == address
    link = await connect(address, listener.port, timeout_s=5)
    await beat(link)
    await asyncio.gather(link.aclose(), listener.aclose())
    with pytest.raises(Unreachable, match="refused"):
        await connect(address, listener.port, timeout_s=5)


async def test_a_port_in_use_says_so():
    listener = await listen("127.0.0.1", 0, echo)
    with pytest.raises(PortInUse) as caught:
        await listen("127.0.0.1", listener.port, echo)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", listener.port)
    await listener.aclose()


async def test_a_port_is_free_at_once_after_its_listener():
    """Though a connection that the listener's side closed still lingers in the kernel."""
    listener = await listen("127.0.0.1", 0, echo)
    link = await connect("127.0.0.1", listener.port, timeout_s=5)
    await beat(link)
    await listener.aclose()
    with pytest.raises(LinkLost):
        await link.recv()
    again = await listen("127.0.0.1", listener.port, echo)
    await again.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127/8 is here only on Linux")
async def test_a_free_port_is_the_same_on_every_address(monkeypatch: pytest.MonkeyPatch):
    async def both(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, (address, port)) for address in ("127.0.0.1", "127.0.0.2")]

    with monkeypatch.context() as patch:
        patch.setattr(endpoint, "_resolve", both)
        listener = await listen("both", 0, echo)
    for host in ("127.0.0.1", "127.0.0.2"):
        link = await connect(host, listener.port, timeout_s=5)
        await beat(link)
        await link.aclose()
    await listener.aclose()


async def test_a_name_that_stands_twice_in_the_table_of_hosts_is_listened_on_once(monkeypatch: pytest.MonkeyPatch):
    async def twice(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, ("127.0.0.1", port))] * 2

    monkeypatch.setattr(endpoint, "_resolve", twice)
    for port in (0, free_port()):
        listener = await listen("train.example.org", port, echo)
        assert len(listener._socks) == 1
        await listener.aclose()


@pytest.mark.parametrize("taken", [3, 100])
async def test_any_free_port_is_one_that_is_free_on_every_address(taken: int, monkeypatch: pytest.MonkeyPatch):
    """The first address's may be taken at the second."""
    bind, asked = endpoint._bind, list[int]()

    async def both(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, (address, port)) for address in ("127.0.0.1", "127.0.0.2")]

    def binds(family: socket.AddressFamily, address: tuple[str, int], host: str, port: int) -> socket.socket | None:
        if address[0] == "127.0.0.1":
            return bind(family, address, host, port)
        asked.append(address[1])
        if len(asked) <= taken:
            raise PortInUse(host, port)
        return socket.socket(family, socket.SOCK_STREAM)

    monkeypatch.setattr(endpoint, "_resolve", both)
    monkeypatch.setattr(endpoint, "_bind", binds)
    if taken == 100:
        with pytest.raises(PortInUse):
            await listen("both", 0, echo)
        return
    listener = await listen("both", 0, echo)
    assert listener.port == asked[-1]
    await listener.aclose()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_an_address_that_is_not_ours_is_a_usage_error(host: str):
    with pytest.raises(UsageError, match="cannot listen"):
        await listen(host, 0, echo)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_a_link_local_address_without_its_interface_is_told_what_it_lacks():
    with pytest.raises(UsageError, match=r"cannot listen on .*needs its interface: fe80::1%eth0"):
        await listen("fe80::1", 0, echo)


async def test_an_interface_of_another_machine_is_named():
    with pytest.raises(Unreachable, match=r"no interface 'faraway7'.*interface of this machine"):
        await connect("fe80::1%faraway7", 5555, timeout_s=5)


async def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match="Connection refused") as caught:
        await connect("127.0.0.1", port, timeout_s=5)
    assert caught.value.peer == f"127.0.0.1:{port}"


async def test_a_name_that_does_not_resolve():
    with pytest.raises(Unreachable, match="does not resolve"):
        await connect("no-such-host.invalid", 1, timeout_s=5)


async def test_no_answer_within_the_deadline(monkeypatch: pytest.MonkeyPatch):
    """A dead first address does not hold the second one up."""
    listener = await listen("127.0.0.1", 0, echo)
    tried = []

    async def addresses(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, ("dead", 1)), (socket.AF_INET, ("127.0.0.1", listener.port))]

    async def connect_one(address: tuple, *args: object, **kwargs: object) -> object:
        tried.append(address[1][0])
        if address[1][0] == "dead":
            await asyncio.Event().wait()
        return await original(address, *args, **kwargs)

    original = endpoint._connect_one
    monkeypatch.setattr(endpoint, "_resolve", addresses)
    monkeypatch.setattr(endpoint, "_connect_one", connect_one)
    monkeypatch.setattr(racing, "DELAY_S", 0.01)
    link = await connect("both", 1, timeout_s=5)
    assert tried == ["dead", "127.0.0.1"]
    await beat(link)
    await asyncio.gather(link.aclose(), listener.aclose())

    async def only_dead(host: str, port: int, **_: object) -> list:
        return [(socket.AF_INET, ("dead", 1))]

    monkeypatch.setattr(endpoint, "_resolve", only_dead)
    with pytest.raises(Unreachable, match="no answer"):
        await connect("dead", 1, timeout_s=0.02)


@pytest.mark.both_loops
@pytest.mark.parametrize("kind", ["sockets", "transports", "tls"])
async def test_a_connect_that_is_cancelled_in_any_turn_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Neither a descriptor (it would warn) nor a link at the other side."""
    server = client = None
    if kind == "tls":
        authority = trustme.CA()
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
        authority.issue_cert("localhost").configure_cert(server)
        authority.configure_trust(client)
    elif kind == "transports":
        monkeypatch.setattr(endpoint, "_watches_descriptors", lambda loop: False)
    for turns in range(12):
        listener = await listen("127.0.0.1", 0, echo, ssl=server)
        connecting = asyncio.create_task(connect("localhost", listener.port, timeout_s=5, ssl=client))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        if not connecting.cancelled():
            connecting.result().abort()
        async with asyncio.timeout(10):
            await asyncio.sleep(0.01)
            while listener.num_links:  # noqa: ASYNC110 - until the server has seen the end
                await asyncio.sleep(0.001)
        await listener.aclose()
        del connecting
    gc.collect()


# -- a listener under stress


@pytest.mark.both_loops
@pytest.mark.parametrize("limits", [{"max_strangers": 1}, {"max_of_address": 1}])
async def test_strangers_beyond_the_limit_go_for_those_that_come_and_that_is_said_once(
    limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    listener = await listen("127.0.0.1", 0, echo, **limits)
    link = await connect("127.0.0.1", listener.port, timeout_s=5)
    await beat(link)
    for _ in range(3):
        another = await connect("127.0.0.1", listener.port, timeout_s=5)
        with pytest.raises(LinkLost):
            await link.recv()
        await link.aclose()
        link = another
        await beat(link)
    assert sum("strangers closed for a newcomer" in record.message for record in caplog.records) == 1
    await asyncio.gather(link.aclose(), listener.aclose())


@pytest.mark.both_loops
@pytest.mark.parametrize("tls", [False, True])
async def test_silent_strangers_of_an_address_keep_out_nobody_who_says_something(tls: bool) -> None:
    authority, server, client = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    listener = await listen("127.0.0.1", 0, echo, ssl=server if tls else None, max_of_address=4)
    with ExitStack() as silent:
        for _ in range(8):
            silent.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        link = await connect("localhost", listener.port, timeout_s=5, ssl=client if tls else None)
        await beat(link)
        for _ in range(8):
            silent.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        await beat(link)
        async with asyncio.timeout(5):
            while listener.num_links != 4:  # noqa: ASYNC110 - until all of them have come and gone
                await asyncio.sleep(0.001)
        await beat(link)
        await asyncio.gather(link.aclose(), listener.aclose())


async def test_where_all_links_are_members_a_newcomer_is_closed_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def let_in(link: Link) -> None:
        link.let_in = True
        await echo(link)

    monkeypatch.setattr(endpoint, "_most_links", lambda: 2)
    listener = await listen("127.0.0.1", 0, let_in)
    links = [await connect("127.0.0.1", listener.port, timeout_s=5) for _ in range(2)]
    for link in links:
        await beat(link)
    for _ in range(3):
        other = await connect("127.0.0.1", listener.port, timeout_s=5)
        with pytest.raises(LinkLost):
            await other.recv()
        await other.aclose()
    assert sum("accept refused" in record.message for record in caplog.records) == 1
    for link in links:
        await beat(link)
    await asyncio.gather(listener.aclose(), *(link.aclose() for link in links))


async def test_at_the_limit_of_descriptors_a_stranger_may_take_its_time_to_end() -> None:
    async def slow_to_end(link: Link) -> None:
        try:
            await echo(link)
        finally:
            for _ in range(40):
                await asyncio.sleep(0)

    listener = await listen("127.0.0.1", 0, slow_to_end)
    listener._max_links = 4
    with ExitStack() as silent:
        for _ in range(4):
            silent.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        for _ in range(3):
            link = await connect("127.0.0.1", listener.port, timeout_s=5)
            await beat(link)
            await link.aclose()
        await listener.aclose()


@pytest.mark.parametrize("accepted", ["here", "elsewhere"])
async def test_whoever_waits_for_room_is_closed_where_nobody_waits_any_more(accepted: str) -> None:
    closing, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end(link: Link) -> None:
        try:
            await echo(link)
        finally:
            closing.set()
            await may_end.wait()

    listener = await listen("127.0.0.1", 0, slow_to_end)
    listener._max_links = 2
    links = [await connect("127.0.0.1", listener.port, timeout_s=5) for _ in range(2)]
    for link in links:
        await beat(link)
    if accepted == "here":
        newcomer = await connect("127.0.0.1", listener.port, timeout_s=5)
        await closing.wait()
        await listener.stop_accepting()
    else:
        ours, theirs = socket.socketpair()
        newcomer = Link(*await asyncio.open_connection(sock=ours))
        serving = asyncio.create_task(listener.serve(*await asyncio.open_connection(sock=theirs)))
        await closing.wait()
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled()
    with pytest.raises(LinkLost):
        async with asyncio.timeout(5):
            await newcomer.recv()
    may_end.set()
    await asyncio.gather(newcomer.aclose(), listener.aclose(), *(link.aclose() for link in links))


@pytest.mark.parametrize("limits", [{"max_strangers": 4}, {"max_of_address": 4}])
async def test_links_that_are_let_in_take_no_strangers_place(
    limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """An island is one worker and has a link for each rank."""
    links = list[Link]()

    async def let_in(link: Link) -> None:
        await link.recv()
        link.let_in = True
        await echo(link)

    listener = await listen("127.0.0.1", 0, let_in, **limits)
    for _ in range(40):
        links.append(await connect("127.0.0.1", listener.port, timeout_s=5))
        await links[-1].send(encode(Heartbeat("let me in")))
        await beat(links[-1])
    assert listener.num_links == 40
    strangers = [await connect("127.0.0.1", listener.port, timeout_s=5) for _ in range(5)]
    with pytest.raises(LinkLost):
        await strangers[0].recv()
    assert "links=44 strangers=4" in caplog.text
    for link in links:
        await beat(link)
    assert listener.num_links == 44
    await asyncio.gather(listener.aclose(), *(link.aclose() for link in (*links, *strangers)))


@pytest.mark.parametrize(("descriptors", "links"), [(46, 3), (41, 1), (12, 1), (1024, 5)])
async def test_strangers_leave_descriptors_for_files(
    descriptors: int, links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (descriptors, descriptors))
    listener = await listen("127.0.0.1", 0, echo, max_strangers=10, max_of_address=5)
    opened = [await connect("127.0.0.1", listener.port, timeout_s=5) for _ in range(7)]
    for link in opened[:-links]:
        with pytest.raises(LinkLost):
            await link.recv()
    for link in opened[-links:]:
        await beat(link)
    assert listener.num_links == links
    await asyncio.gather(listener.aclose(), *(link.aclose() for link in opened))


async def test_strangers_of_many_addresses_leave_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (45, 45))
    listener = await listen("127.0.0.1", 0, echo, max_strangers=50)
    address = ("127.0.0.1", listener.port)
    with ExitStack() as opened:
        for host in range(1, 10):
            opened.enter_context(socket.create_connection(address, source_address=(f"127.0.0.{host}", 0)))
        async with asyncio.timeout(5):
            while listener.num_links < 5:  # noqa: ASYNC110 - until it has seen them
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert listener.num_links == 5
        await listener.aclose()


@pytest.mark.both_loops
async def test_a_silent_tls_handshake_blocks_nobody():
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server)
    authority.configure_trust(client)
    listener = await listen("127.0.0.1", 0, echo, ssl=server)
    with socket.create_connection(("127.0.0.1", listener.port)):
        link = await connect("localhost", listener.port, timeout_s=5, ssl=client)
        await beat(link)
        assert listener.num_links == 2
        assert ssl.DER_cert_to_PEM_cert(link.certificate)
        await asyncio.gather(link.aclose(), listener.aclose())


async def test_a_certificate_names_a_host_without_the_dot_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes writes names with it; they are asked for as they are written."""
    asked = []

    def ask(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
        asked.append(host)
        return [(socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(endpoint, "_ask_resolver", ask)
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("node.example").configure_cert(server)
    authority.configure_trust(client)
    listener = await listen("127.0.0.1", 0, echo, ssl=server)
    link = await connect("node.example.", listener.port, timeout_s=5, ssl=client)
    await beat(link)
    assert asked == ["node.example."]
    await asyncio.gather(link.aclose(), listener.aclose())


@pytest.mark.parametrize("order", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
async def test_of_a_names_addresses_the_one_with_the_certificate_counts(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """At another one some other server may answer, and first."""

    def ask(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
        return [(socket.AF_INET, (address, port)) for address in order]

    def server() -> tuple[ssl.SSLContext, bytes]:
        context, issued = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), trustme.CA().issue_cert("node.example")
        issued.configure_cert(context)
        der = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
        return context, hashlib.sha256(der).digest()

    monkeypatch.setattr(endpoint, "_ask_resolver", ask)
    (ours, certificate), (theirs, _) = server(), server()
    listener = await listen("127.0.0.1", 0, echo, ssl=ours)
    other = await listen("127.0.0.2", listener.port, echo, ssl=theirs)
    client = client_context(TlsFiles())
    link = await connect("node.example", listener.port, timeout_s=5, ssl=client, certificate=certificate)
    await beat(link)
    with pytest.raises(Refused, match="not the one of the join string"):
        await connect("node.example", listener.port, timeout_s=5, ssl=client, certificate=bytes(32))
    await asyncio.gather(link.aclose(), listener.aclose(), other.aclose())


async def test_a_tls_handshake_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint, "HANDSHAKE_S", 0.05)
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    listener = await listen("127.0.0.1", 0, echo, ssl=server)
    with socket.create_connection(("127.0.0.1", listener.port)) as silent:
        silent.setblocking(False)
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
    await listener.aclose()


async def test_how_long_tls_took_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes his time for it has no more for the proofs than any other."""
    loop, now = asyncio.get_running_loop(), asyncio.get_running_loop().time
    took: list[float] = []

    async def slowly(*given: Any, **more: Any) -> Any:
        channel = await attach(*given, **more)
        if more["server_hostname"] is None:
            monkeypatch.setattr(loop, "time", lambda: now() + 7.0)
        return channel

    async def tell(link: Link) -> None:
        took.append(link.greeted_s)
        await echo(link)

    attach = endpoint._attach
    monkeypatch.setattr(endpoint, "_attach", slowly)
    listener = await listen("127.0.0.1", 0, tell)
    link = await connect("127.0.0.1", listener.port, timeout_s=60)
    await beat(link)
    assert 7.0 <= took[0] < 9.0
    await asyncio.gather(link.aclose(), listener.aclose())


async def test_what_speaks_no_tls_is_said_to_be_no_coordinator_perhaps():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(
            Refused, match=r"TLS: .*; what listens there speaks no TLS, and may be no coordinator; comp"
        ):
            await connect("127.0.0.1", port, timeout_s=5, ssl=ssl.create_default_context())


@pytest.mark.both_loops
@pytest.mark.parametrize("wrong", ["authority", "name", "plain"])
async def test_tls_that_cannot_be_is_refused_with_the_reason(wrong: str):
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost" if wrong != "name" else "elsewhere").configure_cert(server)
    (trustme.CA() if wrong == "authority" else authority).configure_trust(client)

    async def babble(link: Link) -> None:
        await link.send(encode(Heartbeat("not TLS at all")))
        await asyncio.Event().wait()

    listener = await listen("127.0.0.1", 0, babble, ssl=None if wrong == "plain" else server)
    with pytest.raises(Refused, match="TLS"):
        await connect("localhost", listener.port, timeout_s=5, ssl=client)
    await listener.aclose()


async def test_no_descriptors_left_does_not_spin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(endpoint, "EXHAUSTED_S", 0.02)
    original, attempts, exhausted = socket.socket.accept, 0, True

    def accept(sock: socket.socket) -> object:
        nonlocal attempts
        attempts += 1
        if exhausted:
            raise OSError(errno.EMFILE, "Too many open files")
        return original(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with caplog.at_level(logging.WARNING):
        listener = await listen("127.0.0.1", 0, echo)
        connecting = asyncio.create_task(connect("127.0.0.1", listener.port, timeout_s=5))
        await asyncio.sleep(0.1)
        assert 1 <= attempts <= 6
        exhausted = False
        link = await connecting
        await beat(link)
    assert [record.message for record in caplog.records] == ["accept paused reason=Too many open files"]
    await asyncio.gather(link.aclose(), listener.aclose())


async def test_what_forbids_to_accept_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One connection that failed is no reason to wait, and the log says nothing of it."""
    attempts, failing, original = 0, 1, socket.socket.accept
    paused, again = asyncio.Queue[float](), asyncio.Queue[None]()

    def accept(sock: socket.socket) -> object:
        nonlocal attempts
        attempts += 1
        if attempts <= failing:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return original(sock)

    async def pause(seconds: float) -> None:
        paused.put_nowait(seconds)
        if seconds:
            await again.get()

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(endpoint, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    with caplog.at_level(logging.WARNING):
        listener = await listen("127.0.0.1", 0, echo)
        first = await connect("127.0.0.1", listener.port, timeout_s=5)
        await beat(first)
        assert (paused.get_nowait(), paused.qsize(), caplog.records) == (0, 0, [])
        failing = attempts + 4
        connecting = asyncio.create_task(connect("127.0.0.1", listener.port, timeout_s=5))
        assert await paused.get() == 0
        for _ in range(3):
            assert await paused.get() == endpoint.EXHAUSTED_S
            again.put_nowait(None)
        second = await connecting
        await beat(second)
    assert [record.message for record in caplog.records] == ["accept paused reason=Operation not permitted"]
    await asyncio.gather(first.aclose(), second.aclose(), listener.aclose())


async def test_a_handler_that_fails_is_logged_and_its_link_closed(caplog: pytest.LogCaptureFixture):
    async def fail(link: Link) -> None:
        await link.recv()
        raise ZeroDivisionError("a bug")

    listener = await listen("127.0.0.1", 0, fail)
    link = await connect("127.0.0.1", listener.port, timeout_s=5)
    await link.send(encode(Heartbeat("x")))
    with pytest.raises(LinkLost):
        await link.recv()
    assert "a bug" in caplog.text
    other = await connect("127.0.0.1", listener.port, timeout_s=5)
    await asyncio.gather(link.aclose(), other.aclose(), listener.aclose())


async def test_aclose_ends_links_and_may_be_called_twice_and_from_a_handler():
    ended = []

    async def handler(link: Link) -> None:
        try:
            await link.recv()
            await listener.aclose()
        finally:
            ended.append(link.peer)

    listener = await listen("127.0.0.1", 0, handler)
    links = [await connect("127.0.0.1", listener.port, timeout_s=5) for _ in range(3)]
    async with asyncio.timeout(5):
        while listener.num_links < 3:  # noqa: ASYNC110 - until the server has taken them
            await asyncio.sleep(0.001)
    await links[0].send(encode(Heartbeat("close")))
    for link in links:
        with pytest.raises(LinkLost):
            await link.recv()
    await listener.aclose()
    assert len(ended) == 3
    with pytest.raises(Unreachable):
        await connect("127.0.0.1", listener.port, timeout_s=1)


@pytest.mark.both_loops
@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_that_comes_as_the_listener_closes_is_closed(turns: int):
    """In whichever turn of the event loop: before it is accepted, after that, with its task not begun or begun."""
    begun = []

    async def handler(link: Link) -> None:
        begun.append(link)
        await link.recv()

    listener = await listen("127.0.0.1", 0, handler)
    await asyncio.sleep(0)
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await listener.aclose()
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""
    assert begun or turns < 7


async def test_stop_accepting_keeps_the_links_that_stand():
    listener = await listen("127.0.0.1", 0, echo)
    link = await connect("127.0.0.1", listener.port, timeout_s=5)
    await beat(link)
    await listener.stop_accepting()
    with pytest.raises(Unreachable):
        await connect("127.0.0.1", listener.port, timeout_s=1)
    await beat(link)
    await asyncio.gather(link.aclose(), listener.aclose())


async def test_a_connection_that_was_accepted_elsewhere_has_the_limits_and_the_end_of_the_others():
    begun = asyncio.Event()

    async def handler(link: Link) -> None:
        begun.set()
        await echo(link)

    listener = await listen("127.0.0.1", 0, handler, max_strangers=1)
    returned = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal returned
        await listener.serve(reader, writer)
        returned += 1

    with tempfile.TemporaryDirectory() as folder:  # a Unix socket's path is short
        async with await asyncio.start_unix_server(handle, f"{folder}/socket"):
            first = Link(*await asyncio.open_unix_connection(f"{folder}/socket"))
            await beat(first)
            assert begun.is_set()
            assert listener.num_links == 1
            for through_port in (False, True, False):  # one too many, whichever door it came by
                if through_port:
                    other = await connect("127.0.0.1", listener.port, timeout_s=5)
                else:
                    other = Link(*await asyncio.open_unix_connection(f"{folder}/socket"))
                with pytest.raises(LinkLost):
                    await first.recv()
                await first.aclose()
                await beat(other)
                first = other
            await listener.aclose()
            with pytest.raises(LinkLost):
                await first.recv()
            late = Link(*await asyncio.open_unix_connection(f"{folder}/socket"))
            with pytest.raises(LinkLost):
                await late.recv()
            await asyncio.gather(first.aclose(), late.aclose())
    async with asyncio.timeout(5):
        while returned < 4:  # noqa: ASYNC110 - the handlers end in turns of their own
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_was_accepted_elsewhere_is_closed_whenever_its_task_is_cancelled(turns: int):
    async def handler(link: Link) -> None:
        await link.recv()

    listener = await listen("127.0.0.1", 0, handler)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    serving = asyncio.create_task(listener.serve(reader, writer))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert listener.num_links == 0
    with theirs:
        assert await asyncio.to_thread(theirs.recv, 1) == b""
    await listener.aclose()


def test_a_resolver_that_hangs_holds_up_neither_the_caller_nor_the_end_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that asks is left to itself, and one is enough for whoever asks again."""
    answered, asked = threading.Event(), []
    original = socket.getaddrinfo

    def hang(host: str, *args: Any, **kwargs: Any) -> Any:
        if socket.AI_NUMERICHOST in args or host != "hangs.example.org":
            return original(host, *args, **kwargs)
        asked.append(host)
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def twice() -> None:
        for _ in range(2):
            with pytest.raises(Unreachable, match="did not resolve in time"):
                await connect("hangs.example.org", 1, timeout_s=0.02)

    began = time.monotonic()
    try:
        with asyncio.Runner() as runner:
            runner.run(twice())
        assert time.monotonic() - began < 5
        assert asked == ["hangs.example.org"]
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "w5xde-may-hang":
                thread.join()


def test_families_take_turns() -> None:
    six, four = [(socket.AF_INET6, (str(n), 1)) for n in range(3)], [(socket.AF_INET, (str(n), 1)) for n in range(2)]
    assert endpoint._families_in_turn([*six, *four]) == [six[0], four[0], six[1], four[1], six[2]]
    assert endpoint._families_in_turn([]) == []


async def test_a_certificate_that_is_not_valid_today_says_what_the_clock_says() -> None:
    """One that is of tomorrow looks wrong to a machine whose clock is wrong."""
    now = datetime.datetime.now(datetime.UTC)
    authority = trustme.CA()
    for days, reason in ((2, "not yet valid"), (-2, "expired")):
        cert = authority.issue_cert(
            "localhost",
            not_before=now + datetime.timedelta(days=days - 1),
            not_after=now + datetime.timedelta(days=days),
        )
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        cert.configure_cert(server)
        authority.configure_trust(client)
        listener = await listen("127.0.0.1", 0, echo, ssl=server)
        with pytest.raises(Refused, match=f"{reason}.*compare the clocks.*{now:%Y-%m-%d}"):
            await connect("localhost", listener.port, timeout_s=5, ssl=client)
        await listener.aclose()
