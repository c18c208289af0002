"""Under which addresses others may find this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.errors import UsageError
from w5xde_async.facade.calling import where_to_join
from w5xde_async.hub.members.access import Access
from w5xde_async.net import own_addresses as module
from w5xde_async.net.endpoint import parse_address
from w5xde_async.net.join import Invitation
from w5xde_async.net.own_addresses import advertised, own_addresses
from w5xde_async.settings import CoordinatorSettings, WorkerSettings, read
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.connection.target import Target

_TOKEN = "a token that is long enough: 9f8e7d6c"


def _machine(monkeypatch: pytest.MonkeyPatch, *, routes: Any = (), interfaces: Any = (), name: Any = ()) -> None:
    monkeypatch.setattr(module, "_of_default_routes", lambda: iter(routes))
    monkeypatch.setattr(module, "_of_interfaces", lambda: iter(interfaces))
    monkeypatch.setattr(module, "_of_name", lambda: iter(name))


def test_a_host_that_listens_everywhere_names_what_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = ["127.0.0.1", "172.17.0.1", "10.0.0.7", "::1", "fe80::1", "fd77::1", "169.254.1.1"]
    _machine(monkeypatch, routes=["10.0.0.7", "2001:db9::7"], interfaces=interfaces, name=["127.0.1.1"])
    assert own_addresses("0.0.0.0") == ("10.0.0.7", "172.17.0.1")
    assert own_addresses("::") == ("2001:db9::7", "fd77::1")
    assert own_addresses("") == ("10.0.0.7", "2001:db9::7", "172.17.0.1", "fd77::1")
    assert own_addresses("fd77::2") == ("fd77::2",)


def test_without_a_default_route_an_interfaces_address_counts_before_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, interfaces=["127.0.0.1", "192.168.7.2"], name=["127.0.1.1"])
    assert own_addresses("0.0.0.0") == ("192.168.7.2",)
    _machine(monkeypatch, interfaces=["127.0.0.1"], name=["127.0.1.1", "10.2.2.2"])
    assert own_addresses("0.0.0.0") == ("10.2.2.2",)
    _machine(monkeypatch, interfaces=["127.0.0.1", "::1", "fe80::1"], name=["127.0.1.1"])
    assert own_addresses("0.0.0.0") == ("127.0.0.1", "127.0.1.1")  # to itself it is there
    assert own_addresses("::") == ("::1",)
    _machine(monkeypatch, interfaces=["127.0.0.1", "169.254.3.4"])
    assert own_addresses("0.0.0.0") == ("169.254.3.4", "127.0.0.1")
    _machine(monkeypatch)
    assert own_addresses("0.0.0.0") == ("127.0.0.1",)


def test_a_resolver_that_hangs_keeps_nobody_waiting_who_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, interfaces=["10.0.0.7"])
    monkeypatch.setattr(module, "_of_name", lambda: pytest.fail("the resolver was asked"))
    assert own_addresses("0.0.0.0") == ("10.0.0.7",)


def test_what_this_machine_has_can_be_asked_for() -> None:
    """Whatever it has: texts that are addresses, from each of the three."""
    for found in (module._of_default_routes(), module._of_interfaces(), module._of_name()):
        for address in found:
            ip_address(address.partition("%")[0])
    assert own_addresses("0.0.0.0")


def test_elsewhere_than_on_linux_the_name_is_asked_for_further_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    _machine(monkeypatch, routes=["10.8.0.2"], name=["10.8.0.2", "192.168.1.20"])
    assert own_addresses("0.0.0.0") == ("10.8.0.2", "192.168.1.20")


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("train.example.org", (("train.example.org", 5555),)),
        ("train.example.org:7777", (("train.example.org", 7777),)),
        ("fd77::1", (("fd77::1", 5555),)),
        ("[fd77::1]", (("fd77::1", 5555),)),
        ("[fd77::1]:80", (("fd77::1", 80),)),
        ("10.0.0.7, train.example.org:7777", (("10.0.0.7", 5555), ("train.example.org", 7777))),
    ],
)
def test_an_advertised_address_may_have_a_port(text: str, addresses: tuple[tuple[str, int], ...]) -> None:
    assert advertised(text, 5555) == addresses


@pytest.mark.parametrize(
    "text",
    ["", "a b", "host:", "host:99999", "http://host", "[fd77::1", "0.0.0.0", "::", "[::]:5555", "a,,b", "a," * 8 + "a",
     "x?y", "ex?also=evil:1", "x:0", "h" * 300, "1.2.3.4.5", "train..example.org", "good.example.org,a..b"],
)  # fmt: skip
def test_an_advertised_address_that_nobody_can_reach_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(UsageError, match="--advertise"):
        advertised(text, 5555)
    if text:
        with pytest.raises(UsageError, match="--advertise"):
            CoordinatorConfig(advertise=text)


@pytest.mark.parametrize("text", ["a b", "::1:80:", "x:0", "host:x", "a..b"])
def test_no_message_advises_port_0(text: str) -> None:
    """``--port 0`` picks a port; nobody can write down an address with it."""
    with pytest.raises(UsageError) as caught:
        CoordinatorConfig(advertise=text, port=0)
    assert ":0" not in str(caught.value).replace(repr(text), "")


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("[fd77::1]", "fd77::1"),
        ("fd77::1", "fd77::1"),
        ("[::]", "::"),
        (" a.example.org ", "a.example.org"),
        ("::0", "::"),
        ("0:0:0:0:0:0:0:0", "::"),
    ],
)
def test_a_host_may_stand_in_brackets(host: str, taken: str) -> None:
    assert CoordinatorConfig(host=host).host == taken


@pytest.mark.parametrize(
    "host", ["a b", "host:5555", "[fd77::1]:5555", "http://host", "a,b", "[]", "a..b", "h" * 300, "x?y"]
)
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        CoordinatorConfig(host=host)


def test_the_join_string_of_a_host_that_listens_everywhere_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, interfaces=["fd77::1", "fd78::1", "10.0.0.7"])
    told = Access(CoordinatorConfig(host="::"), None).invitation(5555)
    assert told is not None
    assert told.addresses == (("fd77::1", 5555), ("fd78::1", 5555))
    assert Invitation.parse(told.reveal(), place="here") == told
    forwarded = Access(CoordinatorConfig(host="::", advertise="out.example.org:7777"), None).invitation(5555)
    assert forwarded is not None
    assert forwarded.addresses == (("out.example.org", 7777),)


# -- whatever somebody types


_PIECES = st.sampled_from(
    ["a", "a" * 64, ".", "..", "-", "*", ":", "[", "]", "%", "%eth0", "?", "&also=", "@", "/", "#", ",", "0", ":0",
     ":80", "127.0.0.1", "1.2.3.4.5", "::1", "::", "fe80::1", "\u00e4", "\u3002", "\udc80", "\0", " ", "w5xde://"]
)  # fmt: skip
_TYPED = st.one_of(st.text(max_size=20), st.lists(_PIECES, max_size=8).map("".join))


@hypothesis.settings(max_examples=60)
@given(_TYPED)
@pytest.mark.parametrize(
    "take",
    [
        lambda typed: CoordinatorConfig(host=typed, insecure=True, token=_TOKEN).host,
        lambda typed: parse_address(CoordinatorConfig(dashboard=typed or "a").dashboard, listens=True)[0],
        lambda typed: Target.of(typed, WorkerConfig(device="cpu", token=_TOKEN)).addresses[0][0],
        lambda typed: parse_address(read(WorkerSettings, [f"--server={typed}"], prog="it")[0].where())[0],
        lambda typed: read(CoordinatorSettings, ["a:b", f"--host={typed}"], prog="it")[0].coordinator_config("").host,
        lambda typed: parse_address(where_to_join(typed, ("a", 1), join_file=None, secure=False).server)[0],
    ],
    ids=["host", "dashboard", "target", "server", "host-flag", "facade"],
)
def test_whatever_is_typed_is_a_host_that_can_be_looked_up_or_a_usage_error(
    take: Callable[[str], str], typed: str
) -> None:
    with suppress(UsageError):
        take(typed).encode("idna")


@given(_TYPED)
def test_the_join_string_of_whatever_is_advertised_can_be_read(typed: str) -> None:
    try:
        config = CoordinatorConfig(host="0.0.0.0", advertise=typed, port=0)
    except UsageError:
        return
    told = Access(config, None).invitation(5555)
    assert told is not None
    assert Invitation.parse(told.reveal(), place="here") == told


def test_a_token_that_is_no_text_is_refused() -> None:
    """The environment may hold any bytes; a proof is made of text."""
    for config in (CoordinatorConfig, WorkerConfig):
        with pytest.raises(UsageError, match="W5XDE_TOKEN"):
            config(token="\udcff" + _TOKEN)
