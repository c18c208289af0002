"""Nothing draws from the process's generators (``random``, numpy's, torch's) but through ``w5xde_async.randomness``:
while a block is computed they belong to it, and whoever draws meanwhile changes its numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "w5xde_async"

ALLOWED = {
    "randomness.py": "borrows them, and puts them back",
    "compute/program/runner.py": "the sandbox's own process, before its first block",
    "parallel/pipeline.py": "computes a block, and does a part of it again",
    "parallel/tensor_plan.py": "holds random_state",
}

#: Of ``random``, ``numpy.random`` and ``torch``: what makes or asks for no draw of the process's generator.
OWN = {"Random", "SystemRandom"}
NUMPY_OWN = {"BitGenerator", "Generator", "MT19937", "PCG64", "PCG64DXSM", "Philox", "RandomState", "SFC64",
             "SeedSequence", "default_rng"}  # fmt: skip
#: These draw from torch's, unless they are given a generator.
TORCH = {"bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
         "randn_like", "randperm"}  # fmt: skip
IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
TORCH_SEEDS = {"default_generator", "initial_seed", "manual_seed", "manual_seed_all", "seed", "set_rng_state"}


def findings(text: str) -> Iterator[str]:
    tree = ast.parse(text)
    full = _names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            name, method = _dotted(node.func, full), node.func.attr if isinstance(node.func, ast.Attribute) else ""
            draws = name.removeprefix("torch.") in TORCH if name.startswith("torch.") else method in IN_PLACE
            given = any(keyword.arg == "generator" for keyword in node.keywords)
            if (draws and not given) or name.startswith("torch.nn.init."):
                yield f"line {line}: {name or method}() without a generator"
        elif isinstance(node, ast.Attribute | ast.Name):
            name = _dotted(node, full)
            module, _, last = name.rpartition(".")
            if (
                (module == "random" and last not in OWN)
                or (module == "numpy.random" and last not in NUMPY_OWN)
                or (module.split(".")[0] == "torch" and last in TORCH_SEEDS)
            ):
                yield f"line {line}: {name}"


def _names(tree: ast.AST) -> dict[str, str]:
    """What each imported name is."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(node: ast.expr, full: dict[str, str]) -> str:
    """The whole name of what is imported; "" of anything else."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, full)
        return f"{owner}.{node.attr}" if owner else ""
    return full.get(node.id, "") if isinstance(node, ast.Name) else ""


def test_nothing_draws_from_the_processs_generators() -> None:
    found = {
        path.relative_to(SRC).as_posix(): found
        for path in sorted(SRC.rglob("*.py"))
        if (found := list(findings(path.read_text())))
    }
    assert {path: lines for path, lines in found.items() if path not in ALLOWED} == {}
    assert set(found) == set(ALLOWED)  # none is named that has no need to be


def test_the_check_finds_it() -> None:
    for text in (
        "import random\nrandom.uniform(0, 1)",
        "import random\ndraw = random.random",
        "import random as r\nr.shuffle(x)",
        "from random import choice\nchoice(x)",
        "import numpy as np\nnp.random.rand(3)",
        "import numpy\nnumpy.random.seed(0)",
        "from numpy.random import normal\nnormal()",
        "from numpy import random\nrandom.rand(3)",
        "import torch\ntorch.rand(3)",
        "import torch\ntorch.randperm(3, dtype=torch.int64)",
        "import torch\ntorch.manual_seed(0)",
        "import torch\ntorch.random.manual_seed(0)",
        "import torch\ntorch.cuda.manual_seed_all(0)",
        "import torch\ntorch.default_generator.get_state()",
        "from torch import randn\nrandn(3)",
        "x.uniform_(0, 1)",
        "x.y().normal_()",
        "from torch import nn\nnn.init.xavier_uniform_(w)",
    ):
        assert list(findings(text)), text


def test_the_check_leaves_alone() -> None:
    for text in (
        "import random\nrandom.Random(3).uniform(0, 1)",
        "from random import Random\nRandom(3).random()",
        "self.random.choice(x)",
        "def f(jitter):\n  return jitter.uniform(0.5, 1.0)",
        "import numpy as np\nnp.random.Philox(key=3)",
        "import numpy as np\nnp.random.default_rng(3).normal()",
        "import torch\ntorch.rand(3, generator=g)",
        "import torch\ntorch.Generator().manual_seed(0)",
        "import torch\ntorch.get_rng_state()",
        "x.normal_(generator=g)",
        "import secrets\nsecrets.randbits(8)",
    ):
        assert not list(findings(text)), text
