"""Whose a connection is taken for before anything is known of it, where there are limits for each."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address


def origin_of(host: str) -> str:
    """Of an address: an IPv6 host has a whole /64 of them, and may come from each. What is no address is its own."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"
