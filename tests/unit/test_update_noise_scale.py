"""The gradient noise scale against its definition, and what the batch size does with it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from w5xde_async.store.state import pack_state, unpack_state
from w5xde_async.updates.noise_scale import GradientNoiseScale, GrowthRule, GrowthRuleConfig, learning_rate_factor


def stored(state: dict[str, Any]) -> Any:
    return unpack_state(*pack_state(state))


def steps(count: int, samples: list[int], *, noise: float, seed: int = 0) -> list[tuple[list[float], list[int], float]]:
    """Steps of leaves of so many ``samples`` each with gradient 1 and noise of variance ``noise`` per coordinate."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        leaves = [1.0 + (noise**0.5) * torch.randn(n, 50, generator=generator).mean(0) for n in samples]
        whole = torch.stack([n * leaf for n, leaf in zip(samples, leaves, strict=True)]).sum(0) / sum(samples)
        found.append(([float(leaf @ leaf) for leaf in leaves], samples, float(whole @ whole)))
    return found


def test_the_estimates_are_the_formula() -> None:
    """|G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b), S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B), B_noise of their EMAs."""
    scale, decay = GradientNoiseScale(0.9), 0.9
    square = trace = 0.0
    for squares, samples, step_square in steps(20, [4, 4, 4], noise=2.0):
        big, small, mean = 12, 4, sum(squares) / 3
        square = decay * square + (1 - decay) * (big * step_square - small * mean) / (big - small)
        trace = decay * trace + (1 - decay) * (mean - step_square) / (1 / small - 1 / big)
        assert scale.observe(squares, samples, step_square)
        assert scale.value == pytest.approx(max(trace, 0.0) / square, rel=1e-9)


@pytest.mark.parametrize("samples", [[4] * 8, [1, 2, 3, 10], [30, 1]])
def test_it_finds_what_was_planted_with_leaves_of_any_size(samples: list[int]) -> None:
    """Gradient 1 in 50 coordinates: |G|^2 = 50; variance 3 in each: S = 150; B_noise = 3."""
    scale = GradientNoiseScale(0.999)
    for squares, sizes, step_square in steps(3000, samples, noise=3.0):
        scale.observe(squares, sizes, step_square)
    assert scale.value == pytest.approx(3.0, rel=0.1)


def test_what_says_nothing_changes_nothing() -> None:
    scale = GradientNoiseScale()
    assert scale.value is None
    assert not scale.observe([1.0], [4], 1.0)
    assert not scale.observe([1.0, math.nan], [4, 4], 1.0)
    assert not scale.observe([1.0, 2.0], [4, 4], math.inf)
    assert scale.value is None
    with pytest.raises(ValueError, match="as many"):
        scale.observe([1.0, 2.0], [4], 1.0)
    with pytest.raises(ValueError, match="decay"):
        GradientNoiseScale(1.0)


def test_pure_noise_and_no_noise() -> None:
    scale = GradientNoiseScale(0.0)
    scale.observe([1.0, 1.0], [1, 1], 0.0)
    assert scale.value == math.inf
    scale.observe([1.0, 1.0], [1, 1], 1.0)
    assert scale.value == 0.0


def test_the_learning_rate_rule() -> None:
    assert learning_rate_factor(64, 128, 1e12, 1.0) == pytest.approx(2.0)
    assert learning_rate_factor(64, 128, 1e12, 0.5) == pytest.approx(2.0**0.5)
    assert learning_rate_factor(64, 128, math.inf, 0.5) == pytest.approx(2.0**0.5)
    assert learning_rate_factor(64, 128, 0.0, 1.0) == 1.0
    assert learning_rate_factor(100, 200, 200.0, 1.0) == pytest.approx((1 + 200 / 100) / (1 + 200 / 200))


def test_the_batch_doubles_up_to_the_noise_scale_and_never_over_the_cap() -> None:
    growth = GrowthRule(GrowthRuleConfig(batch_size=32, cap=300, patience=3, exponent=1.0))
    sizes, factor = [], 1.0
    for step in range(40):
        noise = None if step < 5 else 100.0 if step < 20 else 1e6
        changed = growth.update(noise)
        factor *= changed
        assert (changed != 1.0) == (growth.target_batch != (sizes[-1] if sizes else 32))
        sizes.append(growth.target_batch)
    assert sizes[4] == 32
    assert sizes[5:20] == [64] * 15  # 128 is over a noise scale of 100
    assert sizes[20:26] == [128] * 3 + [256] * 3
    assert sizes[-1] == 256  # 512 is over the cap
    expected = (1 + 100 / 32) / (1 + 100 / 64) * (1 + 1e6 / 64) / (1 + 1e6 / 128) * (1 + 1e6 / 128) / (1 + 1e6 / 256)
    assert factor == pytest.approx(expected)
    for _ in range(20):
        assert growth.update(1.0) == 1.0
    assert growth.target_batch == 256  # never down


def test_restored_they_go_on_alike() -> None:
    whole, first, second = ((GradientNoiseScale(), GrowthRule(GrowthRuleConfig(batch_size=1, cap=64, patience=4)))
                            for _ in range(3))  # fmt: skip
    observed = steps(40, [2, 2], noise=30.0)

    def drive(pair: tuple[GradientNoiseScale, GrowthRule], part: slice) -> list[tuple[float, int]]:
        seen = []
        for squares, samples, step_square in observed[part]:
            pair[0].observe(squares, samples, step_square)
            seen.append((pair[1].update(pair[0].value), pair[1].target_batch))
        return seen

    expected = drive(whole, slice(None))
    seen = drive(first, slice(17))
    for restored, kept in zip(second, first, strict=True):
        restored.load_state_dict(stored(kept.state_dict()))
    assert seen + drive(second, slice(17, None)) == expected
    assert expected[-1][1] > 4


@pytest.mark.parametrize("knobs", [{"batch_size": 0, "cap": 4}, {"batch_size": 8, "cap": 4}])
def test_settings_that_make_no_sense_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="batch_size lies"):
        GrowthRuleConfig(**knobs)
