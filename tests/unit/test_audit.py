"""Who is looked at, who looks, and who is found wrong: pure decisions."""

from __future__ import annotations

import pytest

from w5xde_async.errors import UsageError
from w5xde_async.plan.audit import AuditConfig, Auditor, Choice, HeldBlock, Why
from w5xde_async.plan.tree import Block

KEY = b"k" * 32


def held(worker: str = "a", **suppliers: str) -> HeldBlock:
    named = {int(bucket[1:]): who for bucket, who in suppliers.items()} or {0: worker}
    return HeldBlock(3, Block(4, 8), worker, Why.SAMPLED, named)


def part_drawn(auditor: Auditor, worker: str, *, steps: int = 2000, blocks: int = 8) -> float:
    """Blocks drawn for each step."""
    drawn = [
        auditor.draw(step, Block(start, start + 1), blocks, worker) for step in range(steps) for start in range(blocks)
    ]
    return sum(drawn) / steps


def test_as_many_are_drawn_as_was_asked_for_and_more_of_newcomers() -> None:
    auditor = Auditor(AuditConfig(fraction=0.05), KEY)
    assert part_drawn(auditor, "new") == pytest.approx(0.8, rel=0.15)
    auditor.agreed("known", "other")
    assert part_drawn(auditor, "known") == pytest.approx(0.05, rel=0.3)
    drawn = [auditor.draw(step, Block(0, 1), 1, "known", "new") for step in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.8, rel=0.15), "a newcomer had a hand in it"
    auditor.forget("known")
    assert part_drawn(auditor, "known") == pytest.approx(0.8, rel=0.15)
    assert part_drawn(Auditor(AuditConfig(fraction=0.0), KEY), "new") == 0


def test_a_block_is_drawn_by_its_share_of_the_step_and_by_the_key() -> None:
    config = AuditConfig(fraction=0.02)
    one, other = Auditor(config, KEY), Auditor(config, b"x" * 32)
    whole = [one.draw(step, Block(0, 8), 8, "a") for step in range(400)]
    half = [one.draw(step, Block(0, 4), 8, "a") for step in range(400)]
    assert sum(whole) == pytest.approx(2 * sum(half), rel=0.4)
    assert whole == [Auditor(config, KEY).draw(step, Block(0, 8), 8, "a") for step in range(400)]
    assert whole != [other.draw(step, Block(0, 8), 8, "a") for step in range(400)]


def test_an_equal_machine_looks_first_then_whoever_holds_least() -> None:
    auditor = Auditor(AuditConfig(), KEY)
    choices = [Choice("a", True, 0), Choice("b", False, 0), Choice("c", True, 2), Choice("d", True, 1)]
    block = held("a", b0="a", b1="d")  # d sent a part of it
    assert auditor.choose(block, choices) == "c"
    block.asked.add("c")
    assert auditor.choose(block, choices) == "b"
    block.asked.add("b")
    assert auditor.choose(block, choices) is None


def test_tolerances() -> None:
    auditor = Auditor(AuditConfig(tolerance=0.01), KEY)
    assert auditor.tolerance(equal_cpus=True, reduced_precision=False) == pytest.approx(1e-4)
    assert auditor.tolerance(equal_cpus=False, reduced_precision=False) == pytest.approx(1e-2)
    assert auditor.tolerance(equal_cpus=False, reduced_precision=True) == pytest.approx(1e-1)


@pytest.mark.parametrize(
    "config", [{"fraction": -0.1}, {"fraction": 1.1}, {"tolerance": 0}, {"tolerance": 1}, {"most_open": 0}]
)
def test_odd_settings_are_refused(config: dict[str, float]) -> None:
    (name,) = config
    with pytest.raises(UsageError, match=f"^{name} is .*; give a "):
        AuditConfig(**config)  # type: ignore[arg-type]
