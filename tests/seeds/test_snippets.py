"""Every snippet of the documents, the import alone changed, in processes of its own. Of W5XDE and of Guava, one is
run twice in one directory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.seeds import snippets
from tests.seeds.items import items
from tests.seeds.snippets import GUAVA, W5XDE
from tests.support.ports import free_port
from tests.support.scripts import ROOT, Script

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(180)]

Run = Callable[..., Script]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Run]:
    """``script(text, replaced, **environment)`` runs it as a program in ``tmp_path``."""
    with contextlib.ExitStack() as stack:

        def run(text: str, replaced: dict[str, str], **env: str) -> Script:
            for old, new in replaced.items():
                text = text.replace(old, new)
            path = tmp_path / f"snippet_{len(list(tmp_path.glob('snippet_*')))}.py"
            path.write_text(text)
            return stack.enter_context(Script([path.name], tmp_path, env))

        yield run


def losses(directory: Path) -> list[float]:
    """Of every step that the run in it has committed."""
    path = directory / "checkpoints" / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # a line may be half written
    records = [json.loads(line) for line in whole.splitlines()]
    return [record["loss"] for record in records if record["event"] == "step_committed"]


def fell(found: list[float]) -> bool:
    part = max(1, len(found) // 5)
    return len(found) > 4 and sum(found[-part:]) < 0.85 * sum(found[:part])


def test_the_documents_snippets_are_these() -> None:
    titles = {item.document for item in items()}
    assert {document for document, *_ in snippets.MISTAKES} <= titles
    assert not any(str(path) in vars(snippets).values() for path in (ROOT, Path.home()))


# -- W5XDE -------------------------------------------------------------------------------------------------

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
OPEN = {
    "        # ... your model definition ...\n": MODEL,
    "        # ... same model definition as server ...\n": MODEL,
    "        # ... your dataset definition ...\n": DATASET,
}
BEFORE = f"""
import torch
from w5xde import TrainingNode

class YourModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
{MODEL}
class YourDataset(torch.utils.data.Dataset):
    def __init__(self):
{DATASET}
MODEL_CLASS = YourModel
model, dataset = YourModel(), YourDataset()
"""


def until(directory: Path, steps: int, *running: Script) -> None:
    """Until the run there has so many steps."""
    deadline = time.monotonic() + 60
    while len(losses(directory)) < steps:
        for one in running:
            assert one.process.poll() is None, "".join(one.lines[-30:])
        assert time.monotonic() < deadline, f"{len(losses(directory))} steps"
        time.sleep(0.1)


def test_w5xde_as_documented(script: Run, tmp_path: Path) -> None:
    """Open to others means TLS: the nodes of this machine find the join string by themselves."""
    port = str(free_port())
    filled = W5XDE | OPEN | {"5555": port, "server_ip": "127.0.0.1"}
    server = script(snippets.SERVER, filled)
    server.wait_for(r"W5XDE_JOIN_FILE=checkpoints/join +TrainingNode\(model, \('.*', \d+\)\)")
    basic = script(snippets.NODE_SETUP, filled)
    metrics = script(BEFORE + snippets.NODE_WITH_METRICS, filled)
    server.wait_for(r"joined .* 2 workers")
    metrics.wait_for(r"^Batch (\d+_batch\d+): loss = ([\d.]+)", 100)
    assert all(float(match[1]) > 0 for match in metrics.wait_for(r"Throughput: ([\d.]+) KB/s", 100))
    assert {match[1] for match in metrics.wait_for(r"Compression ratio: ([\d.]+)x", 100)} == {"1.00"}
    until(tmp_path, 300, server, basic, metrics)
    metrics.process.send_signal(signal.SIGINT)
    server.wait_for(r"left: drained")
    assert metrics.finish() != 0
    assert metrics.lines[-1].strip() == "KeyboardInterrupt"  # as in any script
    server.process.send_signal(signal.SIGINT)
    assert server.finish() == 0, "".join(server.lines[-20:])
    server.wait_for("Ctrl-C")
    assert fell(losses(tmp_path))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()
    assert basic.process.poll() is None  # it looks for the server


def short(script: Run, tmp_path: Path, node: str) -> Script:
    """The three lines of a server, with a node that is told no address; the node."""
    filled = W5XDE | {"5555": str(free_port())}
    server = script(BEFORE + snippets.SHORT_SERVER, filled)
    server.wait_for("TrainingNode")
    join = {"W5XDE_JOIN_FILE": str(tmp_path / "checkpoints" / "join")}  # it takes the port for 5555
    working = script(BEFORE + node, filled, **join)
    until(tmp_path, 300, server, working)
    server.process.send_signal(signal.SIGINT)
    assert server.finish() == 0, "".join(server.lines[-20:])
    assert fell(losses(tmp_path))
    working.process.kill()
    return working


def test_w5xde_in_three_lines(script: Run, tmp_path: Path) -> None:
    for again in (False, True):
        short(script, tmp_path, snippets.NODE_OF_A_CLASS)
        assert (tmp_path / "checkpoints.old-1").exists() is again


def test_w5xde_with_compression(script: Run, tmp_path: Path) -> None:
    told = "node.train(loss_callback=lambda loss, batch_id: print(f'{batch_id} {loss:.4f}'))\n"
    node = short(script, tmp_path, snippets.NODE_THAT_COMPRESSES + told)
    assert len(node.found(r"^\d+_batch\d+ ")) > 20


# -- Guava -------------------------------------------------------------------------------------------------

DATALOADER = """
import torch
import torch.nn as nn
tokens = torch.randint(64, (256, 9), generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(tokens, (tokens + 1) % 64)
dataloader = your_dataloader = torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Embedding(64, 512), torch.nn.Linear(512, 64))
large_model = model
"""
SMALL = {"vocab_size=50000": "vocab_size=64", "num_layers=6": "num_layers=1"}  # for the time it takes
IMPORTED = "from distrib_train_net import DistributedConfig, Orchestrator\n"
TRAINED = """
from distrib_train_net import Orchestrator
orchestrator = Orchestrator(config)
orchestrator.register_model(model)
orchestrator.start_training(dataloader, num_epochs=10)
"""


def trained(script: Run, tmp_path: Path, text: str, replaced: dict[str, str], **env: str) -> Script:
    """Run it to its end, with the loss that fell and a model there."""
    ended = script(text, GUAVA | replaced, **env)
    assert ended.finish(100) == 0, "".join(ended.lines[-30:])
    assert fell(losses(tmp_path))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()
    return ended


def test_guava_on_one_machine(script: Run, tmp_path: Path) -> None:
    own_port = {"vocab_size=50000,": f"vocab_size=64, master_port={free_port()},"}
    trained(script, tmp_path, DATALOADER + snippets.LOCAL, own_port | SMALL)


def test_guava_on_many_machines(script: Run, tmp_path: Path) -> None:
    """A worker by the snippet, another by the command of the migration page."""
    page = (ROOT / "docs" / "migrating-from-guava.md").read_text(encoding="utf-8")
    block = next(text for text in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "MASTER" in text)
    assert block.startswith("export MASTER_IP=192.168.1.100 MASTER_PORT=29500\npython -m w5xde_async.facade.guava ")
    port = str(free_port())
    here = {"192.168.1.100": "127.0.0.1", "29500": port}
    orchestrator = script(
        DATALOADER + snippets.MULTI_MACHINE, GUAVA | SMALL | here | {"num_workers=4": "num_workers=2"}
    )
    snippet = script(snippets.WORKER, GUAVA | here)
    command = shell(block, here, tmp_path)
    assert orchestrator.finish() == 0, "".join(orchestrator.lines[-30:])
    orchestrator.wait_for(r"joined .* 2 workers")
    orchestrator.wait_for(rf"python -m w5xde_async.facade.guava --master-ip 127.0.0.1 --master-port {port}")
    assert snippet.finish(10) == 0, "".join(snippet.lines[-30:])
    assert command.wait(10) == 0
    assert fell(losses(tmp_path))


def shell(text: str, replaced: dict[str, str], home: Path) -> subprocess.Popen[bytes]:
    for old, new in (replaced | {"\npython ": f"\nexec {sys.executable} "}).items():
        text = text.replace(old, new)
    return subprocess.Popen(
        ["/bin/sh", "-c", text], cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=environment(home),
    )  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("W5XDE_", "MASTER_"))}
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT / "src")}


def test_guavas_launch_script(script: Run, tmp_path: Path) -> None:
    """An orchestrator that is open to others; the worker's script is told no secret, and lies elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    port = str(free_port())
    filled = GUAVA | SMALL | {"192.168.1.100": "0.0.0.0", "29500": port, "num_workers=4": "num_workers=1"}
    launch = snippets.LAUNCH
    for old, new in (
        GUAVA | {"192.168.1.100": "localhost", "29500": port, "python -m": f"exec {sys.executable} -m"}
    ).items():
        launch = launch.replace(old, new)
    (elsewhere / "launch_worker.sh").write_text(launch)
    orchestrator = script(DATALOADER + snippets.MULTI_MACHINE, filled)
    worker = subprocess.run(
        ["/bin/sh", "launch_worker.sh"], cwd=elsewhere, env=environment(tmp_path), timeout=100, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert worker.returncode == 0, worker.stderr
    assert "joined run Sequential at " in worker.stderr
    assert "the run is finished: " in worker.stderr
    assert "Warning" not in worker.stderr  # Python's own, of the document's module path
    assert orchestrator.finish() == 0, "".join(orchestrator.lines[-30:])
    assert fell(losses(tmp_path))
    assert (tmp_path / "checkpoints" / "model.safetensors").exists()


def test_guavas_configuration(script: Run, tmp_path: Path) -> None:
    """Every variable as the document exports it, then every argument."""
    exported = dict(re.findall(r"^export (\w+)=(\S+)", snippets.VARIABLES, re.MULTILINE))
    assert len(exported) == 15
    of_variables = "from distrib_train_net import DistributedConfig\nconfig = DistributedConfig.from_env()\n"
    port = {"from_env()": f"from_env(); config.master_port = {free_port()}"}
    trained(script, tmp_path, DATALOADER + of_variables + TRAINED, port, **exported)
    slower = {"learning_rate=3e-4": "learning_rate=3e-3"}  # so few steps show little else
    trained(script, tmp_path, DATALOADER + snippets.CONFIGURATION + TRAINED, {"29500": str(free_port())} | slower)


def test_guava_with_a_loader_and_a_model_of_ones_own(script: Run, tmp_path: Path) -> None:
    filled = {
        "        # Your architecture\n": "        self.layer = nn.Linear(10, 2)\n",
        "        return output": "        return self.layer(x)",
        "DistributedConfig(...)": f"DistributedConfig(learning_rate=0.01, master_port={free_port()})",
        "YourDataset(...)": "YourDataset()",
        "w5xde import TrainingNode": "w5xde_async.facade.w5xde import TrainingNode",
    }
    for again in (False, True):  # what was there is kept aside
        ended = trained(
            script, tmp_path, "import torch.nn as nn\n" + BEFORE + snippets.OWN_MODEL + snippets.LOADER, filled
        )
        assert (tmp_path / "checkpoints.old-1" / "model.safetensors").exists() is again
    ended.wait_for("trains anew")


def test_guavas_tips(script: Run, tmp_path: Path) -> None:
    """In the order of the document; what it changes in a config counts for the next training in the same directory."""
    prepared = IMPORTED + "orchestrator = Orchestrator(DistributedConfig())\n"
    again = f"""
config.learning_rate, config.master_port = 0.01, {free_port()}
model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
orchestrator = Orchestrator(config)
orchestrator.register_model(model)
orchestrator.enable_memory_profiling()
orchestrator.start_training(dataset, num_epochs=4)
"""
    text = DATALOADER + prepared + snippets.MEMORY + snippets.BATCH_SIZES + snippets.TIMEOUTS
    ended = trained(script, tmp_path, text + again + snippets.LACK_OF_MEMORY + again, {})
    assert ended.found("memory report: checkpoints/memory-orchestrator-")
    assert len(losses(tmp_path)) == 4 * 256 // 8  # of the smaller batch
    assert (tmp_path / "checkpoints.old-1").exists()
    assert not (tmp_path / "checkpoints.old-2").exists()


def test_guava_with_a_model_in_pieces(script: Run, tmp_path: Path) -> None:
    """As it stands there, but for the number of workers: for the time it takes."""
    here = {"vocab_size=50000,": f"vocab_size=64, master_port={free_port()}, learning_rate=1e-3,"}
    ended = trained(
        script, tmp_path, DATALOADER + IMPORTED + snippets.IN_PIECES, here | {"num_workers=4": "num_workers=2"}
    )
    ended.wait_for(r"joined .* cpu pp=2, .* 1 worker$")
    assert len(losses(tmp_path)) == 10 * 256 // (32 * 4)  # batches of 32, four in a pipeline


def test_guava_in_pieces_on_many_machines(script: Run, tmp_path: Path) -> None:
    """The snippet for many machines with every kind of parallelism in it; its workers are told of none."""
    here = {"192.168.1.100": "127.0.0.1", "29500": str(free_port())}
    split = {
        "num_workers=4": "num_workers=2, learning_rate=1e-2", "num_epochs=10": "num_epochs=3",  # for the time it takes
        "data_parallel=True": "data_parallel=True, model_parallel=True, pipeline_parallel=True, tensor_parallel=True, "
        "micro_batches=2",
    }  # fmt: skip
    orchestrator = script(DATALOADER + snippets.MULTI_MACHINE, GUAVA | SMALL | here | split)
    workers = [script(snippets.WORKER, GUAVA | here) for _ in range(2)]
    assert orchestrator.finish(100) == 0, "".join(orchestrator.lines[-30:])
    orchestrator.wait_for(r"joined .* cpu tp=2, .* 1 worker$")
    for worker in workers:
        assert worker.finish(30) == 0, "".join(worker.lines[-30:])
        worker.wait_for(r"waiting for the other workers that the model is divided among \(tp=2\)")
    assert fell(losses(tmp_path))


def test_guavas_tensor_parallelism(script: Run, tmp_path: Path) -> None:
    """The snippet of a model in pieces, on one machine."""
    here = {"vocab_size=50000,": f"vocab_size=64, master_port={free_port()}, learning_rate=1e-2,"}
    tensor = {"model_parallel=True": "tensor_parallel=True", "num_workers=4": "num_workers=2"}
    left_out = {"pipeline_parallel=True, ": "", "micro_batches=4": "", "num_epochs=10": "num_epochs=3"}
    ended = script(DATALOADER + IMPORTED + snippets.IN_PIECES, GUAVA | here | tensor | left_out)
    assert ended.finish(100) == 0, "".join(ended.lines[-30:])
    ended.wait_for(r"joined .* cpu tp=2, .* 1 worker$")
    assert fell(losses(tmp_path))
