"""Makes docs/notebooks/local_cluster.ipynb: its cells stand here, and it is executed.

    python docs/notebooks/make.py            # write it, with what it printed
    python docs/notebooks/make.py --check    # execute it; exit 1 where it fails, or where the file has other cells

What is committed is what a run printed; addresses and seconds differ from run to run and are not compared.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOK = Path(__file__).with_name("local_cluster.ipynb")
TIMEOUT_S = 120

TEXT, CODE = "text", "code"
CELLS = [
    (TEXT, """\
# A cluster in a notebook

`LocalCluster` is a coordinator and its workers inside the notebook's own event loop: no thread, no signal handler, and
`await` works at the top level of a cell. Workers of a `Job` object are tasks of this loop and take turns; they are for
trying things out. Others may join the run while it goes on: processes of this machine with the code of the job, those
without it, and other machines, where the cluster's `config` is made for them."""),
    (CODE, """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from w5xde_async import Bus, Job, LocalCluster
from w5xde_async.telemetry.events import StepCommitted

generator = torch.Generator().manual_seed(0)
kinds = torch.arange(1024) % 2
angle = 6 * torch.rand(1024, generator=generator)
spirals = torch.stack([angle * torch.cos(angle + 3.14 * kinds), angle * torch.sin(angle + 3.14 * kinds)], 1) / 6
spirals += 0.02 * torch.randn(1024, 2, generator=generator)


def job(epochs: int = 40) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)),
        dataset=TensorDataset(spirals, kinds),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=nn.functional.cross_entropy,
        batch_size=128,
        epochs=epochs,
        evaluate=lambda model: {"accuracy": (model(spirals).argmax(1) == kinds).float().mean().item()},
    )"""),
    (TEXT, "A cell that ends with the cluster shows how it stands, and where to watch it while it lives."),
    (CODE, """\
losses = []
bus = Bus()
bus.subscribe(lambda event: losses.append(event.loss) if isinstance(event, StepCommitted) else None)

cluster = await LocalCluster(job(), n_workers=2, dashboard="127.0.0.1:0", bus=bus).start()
await cluster.wait_for_workers(2)
cluster"""),
    (TEXT, "Training goes on while cells run. One more worker, in the middle of the run:"),
    (CODE, """\
await cluster.scale(3)
await cluster.wait_for_workers(3)
print("more workers may join at", cluster.address)"""),
    (CODE, """\
result = await cluster.wait()
await cluster.aclose()
result"""),
    (CODE, """\
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 2.5))
axes.plot(losses, linewidth=1)
axes.set(xlabel="step", ylabel="loss")
figure.tight_layout()
plt.show()"""),
    (TEXT, """\
## The same bits

Two workers began, a third came in the middle. One worker alone ends in the same parameters, to the last bit:"""),
    (CODE, """\
async with LocalCluster(job(), n_workers=1) as alone:
    again = await alone.wait()

assert again.digest == result.digest
assert losses[-1] < losses[0] / 4
result.digest[:12], again.digest[:12]"""),
]  # fmt: skip


def build() -> nbformat.NotebookNode:
    """The notebook before it is run."""
    cells = []
    for number, (kind, source) in enumerate(CELLS):
        cell = new_markdown_cell(source) if kind == TEXT else new_code_cell(source)
        cell["id"] = f"cell-{number}"  # a random one would change with every run
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in a kernel of this Python. Raises CellExecutionError."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        quiet = ["--Application.log_level=40"]  # its transport is loopback; it warns of that at every start
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, resources=place, record_timing=False, extra_arguments=quiet
        )
        client.execute()


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main(arguments: list[str]) -> int:
    notebook = build()
    if "--check" in arguments:
        committed = nbformat.read(NOTEBOOK, as_version=4)
        if sources(committed) != sources(notebook):
            sys.stderr.write(f"{NOTEBOOK.name} has other cells: run python docs/notebooks/make.py\n")
            return 1
        if not all(cell.outputs for cell in committed.cells if cell.cell_type == "code" and "plt.show" in cell.source):
            sys.stderr.write(f"{NOTEBOOK.name} was not executed\n")
            return 1
    execute(notebook)
    if "--check" not in arguments:
        nbformat.validate(notebook)
        nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
