"""PyTorch DDP on the throttled job, as torchrun's tutorial on fault tolerance does it: for churn.py and unequal.py.

Run by torchrun, one process a rank. Rank 0 saves model, optimizer and step every BENCH_SAVE_EVERY steps (atomically)
and notes every step in BENCH_FOLDER/steps; after a restart all ranks go on from the newest snapshot. Each rank leaves
its process id in the folder. ``Elastic`` is the parent's side: it starts torchrun, kills ranks, reads what was done.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

import throttled


def torchrun() -> None:
    """torchrun, which ends with whoever started it."""
    from torch.distributed.run import main as run

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    run(sys.argv[2:])


def main() -> None:
    """One rank. It ends when torchrun ends it, and with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    folder, every = Path(os.environ["BENCH_FOLDER"]), int(os.environ["BENCH_SAVE_EVERY"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["BENCH_LEAF_S"] = os.environ["BENCH_LEAF_S_OF"].split(",")[rank]
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    job = throttled.job()
    module = throttled.model()
    optimizer = throttled.sgd(module)
    step = load(folder / "snapshot", module, optimizer)
    model = DistributedDataParallel(module)
    mine = throttled.LEAF_SAMPLES * throttled.leaves_per_step() // ranks
    x, y = job.dataset.tensors
    while True:
        at = (step * ranks + rank) * mine % (len(x) - mine)
        optimizer.zero_grad()
        throttled.loss(model(x[at : at + mine]), y[at : at + mine]).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with (folder / "steps").open("a") as log:
                log.write(f"{time.monotonic()} {step}\n")
            if step % every == 0:
                save(folder / "snapshot", module, optimizer, step)


def save(path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors = {"step": torch.tensor(step)}
    tensors |= {f"model.{name}": tensor for name, tensor in module.state_dict().items()}
    for number, parameter in enumerate(module.parameters()):
        tensors[f"momentum.{number}"] = optimizer.state[parameter]["momentum_buffer"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path.with_suffix(".new"))
    with path.with_suffix(".new").open("rb") as written:
        os.fsync(written.fileno())
    path.with_suffix(".new").rename(path)


def load(path: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Takes up the snapshot, if there is one; its step."""
    if not path.exists():
        return 0
    tensors = load_file(path)
    module.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")})
    for number, parameter in enumerate(module.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = tensors[f"momentum.{number}"]
    return int(tensors["step"])


class Elastic:
    """torchrun on this file, with restarts. ``leaf_s`` is the throttle of each rank."""

    def __init__(self, folder: Path, *, leaf_s: Sequence[float], leaves: int, save_every: int = 10) -> None:
        self.folder, self._num_ranks = folder, len(leaf_s)
        folder.mkdir(parents=True)
        env = os.environ | {
            "BENCH_FOLDER": str(folder), "BENCH_SAVE_EVERY": str(save_every), "BENCH_LEAVES": str(leaves),
            "BENCH_LEAF_S_OF": ",".join(map(str, leaf_s)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            # Otherwise all restarts share a store, and new ranks may read the addresses of dead ones there: they fail
            # to connect and are restarted, several times over.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        command = [
            sys.executable, __file__, "--torchrun", "--standalone", "--nproc-per-node", str(len(leaf_s)),
            "--max-restarts", "1000", __file__,
        ]  # fmt: skip
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=self._log, start_new_session=True, cwd=Path(__file__).parent
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(20)
        self._log.close()

    def steps(self) -> list[tuple[float, int]]:
        """(when, step) of every step that was done, those that were lost again included."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(when), int(step)) for when, step in (line.split() for line in lines if " " in line)]

    def play(self, seconds: float, kills_at_s: Sequence[float], seed: int) -> tuple[int, int]:
        """Kill a rank at these times after the first step; steps that stand after ``seconds``, and kills."""
        targets, waiting, kills = random.Random(f"{seed}:ranks"), list(kills_at_s), 0
        limit = time.monotonic() + 120
        while not (done := self.steps()):
            if time.monotonic() > limit or self._process.poll() is not None:
                raise SystemExit(f"torchrun did no step:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.02)
        began = done[0][0]
        while (now := time.monotonic() - began) < seconds:
            if waiting and waiting[0] <= now and (alive := self._pids()):  # none is while they are being restarted
                with suppress(ProcessLookupError):
                    os.kill(targets.choice(alive), signal.SIGKILL)
                    kills += 1
                waiting.pop(0)
            time.sleep(0.02)
        done = [step for when, step in self.steps() if when - began <= seconds]
        return done[-1] - self.steps()[0][1], kills

    def standstill_s(self, seconds: float) -> float:
        """The longest time without a step, in the ``seconds`` after the first one."""
        times = [when for when, _ in self.steps()]
        times = [when for when in times if when - times[0] <= seconds] + [times[0] + seconds]
        return max(after - before for before, after in pairwise(times))

    def _pids(self) -> list[int]:
        """Of ranks that are alive and ours."""
        found = []
        for path in self.folder.glob("pid-*"):
            pid = int(path.read_text() or 0)
            with suppress(OSError):
                if b"ddp.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found


if __name__ == "__main__":
    torchrun() if sys.argv[1:2] == ["--torchrun"] else main()
