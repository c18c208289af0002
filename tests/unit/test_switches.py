"""What a process has told torch of kernels and precision: found, told to another process, taken back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.support import programs

from w5xde_async.compute.program import switches
from w5xde_async.compute.program.form import parse
from w5xde_async.compute.program.switches import _SWITCHES, Said, Switched, _read, _write, contradiction, said_here
from w5xde_async.compute.program.tracing import probe_batches, trace
from w5xde_async.errors import ProgramRefused, UsageError
from w5xde_async.job import build_model
from w5xde_async.params.layout import Layout

_TOLD = {
    "torch.set_float32_matmul_precision('high')": "float32_matmul_precision",
    "torch.set_float32_matmul_precision('medium')": "fp32_mkldnn_matmul",
    "torch.backends.cuda.matmul.allow_tf32 = True": "fp32_cuda_matmul",
    "torch.backends.cudnn.allow_tf32 = False": "cudnn_allow_tf32",
    "torch.backends.fp32_precision = 'tf32'": "fp32_generic",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": "fp32_mkldnn_matmul",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'": "fp32_cuda_conv",
    "torch.backends.mkldnn.enabled = False": "mkldnn",
    "torch.backends.mkldnn.deterministic = True": "mkldnn_deterministic",
    "torch.backends.nnpack.set_flags(False)": "nnpack",
    "torch.backends.cudnn.enabled = False": "cudnn",
    "torch.backends.cudnn.benchmark = True": "cudnn_benchmark",
    "torch.backends.cudnn.deterministic = True": "cudnn_deterministic",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False": "cublas_fp16_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": "cublas_bf16_reduction",
    "torch.backends.cuda.enable_flash_sdp(False)": "attention_flash",
    "torch.backends.cuda.enable_mem_efficient_sdp(False)": "attention_mem_efficient",
    "torch.backends.cuda.enable_math_sdp(False)": "attention_math",
    "torch.backends.cuda.enable_cudnn_sdp(False)": "attention_cudnn",
    "torch.use_deterministic_algorithms(True)": "deterministic",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "deterministic",
}

# A process of its own for all of them, in which each is said, found, taken back, told and found again.
_SCRIPT = """
import json, sys, warnings
import torch
from w5xde_async.compute.program.switches import Switched, said_here, _SWITCHES, _read, _write
warnings.simplefilter("ignore")
usual = _read(_SWITCHES)
found = {"": [said_here(), True, True]}
for told in json.loads(sys.argv[1]):
    exec(told)
    said, there = said_here(), _read(_SWITCHES)
    _write(tuple(usual.items()))
    quiet = said_here() == ()
    switched = Switched()
    switched.say(said)
    same = _read(_SWITCHES) == there
    switched.close()
    found[told] = [said, quiet and _read(_SWITCHES) == usual, same]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[list[object]], bool, bool]]:
    command = [sys.executable, "-c", _SCRIPT, json.dumps(list(_TOLD))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    read: dict[str, tuple[list[list[object]], bool, bool]] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    assert said_here() == ()


@pytest.mark.slow
def test_a_process_that_was_told_nothing_says_nothing(found: dict[str, tuple[list[list[object]], bool, bool]]) -> None:
    assert found[""][0] == []


@pytest.mark.slow
@pytest.mark.parametrize("told", _TOLD)
def test_what_is_told_is_found_and_another_process_has_it_so(
    told: str, found: dict[str, tuple[list[list[object]], bool, bool]]
) -> None:
    said, as_usual, same = found[told]
    assert _TOLD[told] in [name for name, _ in said]
    assert contradiction([(str(name), value) for name, value in said]) == ""
    assert as_usual
    assert same


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([("eval", True)], "no setting 'eval'"),
        ([("mkldnn", "off")], "mkldnn is not 'off'"),
        ([("deterministic", True)], "deterministic is not True"),
        ([("float32_matmul_precision", "none")], "float32_matmul_precision is not 'none'"),
        ([("fp32_cuda_matmul", "bf16")], "fp32_cuda_matmul is not 'bf16'"),
        ([("mkldnn", True), ("mkldnn", False)], "twice"),
    ],
)
def test_what_torch_does_not_know_is_refused(said: list[tuple[str, object]], reason: str) -> None:
    assert reason in contradiction(said)
    with pytest.raises(ProgramRefused, match=reason):
        parse(programs.document(said=said), programs.tiny_layout())


def test_it_is_as_it_was_once_the_last_has_gone() -> None:
    first, second, other = Switched(), Switched(), Switched()
    said = (("mkldnn", False), ("attention_flash", False))
    first.say(said)
    second.say(said)
    with pytest.raises(UsageError, match="a process for each"):
        other.say(())
    first.close()
    first.close()
    assert dict(said_here()) == dict(said)
    second.say((("nnpack", False),))  # it was the last one
    assert said_here() == (("nnpack", False),)
    second.close()
    other.say(())
    other.close()


@pytest.mark.parametrize(
    "said",
    [
        (("float32_matmul_precision", "high"),),
        (("fp32_mkldnn_matmul", "bf16"), ("float32_matmul_precision", "high")),
        (("fp32_cuda_conv", "ieee"), ("cudnn_allow_tf32", True), ("fp32_generic", "tf32")),
    ],
)
def test_part_of_the_precision_in_any_order_is_taken_back_whole(said: Said) -> None:
    before, switched = _read(_SWITCHES), Switched()
    try:
        switched.say(said)
        switched.close()
        assert _read(_SWITCHES) == before
    finally:
        _write(tuple(before.items()))


@pytest.mark.parametrize("error", [AttributeError("no _set_cudnn_enabled"), RuntimeError("no such build")])
def test_what_this_torch_cannot_be_told_is_refused_and_nothing_of_it_stays(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: object) -> None:
        raise error

    monkeypatch.setitem(_SWITCHES, "cudnn", _SWITCHES["cudnn"]._replace(write=write))
    switched = Switched()
    with pytest.raises(ProgramRefused, match="here cannot have cudnn False: no "):
        switched.say((("mkldnn", False), ("cudnn", False)))
    assert said_here() == ()
    switched.say((("nnpack", False),))
    switched.close()


def test_a_setting_that_this_torch_has_not_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> bool:
        raise AttributeError("no _get_cudnn_enabled")

    monkeypatch.setitem(_SWITCHES, "cudnn", _SWITCHES["cudnn"]._replace(read=read))
    assert said_here() == ()


@pytest.mark.slow
def test_a_program_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    job = programs.TRACEABLE["mlp"]()
    model = build_model(job)
    layout = Layout.of(model)
    batches = probe_batches(job, [job.microbatch_samples])
    assert parse(trace(job, model, layout, batches), layout).said == ()
    switched = Switched()
    switched.say((("attention_math", False),))
    try:
        assert parse(trace(job, model, layout, batches), layout).said == (("attention_math", False),)
    finally:
        switched.close()
    assert torch.backends.cuda.math_sdp_enabled()
    assert not switches.Switched._holders
