"""The devices that a worker of this machine may compute with, and their memory."""

from __future__ import annotations

import torch

from w5xde_async.compute.engine import choose_device
from w5xde_async.compute.machine import available_memory_bytes
from w5xde_async.compute.program.program_job import device_memory_bytes
from w5xde_async.plan.island_choice import Devices


def devices_of(setting: str) -> Devices:
    """Those of ``--device``: under auto all CUDA devices, with the memory of the smallest; processes on a CPU (and on
    MPS) share what is available. Raises UsageError for a device that is not there."""
    device = choose_device(setting)
    if device.type != "cuda":
        return Devices(1, available_memory_bytes(), shared=True)
    numbers = range(torch.cuda.device_count()) if setting == "auto" else (device.index or 0,)
    each = [device_memory_bytes(torch.device("cuda", number)) for number in numbers]
    return Devices(len(each), min(each))
