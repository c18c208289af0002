"""Every input that the fuzzer found worth keeping, again: see tests/fuzz/parsers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.program_targets import SEEDS, mutated, program
from tests.fuzz.targets import GOLDEN, both
from tests.fuzz.text_targets import SEEDS as TEXTS
from tests.fuzz.text_targets import mutated as mutated_text
from tests.fuzz.text_targets import text

FUZZ = Path(__file__).parents[1] / "fuzz"


def test_the_kept_corpus_raises_nothing_but_remote_errors():
    kept = sorted((FUZZ / "corpus").iterdir())
    assert len(kept) >= 50
    for path in kept:
        both(path.read_bytes())


@pytest.mark.parametrize("cut", range(0, 64, 3))
def test_golden_frames_cut_anywhere(cut: int):
    for golden in sorted(GOLDEN.glob("*.bin")):
        frame = golden.read_bytes()
        both(b"\0" + frame[:cut])
        both(b"\1" + frame[:cut] + frame)


def test_the_kept_texts_are_taken_or_refused():
    kept = sorted((FUZZ / "texts").iterdir())
    assert len(kept) >= 50
    for path in kept:
        text(path.read_bytes())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 1 << 32), min_size=1, max_size=4))
def test_texts_mutated_as_trees_are_taken_or_refused(data: bytes, seeds: list[int]):
    for seed in seeds:
        data = mutated_text(data, seed, lambda given: given[: seed % (len(given) + 1)])  # noqa: B023 - called at once
        text(data)


def test_the_kept_programs_are_taken_or_refused():
    kept = sorted((FUZZ / "programs").iterdir())
    assert len(kept) >= 50
    for path in kept:
        program(path.read_bytes())


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SEEDS), st.lists(st.integers(0, 1 << 32), min_size=1, max_size=4))
def test_programs_mutated_as_trees_are_taken_or_refused(text: bytes, seeds: list[int]):
    for seed in seeds:
        text = mutated(text, seed, lambda given: given[: seed % (len(given) + 1)])  # noqa: B023 - called at once
        program(text)
