"""Every input that the fuzzer found worth keeping, again: see tests/fuzz/parsers.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.targets import GOLDEN, both

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


def test_the_kept_corpus_raises_nothing_but_remote_errors():
    kept = sorted(CORPUS.iterdir())
    assert len(kept) >= 50
    for path in kept:
        both(path.read_bytes())


@pytest.mark.parametrize("cut", range(0, 64, 3))
def test_golden_frames_cut_anywhere(cut: int):
    for golden in sorted(GOLDEN.glob("*.bin")):
        frame = golden.read_bytes()
        both(b"\0" + frame[:cut])
        both(b"\1" + frame[:cut] + frame)
