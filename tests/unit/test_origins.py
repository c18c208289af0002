"""Whose a connection is taken for."""

from __future__ import annotations

import pytest

from w5xde_async.plan.origins import origin_of


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),  # as a socket for both has it
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("anna", "anna"),  # a name that was proved
        ("", ""),  # a Unix socket
    ],
)
def test_all_addresses_that_one_host_may_come_from_count_as_one(host: str, origin: str) -> None:
    assert origin_of(host) == origin
