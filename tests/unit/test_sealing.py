"""The sandbox's filter, and who is told that there is none."""

from __future__ import annotations

import errno
import importlib
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from w5xde_async.compute.program import child, sandbox, sealing
from w5xde_async.errors import UsageError
from w5xde_async.worker import service
from w5xde_async.worker.config import WorkerConfig
from w5xde_async.worker.service import Worker

MACHINES = dict(sealing._MACHINES)


def verdict(program: list[bytes], number: int, architecture: int, *arguments: int) -> int:
    """What the kernel would make of one call: the filter's own small machine."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[*arguments, 0, 0, 0, 0, 0, 0][:6])
    value = at = 0
    while True:
        code, if_true, if_false, operand = struct.unpack("HBBI", program[at])
        at += 1
        if code == sealing._RETURN:
            return operand
        if code == sealing._LOAD:
            (value,) = struct.unpack_from("=I", data, operand)
            continue
        holds = {
            sealing._EQUAL: value == operand, sealing._AT_LEAST: value >= operand,
            sealing._ANY_BIT: bool(value & operand),
        }[code]  # fmt: skip
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_what_computing_takes_passes_and_all_else_ends_the_process(machine: str) -> None:
    column, architecture = MACHINES[machine]
    program = sealing._program(column, architecture, devices=False)
    for name, numbers in sealing._CALLS.items():
        number = numbers[column]
        if number is None or name in {"clone", "clone3", "prctl", "tgkill", "prlimit64"}:  # their arguments count
            continue
        expected = sealing._ALLOW if name in sealing._ALLOWED else sealing._KILL
        assert verdict(program, number, architecture) == expected, name
    known = {numbers[column] for numbers in sealing._CALLS.values()}
    for number in set(range(600)) - known:
        assert verdict(program, number, architecture) == sealing._KILL
    assert verdict(program, 0, 0x40000003) == sealing._KILL  # calls of 32 bits have other numbers


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_and_no_processes(machine: str) -> None:
    column, architecture = MACHINES[machine]
    clone = sealing._CALLS["clone"][column]
    assert clone is not None
    for devices in (True, False):
        program = sealing._program(column, architecture, devices=devices)
        assert verdict(program, clone, architecture, 0x3D0F00) == sealing._ALLOW
        assert verdict(program, clone, architecture, 17) == sealing._KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_are_read_and_not_set(machine: str) -> None:
    column, architecture = MACHINES[machine]
    number = sealing._CALLS["prlimit64"][column]
    assert number is not None
    for devices in (True, False):
        program = sealing._program(column, architecture, devices=devices)
        assert verdict(program, number, architecture, 0, 7, 0, 1 << 40) == sealing._ALLOW
        for pointer in (1, 1 << 32, 1 << 47):
            assert verdict(program, number, architecture, 0, 7, pointer, 0) == sealing._KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_with_devices_what_is_forbidden_ends_the_process_and_the_rest_passes(machine: str) -> None:
    column, architecture = MACHINES[machine]
    program = sealing._program(column, architecture, devices=True)
    for name in sealing._FORBIDDEN:
        number = sealing._CALLS[name][column]
        assert number is None or verdict(program, number, architecture) == sealing._KILL, name
    fails = sealing._ERRNO | errno.EPERM
    for name in sealing._DENIED:  # modes and times of files, other processes' priorities, memory that outlives this one
        number = sealing._CALLS[name][column]
        assert number is None or verdict(program, number, architecture) == fails, name
    affinity = sealing._CALLS["sched_setaffinity"][column]
    assert affinity is not None
    for pid, expected in ((0, sealing._ALLOW), (os.getpid(), sealing._ALLOW), (os.getppid(), fails)):
        assert verdict(program, affinity, architecture, pid) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_with_devices_no_descriptor_signals_a_process(machine: str) -> None:
    """``fcntl`` and ``ioctl`` are the driver's, but for what names a process to signal, or the signal."""
    column, architecture = MACHINES[machine]
    program = sealing._program(column, architecture, devices=True)
    fcntl, ioctl = {"x86_64": (72, 16), "aarch64": (25, 29)}[machine]
    for call, ends in ((fcntl, {8, 10, 15}), (ioctl, {0x8901, 0x8902})):
        for command in (*range(64), *range(0x8900, 0x8910), 1024, 1030, 0x5421):
            expected = sealing._KILL if command in ends else sealing._ALLOW
            assert verdict(program, call, architecture, 3, command) == expected, command
        for command in ends:  # the kernel does not see the upper half
            assert verdict(program, call, architecture, 3, command | 1 << 40) == sealing._KILL
    for command in (0xC0104621, 0x30000001, 25):  # nvidiactl's, nvidia-uvm's
        assert verdict(program, ioctl, architecture, 3, command) == sealing._ALLOW


def test_where_libraries_are_looked_for_may_be_read_while_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other folder: an empty one would be the one that the process is in, which is the root."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}::lib:")
    readable = child._needed_to_import()
    assert str(tmp_path) in readable
    assert not {"", "lib", "/"} & set(readable)


def test_the_numbers_are_the_kernels() -> None:
    """Against libseccomp, where it is installed; otherwise the rest of this file says what it can."""
    try:
        seccomp: Any = importlib.import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError):
        return
    for name, numbers in sealing._CALLS.items():
        for number, machine in zip(numbers, (seccomp.Arch.X86_64, seccomp.Arch.AARCH64), strict=True):
            found = seccomp.resolve_syscall(machine, name)
            if found != -1:  # or the call is younger than this libseccomp
                assert number == (found if found >= 0 else None), name


@pytest.mark.parametrize(("given", "there"), [("auto", True), ("auto", False), ("on", True), ("on", False)])
def test_who_needs_one_and_has_none_is_told_so(given: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "unsupported", lambda device: "" if there else "it is an abacus")
    config = WorkerConfig(device="cpu", sandbox=given, token=bytes(range(32)).hex())
    if there:
        assert Worker("example.org:5555", config=config)
        return
    with pytest.raises(UsageError, match=r"an abacus; give --job .* --sandbox off"):
        Worker("example.org:5555", config=config)
    assert Worker("example.org:5555", config=WorkerConfig(device="cpu", sandbox="off", token=bytes(range(32)).hex()))


def test_on_loopback_there_is_none_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "unsupported", lambda device: "it is an abacus")
    assert Worker("127.0.0.1:5555", config=WorkerConfig(device="cpu"))
    with pytest.raises(UsageError, match="abacus"):
        Worker("127.0.0.1:5555", config=WorkerConfig(device="cpu", sandbox="on"))


def test_compilers_do_not_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "unsupported", lambda device: "")
    with pytest.raises(UsageError, match="--compile starts compilers"):
        Worker("127.0.0.1:5555", config=WorkerConfig(device="cpu", sandbox="on", compile=True))


def test_elsewhere_it_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MPS" in sandbox.unsupported(torch.device("mps"))
    monkeypatch.setattr(sealing.sys, "platform", "darwin")
    assert "has no seccomp" in sandbox.unsupported(torch.device("cpu"))


def test_an_unknown_word_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="give auto, on or off"):
        WorkerConfig(sandbox="perhaps")
