"""Coverage-guided fuzzing of everything that parses a peer's bytes: frames, messages, the table of states.

    pip install atheris
    PYTHONPATH=src:. python tests/fuzz/parsers.py -runs=10000000 -max_len=4096 tests/fuzz/corpus

What must hold is in ``targets``. A finding is written to a file by libFuzzer and becomes a test. The golden frames are
the first inputs; what else the fuzzer keeps goes to the corpus directory (``-merge=1 NEW OLD`` thins it out).
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["w5xde_async.wire", "w5xde_async.errors"]):
    from tests.fuzz.targets import GOLDEN, both


def main() -> None:
    for directory in [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]:
        directory.mkdir(parents=True, exist_ok=True)
        for golden in GOLDEN.glob("*.bin"):
            frame = golden.read_bytes()
            (directory / f"golden-{golden.stem}-stream").write_bytes(b"\0" + frame)
            (directory / f"golden-{golden.stem}-header").write_bytes(frame[4:])
    atheris.Setup(sys.argv, both)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
