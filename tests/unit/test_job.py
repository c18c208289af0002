"""Jobs: what they refuse, how they are found by name, the default reading of a batch."""

from __future__ import annotations

import gc
import importlib
import math
import pickle
import re
import sys
import threading
import weakref
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from transformers import BatchEncoding

from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.run.startup import prepare
from w5xde_async.errors import ExitCode, JobError
from w5xde_async.job import (
    Job,
    best_by,
    build_model,
    collated,
    copied_model,
    copy_among,
    copy_of_sample,
    load_job,
    loss_of,
    lost_modes,
    replica_of,
    require_job,
    step_function,
)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def model() -> nn.Module:
    return nn.Linear(2, 2)


DATA = TensorDataset(torch.zeros(10, 2), torch.zeros(10, dtype=torch.int64))


def job(**changes: Any) -> Job:
    return Job(**{"model": model, "dataset": DATA, "optimizer": sgd, "max_steps": 1, "batch_size": 4, **changes})


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


class Counted(Stream):
    def __len__(self) -> int:
        return 10


class Told(TensorDataset):
    def set_epoch(self, epoch: int) -> None:
        raise AssertionError("it is never called")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": 3}, "model is neither a module nor a function"),
        ({"optimizer": "sgd"}, r"optimizer is not a function; write optimizer=lambda model: torch.optim.SGD\(model"),
        ({"scheduler": 3}, "scheduler is not a function"),
        ({"loss": 5}, "loss is a int, not a function"),
        ({"loss": torch.nn.CrossEntropyLoss}, r"loss is a class; write loss=torch\.nn\.CrossEntropyLoss\(\)"),
        ({"dataset": {"x": [1], "y": [2]}}, "dataset is a dict, .* by number; give one of its parts, or of columns"),
        ({"step": "train"}, "step is a str, not a function"),
        ({"collate": 5}, "collate is a int, not a function"),
        ({"evaluate": 5}, "evaluate is a int, not a function"),
        ({"loss": nn.MSELoss(), "step": lambda m, b: m}, "both loss and step"),
        ({"batch_size": 0}, "batch_size is 0; give a whole number >= 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 4.0}, "batch_size is 4.0"),
        ({"microbatch_size": -1}, "microbatch_size is -1"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0"),
        ({"max_steps": None}, "it has no end; give Job\\(epochs"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"stop_when": 3}, "stop_when is not a function of the metrics"),
        ({"stop_when": bool}, "stop_when has nothing to go by; give evaluate"),
        ({"keep_best": "val_loss"}, "keep_best has nothing to go by; give evaluate"),
        ({"keep_best": "perplexity", "evaluate": dict}, "less of it is better .* write 'min:perplexity' or 'max:perp"),
        ({"keep_best": "max:", "evaluate": dict}, "keep_best is 'max:'; name a metric"),
        ({"keep_best": 3, "evaluate": dict}, "keep_best is 3; name a metric"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"precision": "fp64"}, "precision is 'fp64'; give fp32, bf16 or fp16"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808"),
        ({"seed": 1.0}, "seed is 1.0"),
        ({"gradient_clip_val": 0.0}, "gradient_clip_val is 0.0"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val is nan"),
        ({"gradient_clip_val": "1.0"}, "gradient_clip_val is '1.0'; give a number > 0"),
        ({"gradient_clip_val": True}, "gradient_clip_val is True; give a number > 0"),
        ({"gradient_clip_val": torch.ones(2)}, "gradient_clip_val is tensor"),
        ({"shuffle": "no"}, "shuffle is 'no'; give True or False"),
        ({"shuffle": None}, "shuffle is None; give True or False"),
        ({"drop_last": "false"}, "drop_last is 'false'; give True or False"),
        ({"dataset": iter(())}, "dataset is an iterator, which can be read once; give what makes it"),
        (
            {"dataset": Stream(), "max_steps": None, "epochs": 1},
            r"epochs cannot end it: the stream has no len\(\); give max_steps",
        ),
        ({"dataset": object()}, r"dataset has no dataset\[i\] and cannot be iterated"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
        (
            {"dataset": DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * len(DATA), 3))},
            "matter; its WeightedRandomSampler is not taken over: draw the samples' indices yourself, with a seed",
        ),
        (
            {
                "dataset": DataLoader(
                    DATA, batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * len(DATA), 3), 2, False)
                )
            },
            "its WeightedRandomSampler is not taken over",
        ),
        (
            {"dataset": DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, num_samples=9))},
            "its RandomSampler is not taken over",
        ),
        ({"dataset": DataLoader(DATA, shuffle=True)}, r"batch_size=\.\.\. where they matter$"),
        ({"dataset": DataLoader(DATA)}, "dataset is a DataLoader; give its dataset=loader.dataset, and collate"),
        ({"dataset": []}, "dataset is empty"),
        (
            {"dataset": Told(*DATA.tensors)},
            "one that is read by index is never told the epoch; make it an IterableDataset",
        ),
        ({"drop_last": True, "batch_size": 11}, "drop_last leaves no step: 10 samples, batch_size 11"),
        ({"microbatch_size": 5}, "a leaf of 5 samples"),
        ({"microbatch_size": 2, "accumulate_grad_batches": 3}, "a leaf of 6 samples"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_job_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        job(**change)
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("change", "microbatch", "leaf"),
    [
        ({"batch_size": 64}, 8, 8),  # an eighth
        ({"batch_size": 65}, 9, 9),
        ({"batch_size": 3}, 1, 1),
        ({"batch_size": 64, "accumulate_grad_batches": 2}, 4, 8),
        ({"batch_size": 64, "microbatch_size": 5, "accumulate_grad_batches": 3}, 5, 15),
    ],
)
def test_leaves_of_a_step(change: dict[str, int], microbatch: int, leaf: int) -> None:
    made = job(**change)
    assert (made.microbatch_samples, made.leaf_samples) == (microbatch, leaf)


# -- models


def test_a_factory_is_seeded_and_the_callers_state_is_kept() -> None:
    torch.manual_seed(9)
    expected = torch.rand(())
    torch.manual_seed(9)
    made = [build_model(job(seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(()), expected)
    weights = [module.state_dict()["weight"] for module in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_models_are_built_in_train_mode() -> None:
    assert build_model(job(model=nn.Linear(2, 2).eval())).training
    assert build_model(job(model=lambda: nn.Linear(2, 2).eval())).training


def test_a_factory_that_gives_no_module() -> None:
    with pytest.raises(JobError, match="the model function returned dict"):
        build_model(job(model=dict))


def test_a_factory_that_raises_is_told_what_it_raised_alone() -> None:
    with pytest.raises(JobError, match=r"the function raised ZeroDivisionError: [^;]*$"):
        build_model(job(model=lambda: 1 / 0))


# -- the default step


class Named(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        return {"logits": a + b, "other": 1}


def difference(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()


ONE, TWO, FIVE = torch.ones(1), torch.full((1,), 2.0), torch.full((1,), 5.0)


@pytest.mark.parametrize(
    ("module", "batch", "loss"),
    [
        (nn.Identity(), (FIVE, TWO), 3.0),
        (nn.Identity(), [FIVE, TWO], 3.0),
        (Named(), (ONE, TWO, FIVE), -2.0),
        (Named(), {"a": ONE, "b": FIVE, "labels": TWO}, 4.0),
        (Named(), {"b": FIVE, "a": ONE, "target": TWO}, 4.0),
    ],
)
def test_tuples_and_dicts(module: nn.Module, batch: Any, loss: float) -> None:
    assert float(loss_of(module, batch, difference)) == loss


def test_outputs_with_logits_as_an_attribute() -> None:
    class Output(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=x * 2)

    assert float(loss_of(Output(), (ONE, FIVE), difference)) == -3.0


def test_a_model_that_computes_its_own_loss() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return {"loss": (x - labels).sum()}

    assert float(loss_of(Own(), {"x": FIVE, "labels": ONE}, None)) == 4.0


@pytest.mark.parametrize("batch", [{"a": ONE}, ONE, "text", 3])
def test_batches_that_the_default_step_does_not_understand(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"give step="):
        loss_of(nn.Identity(), batch, difference)


def test_steps_with_and_without_metrics() -> None:
    loss, metrics = step_function(job(step=lambda module, batch: (ONE, {"a": 1.0})))(nn.Identity(), None)
    assert (loss, metrics) == (ONE, {"a": 1.0})
    assert step_function(job(step=lambda module, batch: ONE))(nn.Identity(), None) == (ONE, {})
    assert step_function(job(step=lambda module, batch: (ONE, None)))(nn.Identity(), None) == (ONE, {})
    assert step_function(job(loss=difference))(nn.Identity(), (FIVE, ONE)) == (torch.tensor(4.0), {})


# -- by name

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import w5xde_async
import beside

def made():
    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    return w5xde_async.Job(model=nn.Linear(2, 2), dataset=data, optimizer=lambda m: None, max_steps=1, batch_size=1)

job = made()
class Space:
    inner = job
number, nothing = 3, None
def wrong(): return 5
def raises(): return 1 / 0
def refuses(): return w5xde_async.Job(model=3, dataset=[1], optimizer=made)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    (tmp_path / "w5jobs.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "w5broken.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "w5syntax.py").write_text("x = \n")
    (tmp_path / "w5missing.py").write_text("import there_is_no_such_module\n")
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("w5") or name == "beside":
            del sys.modules[name]


@pytest.mark.parametrize(
    "reference",
    ["w5jobs.py:job", "w5jobs.py:made", "w5jobs:job", "w5jobs:made", "w5jobs:Space.inner", "./w5jobs.py:job"],
)
def test_a_job_by_name(folder: Path, reference: str) -> None:
    assert isinstance(load_job(reference), Job)


def test_a_module_level_model_is_the_same_at_every_start(folder: Path) -> None:
    first, second = (load_job(str(folder / "w5jobs.py:job")).model for _ in range(2))
    assert isinstance(first, nn.Module)
    assert isinstance(second, nn.Module)
    assert first is not second
    assert torch.equal(first.state_dict()["weight"], second.state_dict()["weight"])


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("", "is not FILE.py:NAME or MODULE:NAME"),
        ("w5jobs.py", "is not FILE.py:NAME or MODULE:NAME; for example train.py:job"),
        (":job", "is not FILE.py:NAME"),
        ("w5jobs.py:", "is not FILE.py:NAME"),
        ("nowhere.py:job", "there is no file nowhere.py; the current directory is"),
        ("w5nowhere:job", "there is no module w5nowhere; for a file write its name with .py"),
        ("w5jobs.nowhere:job", "there is no module w5jobs.nowhere"),
        ("w5jobs.py:jobs", "has no 'jobs'; it has job"),
        ("w5jobs.py:Space.outer", "has no 'Space.outer'"),
        ("w5jobs.py:number", "is a int, not a Job or a function"),
        ("w5jobs.py:nothing", "is None, not a Job or a function"),
        ("w5jobs.py:nothing.more", "has no 'nothing.more'"),
        ("w5jobs.py:wrong", "returned int; return a w5xde_async.Job"),
        ("w5jobs.py:raises", r"raised ZeroDivisionError: division by zero \(w5jobs.py:17\)"),
        ("w5jobs.py:refuses", "model is neither"),
        ("w5broken.py:job", r"importing w5broken.py raised ZeroDivisionError: division by zero \(w5broken.py:2\)"),
        ("w5broken:job", r"importing w5broken raised ZeroDivisionError: division by zero \(w5broken.py:2\)"),
        ("w5syntax.py:job", r"raised SyntaxError: .* \(w5syntax.py:1\)"),
        ("w5missing.py:job", "raised ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("w5missing:job", "importing w5missing raised ModuleNotFoundError"),
    ],
)
def test_names_that_cannot_be_loaded(folder: Path, reference: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        load_job(reference)


def test_a_job_file_may_load_another(folder: Path) -> None:
    (folder / "w5outer.py").write_text("from w5xde_async.job import load_job\njob = load_job('w5jobs.py:job')\n")
    assert isinstance(load_job("w5outer.py:job"), Job)


SOURCES = {
    "w5jobs.py": FILE + "from w5parts.losses import loss\nfrom w5parts import nets\n",
    "w5parts/__init__.py": "",
    "w5parts/losses.py": "from .scales import Scale\n\ndef loss(x, y):\n    return ((x - y) ** 2).mean()\n",
    "w5parts/scales.py": "class Scale: by = 1.0\n",
    "w5parts/nets.py": "import math\n",
    "w5unused.py": "",
}


def source_of(
    folder: Path, changed: Mapping[str, str] = MappingProxyType({}), reference: str = "w5jobs.py:job"
) -> bytes:
    """What ``load_job`` notes of the files, in a process that has loaded none of them."""
    for name, text in {**SOURCES, **changed}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    for name in [name for name in sys.modules if name.partition(".")[0] in ("w5jobs", "w5parts", "w5outer", "beside")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    return load_job(reference).source


@pytest.mark.parametrize(
    "name", ["w5jobs.py", "w5parts/losses.py", "w5parts/scales.py", "w5parts/nets.py", "beside.py"]
)
def test_a_job_knows_the_source_of_all_that_it_uses(folder: Path, name: str) -> None:
    """By whatever name it is loaded, from whatever folder, with other ends of lines."""
    source = source_of(folder)
    assert len(source) == 16
    assert source_of(folder, reference="w5jobs:job") == source
    assert source_of(folder, reference=f"{folder}/w5jobs.py:made") == source
    assert source_of(folder, {name: SOURCES.get(name, "").replace("\n", "\r\n")}) == source
    assert source_of(folder, {name: SOURCES.get(name, "") + "# another\n"}) != source
    assert source_of(folder, {name: SOURCES.get(name, "")}) == source


def test_what_a_job_does_not_use_is_not_its_source(folder: Path) -> None:
    source = source_of(folder)
    import w5unused

    assert source_of(folder, {"w5unused.py": "x = 1\n"}) == source
    assert load_job("w5jobs.py:job").source == source  # where its modules are loaded already
    assert sys.modules["w5unused"] is w5unused


def test_the_source_of_a_job_that_another_file_loads(folder: Path) -> None:
    outer = {"w5outer.py": "from w5xde_async.job import load_job\njob = load_job('w5jobs.py:job')\n"}
    source = source_of(folder, outer, "w5outer.py:job")
    assert load_job("w5outer.py:job").source == source
    assert (
        source_of(folder, outer | {"w5parts/losses.py": SOURCES["w5parts/losses.py"] + "# more\n"}, "w5outer.py:job")
        != source
    )
    assert load_job("w5jobs.py:job").source != source


def test_two_jobs_of_one_file_with_other_functions_have_other_sources(folder: Path) -> None:
    other = (
        "other = w5xde_async.Job(model=nn.Linear(2, 2), dataset=[1], optimizer=lambda m: None, loss=loss, max_steps=1)"
    )
    text = {"w5jobs.py": SOURCES["w5jobs.py"] + other}
    assert source_of(folder, text) != source_of(folder, text, "w5jobs.py:other")


def test_a_job_made_here_has_no_source_and_copies_keep_theirs(folder: Path) -> None:
    loaded = load_job("w5jobs.py:job")
    assert replace(loaded, seed=3).source == loaded.source
    assert Job(model=nn.Linear(2, 2), dataset=[1], optimizer=lambda m: None, max_steps=1).source == b""


def test_a_file_that_imports_from_its_package_is_to_be_written_as_a_module(folder: Path) -> None:
    (folder / "w5package").mkdir()
    (folder / "w5package" / "inner.py").write_text(FILE)
    (folder / "w5package" / "outer.py").write_text("from .inner import job\n")
    with pytest.raises(
        JobError, match=rf"relative import .*; in {re.escape(str(folder.resolve()))}, write w5package\.outer:job$"
    ):
        load_job(f"{folder}/w5package/outer.py:job")
    assert load_job("w5package.outer:job").batch_size


def test_so_is_one_in_a_package_of_a_package(folder: Path) -> None:
    (folder / "w5whole" / "part").mkdir(parents=True)
    for package in ("w5whole", "w5whole/part"):
        (folder / package / "__init__.py").touch()
    (folder / "w5whole" / "inner.py").write_text(FILE)
    (folder / "w5whole" / "part" / "outer.py").write_text("from ..inner import job\n")
    with pytest.raises(JobError, match=rf"; in {re.escape(str(folder.resolve()))}, write w5whole\.part\.outer:job$"):
        load_job(f"{folder}/w5whole/part/outer.py:job")
    assert load_job("w5whole.part.outer:job").batch_size


def test_a_default_device_other_than_the_cpu_is_refused(folder: Path) -> None:
    (folder / "w5device.py").write_text(f"{FILE}\nimport torch\ntorch.set_default_device('meta')\n")
    made = job()
    try:
        with pytest.raises(JobError, match=r"default device is meta; leave out torch\.set_default_device"):
            load_job("w5device.py:job")
        with pytest.raises(JobError, match="default device is meta"):
            require_job(made, "Coordinator")
    finally:
        torch.set_default_device(None)
    require_job(made, "Coordinator")


def test_a_file_that_fails_leaves_no_module_behind(folder: Path) -> None:
    with pytest.raises(JobError):
        load_job("w5broken.py:job")
    assert "w5broken" not in sys.modules


def test_a_file_named_like_a_module_does_not_take_its_place(folder: Path) -> None:
    """``json.py:job`` must not make the rest of the program import the user's file for ``json``."""
    import json

    for name, text in (("json", FILE), ("secrets", "1 / 0")):
        (folder / f"{name}.py").write_text(text)
    load_job("json.py:job")
    assert sys.modules["json"] is json
    import secrets

    with pytest.raises(JobError):
        load_job("secrets.py:job")
    assert sys.modules["secrets"] is secrets


@pytest.mark.parametrize(
    ("keep_best", "direction", "metric"),
    [
        ("loss", "min", "loss"), ("val_loss", "min", "val_loss"), ("accuracy", "max", "accuracy"),
        ("eval/acc", "max", "eval/acc"), ("max:val_loss", "max", "val_loss"), ("min:f1", "min", "f1"), ("f1", "", "f1"),
    ],
)  # fmt: skip
def test_what_is_best_is_known_by_the_metrics_name_or_said(keep_best: str, direction: str, metric: str) -> None:
    assert best_by(keep_best) == (direction, metric)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_no_copy_has_are_refused(hook: str) -> None:
    given = model()
    given.get_parameter(next(name for name, _ in given.named_parameters())).__getattribute__(hook)(lambda _: None)
    for replica in (True, False):
        with pytest.raises(
            JobError, match=r"has a hook on its gradient, which no copy of the model has; remove it, or give a func"
        ):
            build_model(
                Job(model=given, dataset=[1], optimizer=sgd, loss=nn.functional.mse_loss, epochs=1), replica=replica
            )


def _patched(model: nn.Module) -> None:
    original = model.forward

    def forward(x: Tensor) -> Any:
        return 2 * original(x)

    model.forward = forward  # type: ignore[method-assign]


_named: list[nn.Module] = []


def _by_name(model: nn.Module) -> None:
    _named[:] = [model]
    model[1].register_forward_hook(lambda module, inputs, output: _scaled(output))


def _scaled(output: Tensor) -> Tensor:
    return output * sum(parameter.sum() for parameter in _named[0].parameters())


class _Tripled(nn.Linear):
    """Its forward is one that was set, and copies have their own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.forward = MethodType(_tripled, self)  # type: ignore[method-assign]


class _First(nn.Module):
    def forward(self, given: tuple[Tensor, Any]) -> Tensor:
        return given[0]


def _tripled(module: nn.Linear, x: Tensor) -> Tensor:
    return 3 * nn.functional.linear(x, module.weight, module.bias)


@pytest.mark.parametrize(
    ("patch", "place"),
    [
        (lambda m: m[0].register_forward_hook(lambda _, i, o: o + m[1](o)), "a forward hook of module '0'"),
        (lambda m: m[0].register_forward_pre_hook(lambda _, i, own=[m[1]]: i), "a forward hook of module '0'"),
        (
            lambda m: m.register_forward_hook(partial(lambda by, _, i, o: o * m[1].bias + by, 1)),
            "a forward hook of module 'Sequential'",
        ),
        (lambda m: _patched(m[1]), "attribute 'forward' of module '1'"),
        (lambda m: setattr(m, "parts", {"b": lambda x: m[1](x)}), "attribute 'parts' of module 'Sequential'"),
        (lambda m: setattr(m[1], "parent", weakref.ref(m)), "attribute 'parent' of module '1'"),
        (lambda m: _by_name(m), "a forward hook of module '1'"),
    ],
)
def test_functions_that_every_copy_would_call_with_the_first_model_are_refused(patch: Any, place: str) -> None:
    given = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    patch(given)
    for replica in (True, False):
        with pytest.raises(JobError, match=f"model: {place} holds the model, or a part of it"):
            build_model(job(model=given), replica=replica)


class _Tagged(Tensor):
    """It has no ``new_empty`` that gives its kind, without which torch copies none."""


class _OfATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1).as_subclass(_Tagged))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


class _Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


class _Single(nn.Linear):
    def __deepcopy__(self, memo: object) -> _Single:
        return self


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_model_that_cannot_be_copied_is_refused_by_the_name_of_what_cannot() -> None:
    for replica in (True, False):
        with pytest.raises(JobError, match=r"model: 'scale' is a _Tagged, which cannot be copied; give a function"):
            build_model(job(model=_OfATensor()), replica=replica)
    locked = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), _Locked())
    with pytest.raises(JobError, match=r"of attribute 'lock' of module '1': TypeError: cannot pickle .*; give a func"):
        copied_model(locked)
    with pytest.raises(JobError, match=r"a copy of it has its parameter '0.weight' itself: what workers compute would"):
        build_model(job(model=nn.Sequential(_Single(2, 2))), replica=True)
    assert copied_model(_Single(2, 2).requires_grad_(False))


def test_memory_that_lacks_for_a_copy_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    given = nn.Linear(2, 2)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lacking)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        copied_model(given)


def test_of_a_made_model_that_cannot_be_copied_another_is_made() -> None:
    given = job(model=_OfATensor)
    first, x = build_model(given), torch.ones(1, 2)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.fill_(2.0)
    replica = replica_of(given, first)
    assert torch.equal(replica(x), first(x))
    assert not {*map(id, replica.parameters())} & {*map(id, first.parameters())}
    with pytest.raises(JobError, match="model: no copy can be made of 'scale', a _Tagged: RuntimeError"):
        replica_of(job(model=lambda: first), first)


def test_a_model_that_has_no_train_mode_is_refused() -> None:
    exported = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),)).module()
    for given in (exported, lambda: exported):
        with pytest.raises(JobError, match=r"model: GraphModule.train\(\) raised Not.*; give the module itself, not"):
            build_model(job(model=given))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_copy_in_torchscript_trains_its_own_parameters_which_parts_have_together() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    given = nn.Sequential(torch.jit.script(first), torch.jit.script(second), nn.Linear(2, 2))
    given[2].weight = first.weight
    for copied in (copied_model(given), copied_model(copied_model(given)), copied_model(torch.jit.script(given))):
        trained = [name for name, parameter in copied.named_parameters() if parameter.requires_grad]
        assert trained == ["0.weight", "1.bias", "2.bias"]
        copied(torch.ones(1, 2)).sum().backward()
        for name, parameter in copied.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.grad is not None) == (name in trained)
    assert all(parameter.grad is None for parameter in given.parameters())


def _closed() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made[0].register_forward_hook(lambda module, inputs, output: output * made[1].weight)
    return made


def test_a_replica_of_a_made_model_that_holds_itself_computes_with_its_own_parameters() -> None:
    given = job(model=_closed)
    first = build_model(given)
    with torch.no_grad():
        for number, tensor in enumerate((*first.parameters(), *first.buffers())):
            tensor.fill_(number + 1)
    replica, x = replica_of(given, first.eval()), torch.tensor([[1.0, 2.0]])
    assert not replica.training
    expected = first(x)
    assert torch.equal(replica(x), expected)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert torch.equal(replica(x), expected)
    with pytest.raises(JobError, match="model: its function gives the same parameters again, and a forward hook"):
        replica_of(job(model=lambda: first), first)


def test_a_sample_is_copied_without_the_table_that_it_is_a_row_of() -> None:
    table, array = torch.arange(80.0).view(20, 4), np.arange(80.0).reshape(20, 4)
    weights = torch.ones(2, requires_grad=True)
    got = [*copy_of_sample([{"row": table[3]}, array[3]]), *copy_of_sample((weights,))]
    assert torch.equal(got[0]["row"], table[3])
    assert got[0]["row"].untyped_storage().nbytes() == 4 * 4
    assert (got[1] == array[3]).all()
    assert got[1].base is None
    assert got[2] is not weights
    assert got[2].requires_grad
    assert got[2].is_leaf


def test_a_copy_of_a_sample_has_what_the_sample_has() -> None:
    """Attributes of tensors, themselves, and the same thing twice."""
    x, y = torch.ones(3), torch.zeros(2, requires_grad=True) * 2
    x.label, x.seen = 5, []  # type: ignore[attr-defined]
    for sample in (x, {"x": x}, SimpleNamespace(x=x), (x, 1)):
        got: Any = copy_of_sample(sample)
        found = getattr(got, "x", got["x"] if isinstance(got, dict) else got[0] if isinstance(got, tuple) else got)
        assert (found.label, found.seen, found is x, found.seen is x.seen) == (5, [], False, False)  # type: ignore[attr-defined]
    alike = copy_of_sample([(x, y), SimpleNamespace(x=x, y=y), x])
    assert alike[0][0] is alike[1].x is alike[2]
    assert alike[0][1] is alike[1].y
    x.me = x  # type: ignore[attr-defined]
    assert (own := copy_of_sample(x)).me is own is not x


def test_a_sample_that_holds_itself_is_copied() -> None:
    row: list[Any] = [torch.ones(2), [1]]
    record: dict[str, Any] = {"row": row, "pair": (row, 1)}
    row.append(record)
    record["me"] = record
    for sample in (row, record):
        got = copy_of_sample({"sample": sample})["sample"]
        record_, row_ = (got, got["row"]) if isinstance(got, dict) else (got[2], got)
        assert row_[2] is record_ is record_["me"] is not record
        assert record_["pair"][0] is row_ is not row
        assert row_[0] is not row[0]
        assert torch.equal(row_[0], row[0])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert type(copy_of_sample({"deep": deep})) is dict


def test_of_a_sample_with_a_table_that_all_have_its_own_values_alone_are_copied() -> None:
    class Tree:
        def __init__(self, depth: int) -> None:
            self.parts = [Tree(depth - 1), Tree(depth - 1)] if depth else []

    class Record:
        def __init__(self, number: int) -> None:
            self.ids, self.x, self.boxes, self.tree, self.me = [number] * 5000, torch.ones(2), {1: [2]}, tree, self
            self.table, self.words, self.none, self.own = table, words, none, Tree(10)

    tree, table, words, none = Tree(10), torch.zeros(1 << 20), {number: str(number) for number in range(5000)}, [0] * 9
    samples = [[Record(number)] for number in range(4)]
    record, got = samples[0][0], copy_among(samples, 0)[0]
    assert got is not record
    assert got.me is got
    for name in ("tree", "table", "words"):
        assert getattr(got, name) is getattr(record, name)
    for name in ("ids", "boxes", "none"):
        assert getattr(got, name) == getattr(record, name)
        assert getattr(got, name) is not getattr(record, name)
    assert got.boxes[1] is not record.boxes[1]
    assert got.x is not record.x
    assert got.own is not record.own
    assert got.own.parts[0].parts[0] is not record.own.parts[0].parts[0]
    many = set(range(5000))
    assert copy_of_sample(many) == many
    assert copy_of_sample(many) is not many


@pytest.mark.parametrize("number", range(4))
def test_what_some_samples_are_made_of_is_not_taken_for_what_all_have(number: int) -> None:
    """Several made of one row, beside each other, and the same one again."""
    rows = [list(range(3000)), list(range(4000))]
    samples = [{"row": rows[0], "of": 0}, {"row": rows[0], "of": 1}, {"row": rows[1], "of": 0}, {"row": rows[1]}]
    for among in (samples, samples[:1], [samples[number]] * 8):
        assert copy_among(among, number % len(among))["row"] is not among[number % len(among)]["row"]


class _Torn:
    """A sample that at times cannot say what it is made of, as an image whose file is cut short."""

    def __init__(self, torn: bool) -> None:
        self.x, self.torn = torch.ones(2), torn

    def __getstate__(self) -> dict[str, Any]:
        if self.torn:
            raise OSError("image file is truncated")
        return vars(self)


def test_a_sample_is_copied_whatever_lies_beside_it() -> None:
    good = _Torn(False)
    assert copy_of_sample(good, _Torn(True)).x is not good.x


def test_a_sample_that_is_copied_in_part_only_has_no_half_made_parts() -> None:
    """What was copied before something in an object could not be is not taken for a copy of it."""
    shared: dict[str, Any] = {"a": [1]}
    shared["open"] = (number for number in range(3))
    first, second = copy_of_sample([SimpleNamespace(held=shared), {"held": shared, "b": [2]}])
    assert first.held is second["held"] is not shared
    assert second["held"] == shared
    row = [1]
    stubborn = _Stubborn(row)
    got = copy_of_sample([stubborn, row])
    assert got[0] is stubborn
    assert got[0].row is row is not got[1]
    assert got[1] == [1]


class _Stubborn:
    """What it is made of can be copied, and it cannot."""

    def __init__(self, row: list[int]) -> None:
        self.row, self.me = row, self

    def __setstate__(self, state: object) -> None:
        raise TypeError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    first: Any
    second: Any


@dataclass(slots=True)
class Slotted:
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any


class Row(list[Any]):
    pass


class Named(dict[str, Any]):
    """``sample.first`` is ``sample["first"]``."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def _generated(draw: Random, depth: int) -> Any:
    """A sample, or a part of one, of one kind or another."""
    many = draw.choice((0, 1, 3, 3, 3, 1100, 2000))
    tokens = [draw.randrange(1000) for _ in range(many)]
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([
            lambda: tokens,
            lambda: 7,
            lambda: None,
            lambda: bytearray(tokens[0] % 256 for _ in tokens),
            lambda: array("q", tokens),
            lambda: deque(tokens),
            lambda: set(tokens),
            lambda: Counter(tokens),
            lambda: torch.tensor(tokens),
            lambda: torch.arange(60.0).view(6, 10)[draw.randrange(6)],
            lambda: np.array(tokens),
            lambda: np.arange(60.0).reshape(6, 10)[draw.randrange(6)],
            lambda: [[token, token] for token in tokens],
            lambda: {str(token): [token] for token in tokens},
            lambda: [Slotted(token, [token]) for token in tokens],
        ])()  # fmt: skip
    first, second = _generated(draw, depth - 1), _generated(draw, draw.randrange(depth))
    return draw.choice([
        lambda: (first, second),
        lambda: [first, second],
        lambda: {"first": first, "second": second},
        lambda: Pair(first, second),
        lambda: Plain(first, second),
        lambda: Slotted(first, second),
        lambda: Frozen(first, second),
        lambda: Row([first, second]),
        lambda: Named(first=first, second=second),
        lambda: OrderedDict(first=first, second=second),
        lambda: defaultdict(list, first=first, second=second),
        lambda: UserDict(first=first, second=second),
        lambda: UserList([first, second]),
        lambda: BatchEncoding({"first": first, "second": second}),
        lambda: deque([first, second]),
        lambda: SimpleNamespace(first=first, second=second),
        lambda: np.array([first, second, None], dtype=object),
    ])()  # fmt: skip


def _spoil(whole: object) -> None:
    """Change all that can be reached from it."""
    reached, waiting = {id(whole): whole}, [whole]
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if id(part) not in reached and not isinstance(part, type | ModuleType | FunctionType):
                reached[id(part)] = part
                waiting.append(part)
    for part in reached.values():
        if isinstance(part, Tensor | np.ndarray):
            part[...] = -1
        elif isinstance(part, array):
            part.append(-1)
        elif hasattr(part, "clear"):
            part.clear()
        elif isinstance(part, Slotted):
            part.first = part.second = -1
        elif hasattr(part, "__dict__"):
            vars(part).clear()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_collate_changes_of_its_copies_samples_are_what_they_were(seed: int) -> None:
    draw = Random(seed)
    samples = [_generated(draw, draw.randrange(1, 5)) for _ in range(4)]
    before = pickle.dumps(samples)
    collated(_spoil, samples)
    assert pickle.dumps(samples) == before
    got = [copy_among(samples, number) for number in range(4)]
    for made, sample in zip(got, samples, strict=True):
        assert type(made) is type(sample)
        assert repr(made) == repr(sample)


def test_only_a_collate_of_the_jobs_own_is_given_copies() -> None:
    """Torch's changes nothing."""
    asked = list[int]()

    class Sample(dict[str, Tensor]):
        def __deepcopy__(self, memo: object) -> Sample:
            asked.append(1)
            return Sample(self)

    def own(samples: list[Any]) -> Any:
        return default_collate([sample.pop("x") for sample in samples])

    samples = [Sample(x=torch.ones(2)), Sample(x=torch.zeros(2))]
    assert torch.equal(collated(None, samples)["x"], collated(default_collate, samples)["x"])
    assert not asked
    assert torch.equal(collated(own, samples), collated(own, samples))
    assert len(asked) == 4


def test_functions_that_hold_nothing_of_the_model_are_copied() -> None:
    by, teacher = 2.0, nn.Linear(2, 2)
    given = nn.Sequential(nn.Linear(2, 2), _Tripled(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    given[0].register_forward_hook(lambda module, i, o: o * by + module.bias + teacher(i[0]))
    given[1].register_forward_hook(lambda module, i, o: _tripled(module, o) / math.pi)  # names of this file
    given.append(nn.LSTM(2, 2))  # has weak references to its weights, and makes them anew in a copy
    given.append(_First())
    given[0].forward = partial(_tripled, given[0])
    given._compiled_call_impl = lambda *args: given.forward(*args)  # as ``given.compile()`` sets: no copy has it
    given[0].register_load_state_dict_post_hook(lambda module, keys: given.train())
    copied, x = build_model(job(model=given), replica=True), torch.ones(1, 2)
    before = copied(x)
    with torch.no_grad():
        for parameter in given.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), before)


# -- parts in eval mode --------------------------------------------------------------------------------------


def frozen(kind: type[nn.Sequential] = nn.Sequential, *off: int) -> nn.Sequential:
    model = kind(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Dropout(0.5), nn.Linear(2, 2))
    for number in off:
        model[number].eval()
    return model


class Keeps(nn.Sequential):
    """As the documents have it."""

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self[0].eval()
        return self


def test_parts_in_eval_mode_are_told_and_no_model_that_is_whole() -> None:
    end = (
        " in eval mode, and a step begins in training mode, as model.train() gives it: to keep it so, have train() of "
        "the model's class switch it off (docs/own-model.md)"
    )
    assert lost_modes(frozen(nn.Sequential, 0)) == f"0 is{end}"
    model = frozen(nn.Sequential, 0, 1)
    assert lost_modes(model) == f"0, 1 are{end}"
    assert [module.training for module in model] == [False, False, True]  # as they were
    assert lost_modes(frozen()) is lost_modes(frozen().eval()) is None  # as it is made, and as it is loaded


def test_the_start_tells_of_parts_in_eval_mode_which_its_class_may_keep() -> None:
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64))

    def told(**given: Any) -> tuple[list[str], list[str]]:
        job = Job(**{"dataset": data, "optimizer": sgd, "batch_size": 4, "max_steps": 2} | given)
        prepared = prepare(job, CoordinatorConfig(), None, lambda: "0" * 16)
        try:
            off = [name for name, module in prepared.spec.model.named_modules() if not module.training]
            return [note for note in prepared.resume.notes if "eval mode" in note], off
        finally:
            prepared.spec.close()

    for model in (frozen(nn.Sequential, 0), lambda: frozen(nn.Sequential, 0)):
        notes, off = told(model=model)
        assert notes == [lost_modes(frozen(nn.Sequential, 0))]
        assert not off

    def step(model: Any, batch: Any) -> Tensor:
        model[0].eval()
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    assert told(model=frozen(nn.Sequential, 0), step=step)[0] == []
    assert told(model=frozen(Keeps, 0)) == ([], ["0", "0.0", "0.1"])
