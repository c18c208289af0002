"""Whether the ranks of an island compute the same, asked before unlike ones could wait for each other for good."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from msgspec import json

from w5xde_async.errors import UsageError
from w5xde_async.parallel.group import Group


def fingerprint_of(*values: object) -> str:
    """16 hexadecimal digits, equal for what has the same text."""
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def require_alike(group: Group, told: Mapping[str, str]) -> None:
    """All ranks call this with what each of them goes by, under the same names: for people, who are told of the first
    difference. Raises UsageError, on every rank, where there is one."""
    found = [json.decode(data, type=dict[str, str]) for data in group.bytes_of_all(json.encode(told))]
    difference = first_difference(found)
    if difference:
        raise UsageError(f"the ranks of this island differ in {difference}; start all of them alike")


def first_difference(told: Sequence[Mapping[str, str]]) -> str:
    """Of what each rank has told, by rank; "" where there is none."""
    for name in dict.fromkeys(name for one in told for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            ranks.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            said = (f"{value} on {', '.join(map(str, numbers))}" for value, numbers in ranks.items())
            return f"{name}: {'; '.join(said)}"
    return ""
