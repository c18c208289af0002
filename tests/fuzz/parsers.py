"""Coverage-guided fuzzing of everything that parses a peer's bytes: frames, messages, the table of states; programs.

    pip install atheris
    PYTHONPATH=src:. python tests/fuzz/parsers.py -runs=10000000 -max_len=4096 tests/fuzz/corpus
    PYTHONPATH=src:. python tests/fuzz/parsers.py program -runs=10000000 -max_len=4096 tests/fuzz/programs

What must hold is in ``targets`` and ``program_targets``. A finding is written to a file by libFuzzer and becomes a
test. The golden frames, or a few programs, are the first inputs; what else the fuzzer keeps goes to the corpus
directory (``-merge=1 NEW OLD`` thins it out). Programs are mutated as trees, seven times in ten.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris


def main() -> None:
    if "program" in sys.argv[1:2]:
        del sys.argv[1]
        programs()
    else:
        frames()
    atheris.Fuzz()


def directories() -> list[Path]:
    found = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    for directory in found:
        directory.mkdir(parents=True, exist_ok=True)
    return found


def frames() -> None:
    with atheris.instrument_imports(include=["w5xde_async.wire", "w5xde_async.errors"]):
        from tests.fuzz.targets import GOLDEN, both
    for directory in directories():
        for golden in GOLDEN.glob("*.bin"):
            frame = golden.read_bytes()
            (directory / f"golden-{golden.stem}-stream").write_bytes(b"\0" + frame)
            (directory / f"golden-{golden.stem}-header").write_bytes(frame[4:])
    atheris.Setup(sys.argv, both)


def programs() -> None:
    import torch  # noqa: F401  (first, so that it is not instrumented)

    with atheris.instrument_imports(include=["w5xde_async.compute.program.form"]):
        from tests.fuzz.program_targets import SEEDS, mutated, program
    for directory in directories():
        for number, text in enumerate(SEEDS):
            (directory / f"seed-{number}").write_bytes(text)

    def mutate(text: bytes, max_size: int, seed: int) -> bytes:
        changed = mutated(text, seed, lambda given: atheris.Mutate(given, max_size))
        return changed if len(changed) <= max_size else text

    atheris.Setup(sys.argv, program, custom_mutator=mutate)


if __name__ == "__main__":
    main()
