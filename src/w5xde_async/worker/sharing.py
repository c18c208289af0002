"""The memory that a worker has together with a coordinator on the same machine, for one link.

The coordinator's parameters are seen in place of what the engine received them into; results are summed in vectors that
the coordinator reads. Where that cannot be, the link carries the bytes, and a line says why.
"""

from __future__ import annotations

from w5xde_async.compute.program.sandbox import Computing
from w5xde_async.hub.members.sharing import witness
from w5xde_async.params.flat import FlatState
from w5xde_async.params.layout import Layout
from w5xde_async.params.slots import SHARED_SLOTS, slot_bytes, slots_in
from w5xde_async.segments import Opened, Segment, Unshared
from w5xde_async.wire.handshake import NONCE_BYTES
from w5xde_async.wire.messages import Welcome
from w5xde_async.worker.executors.in_place import is_plain


def share(engine: Computing, welcome: Welcome, layout: Layout, nonce: bytes) -> Segment:
    """Let ``engine`` see the coordinator's parameters and sum in the segment that is returned; ``unshare`` ends it.

    ``nonce``: of this link's HELLO. On the compute thread. Raises Unshared: nothing has changed then.
    """
    if not welcome.memory:
        if not is_plain(welcome):
            raise Unshared("the run's rule or codec sends what lies in no memory")
        raise Unshared("the coordinator offers none: it is on another machine or has none, or the model is small")
    if not engine.can_share:
        raise Unshared(f"this worker computes on {engine.device}")
    parameters = Opened(welcome.memory, FlatState.nbytes(layout))
    try:
        nbytes = SHARED_SLOTS * slot_bytes(layout)
        results = Segment("results", nbytes, witness(parameters.secret[:NONCE_BYTES], nonce))
        try:
            engine.share(parameters, slots_in(layout, results.payload, SHARED_SLOTS))
        except BaseException:
            results.close()
            raise
    finally:
        parameters.close()
    return results


def unshare(engine: Computing) -> None:
    """Let ``engine`` have memory of its own again. On the compute thread."""
    engine.share(None)
