"""The two earlier systems' own snippets, as they are documented but for the import, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.facade import Data, Model, calls, no_secret_of_this_machine, node_for, serve, server_of
from torch import Tensor, nn
from torch.nn import functional as F

from w5xde_async.errors import UsageError
from w5xde_async.facade.guava import DistributedConfig, Orchestrator
from w5xde_async.telemetry.events import Event, StepCommitted, WorkerJoined

__all__ = ["calls", "no_secret_of_this_machine"]

pytestmark = [
    pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120),
    pytest.mark.usefixtures("no_secret_of_this_machine"),
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]

# -- W5XDE -------------------------------------------------------------------------------------------------

W5XDE = {"from w5xde import": "from w5xde_async.facade.w5xde import"}

SERVER = """
import torch
from w5xde import CentralServer

# Your PyTorch model
class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # ... your model definition ...

# Your PyTorch dataset
class YourDataset(torch.utils.data.Dataset):
    def __init__(self):
        # ... your dataset definition ...

# Initialize server
server = CentralServer(
    model=YourModel(),
    dataset=YourDataset(),
    batch_size=32,
    ip="0.0.0.0",  # Allow external connections
    port=5555
)
server.start()
"""

NODE_OF_A_CLASS = """
from w5xde import TrainingNode

node = TrainingNode(MODEL_CLASS)
node.train()
"""

NODE_WITH_METRICS = """
def track_loss(loss, batch_id):
    print(f"Batch {batch_id}: loss = {loss:.4f}")

def track_network(sent, received, comp_time, net_time, orig_size, comp_size):
    print(f"Network stats:")
    print(f"  Throughput: {(sent + received) / (1024 * net_time):.2f} KB/s")
    print(f"  Compression time: {comp_time:.3f}s")
    print(f"  Network time: {net_time:.3f}s")
    print(f"  Compression ratio: {orig_size/comp_size:.2f}x")

node = TrainingNode(
    model=YourModel(),
    server_address=('server_ip', 5555),
    collect_metrics=True
)
node.train(loss_callback=track_loss, network_callback=track_network)
"""

MODEL = """
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)
"""
DATASET = """
        self.x = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"input_ids": self.x[index], "labels": self.y[index]}
"""
NODE = f"""
import torch
from w5xde import TrainingNode

class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
{MODEL}
MODEL_CLASS = YourModel
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """``script(text, replaced)`` runs it as a program in ``tmp_path``."""
    with contextlib.ExitStack() as stack:
        yield lambda text, replaced, **env: stack.enter_context(Script(text, replaced, tmp_path, env))


class Script:
    """A snippet as a process; ``lines`` is what it has printed so far."""

    def __init__(self, text: str, replaced: dict[str, str], cwd: Path, env: dict[str, str]) -> None:
        for old, new in replaced.items():
            text = text.replace(old, new)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("W5XDE_", "MASTER_"))}
        path = cwd / f"snippet_{len(list(cwd.glob('snippet_*')))}.py"
        path.write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, "-u", path.name], cwd=cwd, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
            env=kept | {"HOME": str(cwd), "OMP_NUM_THREADS": "1"} | env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = 100.0) -> list[re.Match[str]]:
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(10)
            found = [match for line in tuple(self.lines) if (match := re.search(pattern, line))]
            if len(found) >= count:
                return found
            assert not ended, f"it ended before {count} x {pattern}:\n{''.join(self.lines[-30:])}"
            assert time.monotonic() < deadline, f"{len(found)} of {count} x {pattern}:\n{''.join(self.lines[-30:])}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_w5xde_s_snippets(script: Callable[..., Script], tmp_path: Path) -> None:
    """Open to others means TLS: the nodes of this machine find the join string by themselves."""
    port = str(free_port())
    filled = W5XDE | {
        "        # ... your model definition ...\n": MODEL,
        "        # ... your dataset definition ...\n": DATASET,
        "5555": port,
        "server_ip": "127.0.0.1",
    }
    server = script(SERVER, filled)
    server.wait_for(r"W5XDE_JOIN_FILE=checkpoints/join +TrainingNode\(model, \('.*', \d+\)\)")
    metrics = script(NODE + NODE_WITH_METRICS, filled)
    its_port = {"W5XDE_JOIN_FILE": str(tmp_path / "checkpoints" / "join")}  # which the snippet takes for 5555
    of_a_class = script(NODE + NODE_OF_A_CLASS, filled, **its_port)
    losses = [float(match[2]) for match in metrics.wait_for(r"^Batch (\d+_batch\d+): loss = ([\d.]+)", 250)]
    assert sum(losses[-40:]) < 0.9 * sum(losses[:40])
    assert all(float(match[1]) > 0 for match in metrics.wait_for(r"Throughput: ([\d.]+) KB/s", 200))
    assert {match[1] for match in metrics.wait_for(r"Compression ratio: ([\d.]+)x", 200)} == {"1.00"}
    server.wait_for(r"joined .* 2 workers")
    metrics.process.send_signal(signal.SIGINT)
    server.wait_for(r"left: drained")
    assert metrics.finish() != 0
    assert metrics.lines[-1].strip() == "KeyboardInterrupt"  # as in any script
    server.process.send_signal(signal.SIGINT)
    assert server.finish() == 0, "".join(server.lines[-20:])
    server.wait_for("Ctrl-C")
    assert of_a_class.process.poll() is None  # it looks for the server
    run = tmp_path / "checkpoints"
    assert list((run / "checkpoints").iterdir())
    assert (run / "model.safetensors").exists()


def test_a_criterion_of_the_server_goes_to_the_nodes(calls: Any) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.8]), label_smoothing=0.1)
    losses = []
    for given in (None, criterion):  # to the node
        server = server_of(None, criterion=criterion, max_steps=3)
        running, events = serve(calls, server)
        node_for(server, criterion=given).train()
        assert running.result(20).step == 3
        losses.append([event.loss for event in events if isinstance(event, StepCommitted)])
    assert losses[0] == losses[1]
    fresh = server_of(None, criterion=criterion).model
    assert isinstance(fresh, Model)
    assert losses[0][0] != pytest.approx(F.cross_entropy(fresh(Data().x), Data().y).item(), abs=0.02)


# -- Guava -------------------------------------------------------------------------------------------------

GUAVA = {"from distrib_train_net import": "from w5xde_async.facade.guava import"}

LOCAL = """
from distrib_train_net import DistributedConfig, Orchestrator
import torch.nn as nn

# Your model
class MyTransformer(nn.Module):
    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.transformer = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, nhead=8),
            num_layers=6
        )
        self.output = nn.Linear(d_model, vocab_size)
    
    def forward(self, x):
        x = self.embedding(x)
        x = self.transformer(x)
        return self.output(x)

# Configure distributed training
config = DistributedConfig(
    vocab_size=50000,
    d_model=512,
    batch_size=32,
    data_parallel=True,  # Use data parallelism
    num_workers=torch.cuda.device_count()
)

# Create orchestrator
orchestrator = Orchestrator(config)

# Register your model
model = MyTransformer(config.vocab_size, config.d_model)
orchestrator.register_model(model)

# Start training
orchestrator.start_training(your_dataloader, num_epochs=10)
"""  # noqa: W293

MULTI_MACHINE = """
from distrib_train_net import DistributedConfig, Orchestrator

config = DistributedConfig(
    vocab_size=50000,
    d_model=512,
    num_workers=4,  # Total GPUs across all machines
    master_ip="192.168.1.100",
    master_port=29500,
    data_parallel=True
)

orchestrator = Orchestrator(config, mode='orchestrator')
orchestrator.register_model(model)
orchestrator.start_training(dataloader, num_epochs=10)
"""

IN_PIECES = """
from distrib_train_net import DistributedConfig, Orchestrator

config = DistributedConfig(
    vocab_size=50000,
    d_model=4096,  # Large model
    n_layers=48,
    num_workers=4,
    model_parallel=True,  # Split layers across GPUs
    pipeline_parallel=True,  # Enable pipelining
    micro_batches=4  # Pipeline micro-batches
)

orchestrator = Orchestrator(config)
orchestrator.register_model(large_model)
orchestrator.start_training(dataloader, num_epochs=10)
"""

WORKER = """
from distrib_train_net import NetworkWorker, DistributedConfig

config = DistributedConfig.from_env()  # Load from environment

# Start worker process
worker = NetworkWorker(
    gpu_id=0,  # Local GPU ID
    config=config,
    master_ip="192.168.1.100",
    master_port=29500
)

worker.connect_and_train()  # Auto-reconnects on failures
"""

DATALOADER = """
import torch
tokens = torch.randint(64, (256, 9), generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(tokens, (tokens + 1) % 64)
dataloader = your_dataloader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Embedding(64, 512), torch.nn.Linear(512, 64))
large_model = model
"""
SMALL = {"vocab_size=50000": "vocab_size=64", "num_layers=6": "num_layers=1"}  # for the time it takes
LOSS = r"^step \d+.* loss ([\d.]+(?:e-\d+)?)"


def falls(lines: list[re.Match[str]]) -> bool:
    return float(lines[-1][1]) < 0.8 * float(lines[0][1])


def test_guavas_snippet_for_one_machine(script: Callable[..., Script], tmp_path: Path) -> None:
    own_port = {"vocab_size=50000,": f"vocab_size=64, master_port={free_port()},"}
    ended = script(DATALOADER + LOCAL, GUAVA | own_port | SMALL)
    assert ended.finish() == 0, "".join(ended.lines[-30:])
    assert falls(ended.wait_for(LOSS, 2))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()


LAUNCH = """
#!/bin/bash
# launch_worker.sh

export CUDA_VISIBLE_DEVICES=0,1  # GPUs to use
export MASTER_IP=192.168.1.100
export MASTER_PORT=29500

python -m distrib_train_net.workers.network_worker \\
    --gpu-id 0 \\
    --master-ip $MASTER_IP \\
    --master-port $MASTER_PORT
"""


def test_guavas_script_that_launches_a_worker(script: Callable[..., Script], tmp_path: Path) -> None:
    """An orchestrator that is open to others; the worker's script is told no secret, and lies elsewhere."""
    port = str(free_port())
    filled = GUAVA | SMALL | {"192.168.1.100": "0.0.0.0", "29500": port, "num_workers=4": "num_workers=1"}
    launch = LAUNCH.replace("192.168.1.100", "localhost").replace("29500", port)
    launch = launch.replace("python -m distrib_train_net", f"exec {sys.executable} -m w5xde_async.facade.guava")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "launch_worker.sh").write_text(launch)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("W5XDE_", "MASTER_"))}
    for _ in range(2):  # the same again, in the same directory
        orchestrator = script(DATALOADER + MULTI_MACHINE, filled)
        worker = subprocess.run(
            ["/bin/sh", "launch_worker.sh"], cwd=elsewhere, env=kept | {"HOME": str(tmp_path)}, timeout=100, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert worker.returncode == 0, worker.stderr
        assert "joined run Sequential at " in worker.stderr
        assert "the run is finished: " in worker.stderr
        assert orchestrator.finish() == 0, "".join(orchestrator.lines[-30:])
        assert falls(orchestrator.wait_for(LOSS, 2))
    orchestrator.wait_for("trains anew")
    assert (tmp_path / "checkpoints.old-1" / "model.safetensors").exists()


def test_guavas_snippets_for_many_machines(script: Callable[..., Script]) -> None:
    port = str(free_port())
    filled = GUAVA | SMALL | {"192.168.1.100": "127.0.0.1", "29500": port, "num_workers=4": "num_workers=2"}
    orchestrator = script(DATALOADER + MULTI_MACHINE, filled)
    snippet = script(WORKER, filled)
    page = (ROOT / "docs" / "migrating-from-guava.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block.startswith("export MASTER_IP=192.168.1.100 MASTER_PORT=29500\npython -m w5xde_async.facade.guava ")
    for there, here in (("192.168.1.100", "127.0.0.1"), ("29500", port), ("\npython", f"\nexec {sys.executable}")):
        block = block.replace(there, here)
    command = subprocess.Popen(
        ["/bin/sh", "-c", block], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert orchestrator.finish() == 0, "".join(orchestrator.lines[-30:])
        assert falls(orchestrator.wait_for(LOSS, 2))
        orchestrator.wait_for(r"joined .* 2 workers")
        orchestrator.wait_for(rf"python -m w5xde_async.facade.guava --master-ip 127.0.0.1 --master-port {port}")
        assert snippet.finish(10) == 0
        assert command.wait(10) == 0
    finally:
        command.kill()
        command.wait(10)


def test_guavas_snippet_for_a_model_in_pieces(script: Callable[..., Script], tmp_path: Path) -> None:
    """One error, which says where it stands what is planned; nothing was opened."""
    ended = script(DATALOADER + IN_PIECES, GUAVA)
    assert ended.finish() == 1
    error = ended.lines[-1]
    assert "ParallelismMissing: model_parallel=True, pipeline_parallel=True: " in error
    named = re.search(r'"(.+)" in (docs/.+\.md)', error)
    assert named is not None, error
    assert f"\n## {named[1]}\n" in (ROOT / named[2]).read_text()
    assert not (tmp_path / "checkpoints").exists()


class Branching(nn.Module):
    """Looks at values: no program can be made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out * 2 if float(x.sum()) > 0 else out


@pytest.mark.parametrize("model", [Model, Branching])
def test_several_workers_on_one_machine(model: type[nn.Module], tmp_path: Path) -> None:
    """As processes where the step can be made a program, else in this one."""
    config = DistributedConfig(num_workers=2, master_port=0, checkpoint_dir=str(tmp_path), batch_size=8)
    orchestrator = Orchestrator(config)
    orchestrator.register_model(model())
    events: list[Event] = []
    orchestrator.bus.subscribe(events.append)
    data = Data()
    result = orchestrator.start_training(torch.utils.data.TensorDataset(data.x, data.y), 2)
    assert result.outcome == "finished"
    joined = [event for event in events if isinstance(event, WorkerJoined)]
    assert [event.name for event in joined] in (["local-0", "local-1"], ["local-1", "local-0"])
    with pytest.raises(UsageError, match="no memory profile"):
        orchestrator.memory_report()


DAEMONS = """
import sys, threading
import torch
from torch.utils.data import TensorDataset
from w5xde_async.facade.w5xde import CentralServer, TrainingNode

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
data = TensorDataset(torch.randn(2000, 64), torch.randint(10, (2000,)))
server = CentralServer(model, data, batch_size=64, port=0, checkpoint_dir=None, log="silent")
threading.Thread(target=server.start, daemon=True).start()
server.listening.wait()
node = TrainingNode(model, ("localhost", server.port), log="silent")
pieces = threading.Semaphore(0)
threading.Thread(target=node.train, args=[lambda loss, batch: pieces.release()], daemon=True).start()
for _ in range(50):
    pieces.acquire()
print("the script ends")
"""


def test_a_script_may_end_while_daemon_threads_train(tmp_path: Path) -> None:
    """Killed in the middle of an operation of torch's, such a thread would abort the process."""
    (tmp_path / "daemons.py").write_text(DAEMONS)
    ended = subprocess.run([sys.executable, "daemons.py"], cwd=tmp_path, timeout=100, capture_output=True, text=True,
                           check=False)  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the script ends\n", "")
