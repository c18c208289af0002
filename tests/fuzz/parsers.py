"""Coverage-guided fuzzing of all that parses a peer's bytes: frames, messages, the table of states; programs; texts.

    pip install atheris
    PYTHONPATH=src:. python tests/fuzz/parsers.py -runs=10000000 -max_len=4096 tests/fuzz/corpus
    PYTHONPATH=src:. python tests/fuzz/parsers.py program -runs=10000000 -max_len=4096 tests/fuzz/programs
    PYTHONPATH=src:. python tests/fuzz/parsers.py text -runs=10000000 -max_len=4096 tests/fuzz/texts

What must hold is in ``targets``, ``program_targets`` and ``text_targets``. A finding is written to a file by libFuzzer
and becomes a test. The golden frames, or a few programs or texts, are the first inputs; what else the fuzzer keeps goes
to the corpus directory (``-merge=1 NEW OLD`` thins it out). Programs and texts are mutated as trees, 7 times in 10.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

Mutator = Callable[[bytes, int, Callable[[bytes], bytes]], bytes]


def main() -> None:
    if "program" in sys.argv[1:2]:
        del sys.argv[1]
        programs()
    elif "text" in sys.argv[1:2]:
        del sys.argv[1]
        texts()
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


def texts() -> None:
    import torch  # noqa: F401  (first, so that it is not instrumented)

    parsers = ["params.layout", "compute.batch", "compute.inner", "worker.executors.replicas"]
    with atheris.instrument_imports(include=[f"w5xde_async.{name}" for name in parsers]):
        from tests.fuzz.text_targets import SEEDS, mutated, text
    by_tree(text, mutated, SEEDS)


def programs() -> None:
    import torch  # noqa: F401  (first, so that it is not instrumented)

    with atheris.instrument_imports(include=["w5xde_async.compute.program.form"]):
        from tests.fuzz.program_targets import SEEDS, mutated, program
    by_tree(program, mutated, SEEDS)


def by_tree(target: Callable[[bytes], None], mutated: Mutator, seeds: Sequence[bytes]) -> None:
    """Set up for inputs that are changed as trees."""
    for directory in directories():
        for number, seed in enumerate(seeds):
            (directory / f"seed-{number}").write_bytes(seed)

    def mutate(text: bytes, max_size: int, seed: int) -> bytes:
        changed = mutated(text, seed, lambda given: bytes(atheris.Mutate(given, max_size)))
        return changed if len(changed) <= max_size else text

    atheris.Setup(sys.argv, target, custom_mutator=mutate)


if __name__ == "__main__":
    main()
