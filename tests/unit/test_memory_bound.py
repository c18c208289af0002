"""The stated bound on a coordinator's memory: what it counts, and that it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.durability.journal_writer import MOST_AHEAD
from w5xde_async.coordinator.memory_bound import EXTRA_LINKS, memory_bound_bytes, most_held, most_vectors
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.updates.config import UpdateConfig

PLAIN = CoordinatorConfig(
    max_workers=2, pacing=PacingConfig(leases_ahead=2), norm_gate=0.0, audit_fraction=0.0, credit_bytes=1000,
    bucket_bytes=64 << 10,
)  # fmt: skip
JUDGED = replace(PLAIN, norm_gate=6.0)
LINKS = (2 + EXTRA_LINKS) * (2 * ((256 << 10) + (512 << 10)) + 100) + 2 * 1000


def test_vectors() -> None:
    assert most_vectors(256, PLAIN) == (4 + 1) * 9 + 5
    assert most_held(JUDGED) == 4
    assert most_vectors(256, JUDGED) == (8 + 1) * 9 + 5 + 2  # as many held as open, and two audits
    assert most_vectors(6, JUDGED) == 6 + 5 + 2  # never more than leaves
    assert most_vectors(256, replace(PLAIN, max_workers=256)) == 256 + 5


def test_bytes() -> None:
    vectors = 50 + 3  # the referee's, which also holds a model twice: its own, and what it was given
    assert memory_bound_bytes(100, 10, 256, PLAIN) == vectors * 100 + 2 * 10 + LINKS
    journal = replace(PLAIN, durability="journal")
    assert memory_bound_bytes(100, 10, 256, journal) == (vectors + MOST_AHEAD) * 100 + 2 * 10 + LINKS


@pytest.mark.parametrize(("update", "vectors"), [({"rule": "async"}, 4 + 4 + 3), ({"rule": "local"}, 2 + 4 + 3)])
def test_bytes_of_other_rules(update: dict[str, str], vectors: int) -> None:
    config = replace(PLAIN, update=UpdateConfig(**update))
    assert memory_bound_bytes(100, 10, 256, config) == vectors * 100 + 6 * 10 + LINKS


def test_everything_makes_it_larger() -> None:
    least = memory_bound_bytes(1000, 1000, 64, PLAIN)
    for change in (
        {"max_workers": 3}, {"norm_gate": 1.0}, {"audit_fraction": 0.5}, {"credit_bytes": 1001},
        {"durability": "journal"}, {"pacing": PacingConfig(leases_ahead=3)}, {"update": UpdateConfig(codec="int8")},
    ):  # fmt: skip
        assert memory_bound_bytes(1000, 1000, 64, replace(PLAIN, **change)) > least, change
