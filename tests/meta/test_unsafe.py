"""Nothing is unpickled or evaluated, no shell is run, no error is swallowed whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src", "bench", "examples") for path in (ROOT / folder).rglob("*.py"))

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "sympify"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.save", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "sympy.sympify", "np.load",
    "numpy.load", "torch.jit.load", "torch.package.PackageImporter",
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (*names, *module, *[f"{m}.{n}" for m in module for n in names]):
                if name.split(".")[0] in MODULES or name in CALLS:
                    yield f"line {line}: imports {name}"
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS or name in BUILTINS or name.split(".")[-1] == "sympify":
                yield f"line {line}: calls {name}"
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield f"line {line}: shell="
                if (
                    keyword.arg == "weights_only"
                    and isinstance(keyword.value, ast.Constant)
                    and not keyword.value.value
                ):
                    yield f"line {line}: weights_only=False"
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or dotted(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(part, ast.Pass) for part in node.body):
                yield f"line {line}: swallows every error"


def test_nothing_unsafe() -> None:
    found = [f"{path.relative_to(ROOT)}: {what}" for path in FILES for what in findings(path.read_text())]
    assert found == []


def test_the_check_finds_it() -> None:
    for text in (
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "compile('1', '', 'eval')",
        "import os\nos.system('ls')",
        "run('ls', shell=True)",
        "run('ls', shell=flag)",
        "import yaml\nyaml.load(x)",
        "sympy.sympify('x')",
        "from sympy import sympify\nsympify('x')",
        "import shelve",
        "import dill",
        "import marshal",
        "f(weights_only=False)",
        "try:\n  f()\nexcept:\n  pass",
        "try:\n  f()\nexcept Exception:\n  pass",
    ):
        assert list(findings(text)), text


def test_the_check_leaves_alone() -> None:
    for text in (
        "model.eval()",
        "re.compile('x')",
        "torch.compile(m)",
        "run(['ls'], shell=False)",
        "try:\n  f()\nexcept KeyError:\n  pass",
        "try:\n  f()\nexcept Exception:\n  raise",
    ):
        assert not list(findings(text)), text
