"""The facades in real processes; the documents' own snippets are in tests/seeds."""

from __future__ import annotations

import subprocess
import sys
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
