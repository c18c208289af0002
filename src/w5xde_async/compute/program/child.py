"""Where a stranger's program runs: ``python -P -m w5xde_async.compute.program.child CONTROL DEVICE THREADS MEMORY
DETERMINISTIC`` (0 or 1).

Started fresh by a worker (``sandbox``), with an environment of a few harmless names and no open file but a socket to
the worker. Imports, is told the precision, warms up whatever opens files or starts threads at its first use, closes the
doors (``sealing``), says so, and only then is told of a program. Ends when its standard input does: the worker is gone.

After the doors are closed nothing here may open a file: no import, no line of a traceback's source.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

_DESCRIPTORS = 64
_WORKER_GONE = 3  # exit code: nobody is there to read it, but for a fault of ours


def main() -> int:
    """Warm up, close the doors, serve."""
    for number in (signal.SIGINT, signal.SIGTERM):  # blocked so far, and what libraries start may unblock them
        signal.signal(number, signal.SIG_IGN)
    from w5xde_async.compute.program import channel, sealing

    descriptor, device, threads, memory_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    control = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_stdin, name="w5xde-parent", daemon=True).start()
    cuda = device.startswith("cuda")
    try:
        sealing.go_first()
        sealing.restrict_files(_needed_to_import(), _DEVICES if cuda else ("/dev/null",))
        # Libraries make folders for caches as they are imported, which nothing here may: they get one that is there.
        tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/"
        from w5xde_async.compute.program import runner  # takes long, while the worker still joins

        order = channel.order_of(descriptor)
        assert isinstance(order, channel.Warm)
        runner.warm_up(device, threads, order.precision, deterministic=sys.argv[5] == "1")
        _shut(control, cuda=cuda, memory_bytes=memory_bytes)
    except EOFError:
        return 0
    except Exception as error:
        with suppress(OSError):
            channel.send(descriptor, channel.Unsealed(f"{type(error).__name__}: {error}"[:1000]))
        return 1
    try:
        channel.send(descriptor, channel.Sealed())
        runner.serve(control)
    except Exception as error:  # nobody reads what it would print
        with suppress(OSError):
            channel.send(descriptor, channel.Broken(f"{type(error).__name__}: {error}"[:1000]))
        return 1
    return 0


def _end_with_stdin() -> None:
    with suppress(OSError):
        while os.read(0, 64):
            pass
    os._exit(_WORKER_GONE)


def _needed_to_import() -> list[str]:
    """Libraries, and what they ask of the system as they start."""
    searched = os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":")
    folders = {path for path in (*sys.path, sys.prefix, sys.base_prefix, sys.exec_prefix) if path}
    folders.update(filter(os.path.isabs, searched))
    return [
        *folders, "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/opt",
        "/etc/ld.so.cache", "/etc/ld.so.preload", "/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm",
        "/dev/urandom", "/nix/store",
    ]  # fmt: skip


def _shut(control: socket.socket, *, cuda: bool, memory_bytes: int) -> None:
    from w5xde_async.compute.program import sealing

    faulthandler.disable()
    warnings.simplefilter("ignore")
    # Messages of errors show lines of source, and imports look for files: both would be the end of this process.
    linecache.checkcache = _nothing
    linecache.updatecache = _no_lines
    if not cuda:
        sealing.close_descriptors([0, 1, 2, control.fileno()])
    sealing.limit(memory_bytes=0 if cuda else memory_bytes, descriptors=1 << 12 if cuda else _DESCRIPTORS)
    sealing.hide()
    if cuda:
        if not sealing.restrict_files(_needed_by_cuda(), _DEVICES):
            raise OSError("this kernel has no Landlock, and without it files cannot be kept from what drives a GPU")
    else:
        sealing.restrict_files()
    sys.meta_path[:] = [_NoImports()]
    sealing.filter_calls(devices=cuda)


_DEVICES = (
    "/dev/null", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset",
    "/dev/nvidia-caps", *[f"/dev/nvidia{number}" for number in range(16)],
)  # fmt: skip


def _needed_by_cuda() -> list[str]:
    """Libraries that the driver loads when it first needs them, and what it asks of the system."""
    import torch

    packages = Path(torch.__file__).parent
    libraries = [packages, packages.parent / "nvidia", packages.parent / "triton"]
    system = ("/usr/lib", "/usr/lib64", "/usr/local/cuda", "/lib", "/lib64", "/etc/ld.so.cache", "/proc/self",
              "/proc/driver/nvidia", "/proc/devices", "/sys/devices", "/sys/bus/pci")  # fmt: skip
    return [*map(str, libraries), *system]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_lines(*_: Any, **__: Any) -> list[str]:
    return []


class _NoImports:
    """Says what an import after sealing is: not found, without looking."""

    def find_spec(self, name: str, *_: Any) -> None:
        raise ImportError(f"{name} was not loaded before the doors were closed")


if __name__ == "__main__":
    sys.exit(main())
