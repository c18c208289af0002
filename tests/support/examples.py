"""Programs out of the documents, each in a process of its own that is forked from one that has imported everything.

    python -m tests.support.examples FOLDER...

Every folder has a file example.py, which is run there; what it writes goes to output.txt beside it. Exit code: how many
of them failed.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

__all__ = ["run"]


def run(folder: Path) -> int:
    """Run ``folder/example.py`` in a fork of this process; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(folder))
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])  # for its workers
        runpy.run_path("example.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import torch

    from w5xde_async import cluster
    from w5xde_async.telemetry import plot

    assert all((cluster, plot))
    torch.set_num_threads(1)  # nothing may have started a thread when it forks
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind([parameter]).step()  # an optimizer's first step imports much
    sys.exit(sum(bool(run(Path(folder).resolve())) for folder in sys.argv[1:]))
