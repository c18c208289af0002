"""``python -m w5xde_async.compute.program JOB BUCKET_BYTES MICROBATCH``: trace a job; the coordinator's child.

The answer is one frame on standard output: PROGRAM with its buffers, or REFUSED with the reason. What the job's own
code prints goes nowhere, and it has nothing to read. Ends when standard input does: whoever asked is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace

from w5xde_async.users_code import take_stdin


def main() -> int:
    """Trace, answer."""
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=_end_with, args=(take_stdin(),), name="w5xde-parent", daemon=True).start()
    reference, bucket_bytes, microbatch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    import torch

    torch.set_num_threads(1)

    from w5xde_async.compute.program.carriage import buffers_of, digest_of
    from w5xde_async.compute.program.converting import NotTraceable
    from w5xde_async.compute.program.tracing import trace_job
    from w5xde_async.errors import RefusalCode, W5xdeError
    from w5xde_async.job import build_model, load_job
    from w5xde_async.params.layout import Layout
    from w5xde_async.wire.frame import encode
    from w5xde_async.wire.messages import Program, Refusal

    try:
        job = replace(load_job(reference), microbatch_size=microbatch)
        model = build_model(job)
        document = trace_job(job, model, Layout.of(model, bucket_bytes=bucket_bytes))
        chunks = encode(Program(digest_of(document)), buffers_of(document))
    except (NotTraceable, W5xdeError, ValueError) as error:
        chunks = encode(Refusal(RefusalCode.NO_PROGRAM, str(error)[:500], ""))
    with os.fdopen(answer, "wb") as out:
        for chunk in chunks:
            out.write(chunk)
    return 0


def _end_with(line: int) -> None:
    while os.read(line, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
