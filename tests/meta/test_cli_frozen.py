"""The flags are an interface: what goes or changes its name breaks scripts. Change this list on purpose."""

from __future__ import annotations

import pytest

from w5xde_async.settings import CoordinatorSettings, WorkerSettings, flag_names
from w5xde_async.settings.flags import Program

ALWAYS = "--print-config --version --help --help-all"
COORDINATOR = """
--max-steps --epochs --max-time --override --evaluate --no-evaluate --code-free --no-code-free --max-leaf-failures
--init-from
--update --codec --downlink --feedback --no-feedback --inner-steps --outer-lr --outer-momentum --fragments --overlap
--mixing --results-per-step --max-staleness --staleness-exponent --average --quorum --data-dir
--update-device --target-batch --batch-patience
--norm-gate --audit-fraction --audit-tolerance --quarantine --no-quarantine
--host --port --token-file --tls-cert --tls-key --tls-ca-file --insecure --join-file --advertise
--heartbeat --silence --bucket-size --bulk-threads
--workers --worker-threads --min-workers --max-workers --numerics --grace --leases-ahead --short-steps
--name --run-dir --checkpoint-every --checkpoint-time --keep-checkpoints --durability --resume
--dashboard --no-dashboard --dashboard-address --tracker
--loader-threads --loader-processes --prefetch-leaves --max-bad-samples
--threads --loop --log --log-format --exit-on-drain --profile-memory --config --exit-with-stdin
"""
WORKER = """
--server --join-file --join --tls-cert --tls-key --tls-ca-file --insecure
--job --name --token-file --connect-timeout --lifetime --grace
--device --threads --link --sandbox --compile --deterministic --inline-block --memory-limit --data-dir
--local-data --loader-threads --loader-processes
--island --island-member --island-interface --watch-preemption --pp-schedule --pp-stages --checkpoint-activations
--loop --log --log-format --exit-on-drain --profile-memory --config --exit-with-stdin
"""


@pytest.mark.parametrize(("program", "flags"), [(CoordinatorSettings, COORDINATOR), (WorkerSettings, WORKER)])
def test_the_flags_are_these(program: type[Program], flags: str) -> None:
    assert set(flag_names(program)) == set(f"{flags} {ALWAYS}".split())
