"""How many results a second one coordinator takes in, and whether that holds from 2 members to 256.

A worker process holds all members. Each is a link of its own that went through the real handshake, and answers every
LEASE at once: the RESULT frames of a whole gradient (ones, prepared) and DONE. Nothing is computed on that side: the
coordinator is measured, as it decides who gets what, judges (with the defaults: norm gate and audits are on), adds,
updates and publishes. A step has as many leaves as there are members, and a lease holds one leaf. So each result stands
for the same frames, whatever the number of members: LEASE and PARAMS down, RESULT and DONE up.

``over_bare_*`` compares with a loop that decides nothing: the same frames of the same sizes, over the project's own
links, between the same two processes. It sends every member a LEASE and the PARAMS, waits for everybody's RESULT and
DONE, and begins again (it has to wait as well: the next PARAMS do not exist before the last RESULT). Rounds of both
take turns, each pair gives one ratio.

The models are those of ``models.py``; a gradient and the parameters have the same size:
  1k7    10-20-10, 430 parameters, 1,720 bytes; leaves of 32 samples (a LEASE of 1.5 KB)
  2m7    784-512-512-10, 669,706 parameters, 2,678,824 bytes; leaves of 1 sample (3.2 KB)
  43m6   a GPT of 10.9M parameters, 43.6 MB, AdamW; leaves of 1 sample. Few members: each has a gradient in memory

Figures: ``results_per_s_SIZE_MEMBERS`` and ``over_bare_SIZE_MEMBERS``; without a number of members: at the most that
were measured. ``flat_SIZE``: the rate at the most members over that at the fewest. ``cpu_us_SIZE_MEMBERS``: processor
time of the coordinator's process for each result, all its threads.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import uvloop

from models import Reply, Rig, make_job, serve
from report import Report, median, parser
from w5xde_async.coordinator.config import CoordinatorConfig
from w5xde_async.coordinator.service import Coordinator
from w5xde_async.errors import W5xdeError
from w5xde_async.job import Job
from w5xde_async.net.endpoint import connect, listen
from w5xde_async.net.link import Link
from w5xde_async.params.layout import Layout
from w5xde_async.plan.pacing import PacingConfig
from w5xde_async.telemetry.events import Bus, Event, StepCommitted
from w5xde_async.wire.frame import SESSION_CAPS, Buffer, BufferSpec, encode
from w5xde_async.wire.messages import Bye, Done, Lease, Message, Params, Ready, Result
from w5xde_async.worker.connection.handshake import join

JOBS = {"1k7": ("tiny", 32), "2m7": ("mlp", 1), "43m6": ("gpt", 1)}
MEMBERS = {"1k7": (2, 16, 64, 256), "2m7": (2, 16, 64, 256), "43m6": (2, 8)}
BUCKET_BYTES = CoordinatorConfig().bucket_bytes


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--child", action="store_true", help="(what the bench starts itself as)")
    flags.add_argument("--pairs", type=int, default=0, help="pairs of rounds for each figure (7; 3 with --quick)")
    flags.add_argument("--seconds", type=float, default=0.0, help="of each round, at least (3; 1.5 with --quick)")
    flags.add_argument("--sizes", nargs="+", choices=JOBS, default=list(JOBS), help="only these")
    flags.add_argument("--members", nargs="+", type=int, default=[], help="only so many")
    args = flags.parse_args()
    if args.child:
        serve({"ours": ours, "bare": bare, "members": members})
        return
    pairs, seconds = args.pairs or (3 if args.quick else 7), args.seconds or (1.5 if args.quick else 3.0)
    report = Report({"pairs": pairs, "seconds": seconds, "bucket_bytes": BUCKET_BYTES})
    with Rig(__file__, ["coordinator", "workers"]) as rig:
        for size in args.sizes:
            counts = tuple(args.members) or MEMBERS[size]
            for count in counts:
                compare(rig, report, size, count, pairs, seconds)
            most, fewest = (report.samples[f"results_per_s_{size}_{count}"] for count in (max(counts), min(counts)))
            report.add(f"results_per_s_{size}", most)
            report.add(f"over_bare_{size}", report.samples[f"over_bare_{size}_{max(counts)}"])
            report.add(f"flat_{size}", [median(most) / median(fewest)])
    report.show()
    report.write(args.json)


def compare(rig: Rig, report: Report, size: str, count: int, pairs: int, seconds: float) -> None:
    """Rounds of both kinds in turn."""
    ratios, rates, cpu = [], [], []
    for pair in range(pairs):
        found = {}
        for kind in ("ours", "bare") if pair % 2 == 0 else ("bare", "ours"):
            rig["coordinator"].tell(kind, size=size, count=count, seconds=seconds)
            port = rig["coordinator"].answer()["port"]
            rig["workers"].tell("members", size=size, count=count, port=port, bare=kind == "bare")
            found[kind] = rig["coordinator"].answer()
            rig["workers"].answer()
        rate = {kind: answer["results"] / answer["seconds"] for kind, answer in found.items()}
        ratios.append(rate["ours"] / rate["bare"])
        rates.append(rate["ours"])
        cpu.append(1e6 * found["ours"]["cpu_s"] / found["ours"]["results"])
    report.add(f"results_per_s_{size}_{count}", rates)
    report.add(f"over_bare_{size}_{count}", ratios)
    report.add(f"cpu_us_{size}_{count}", cpu)


def job(size: str, count: int) -> Job:
    """Steps of ``count`` leaves."""
    name, samples = JOBS[size]
    made = make_job(name, workers=count)
    return replace(made, microbatch_size=samples, batch_size=samples * count, max_steps=1 << 40, drop_last=True)


class Window:
    """Results and seconds between the first step that counts and the last, whole steps at both ends."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._steps, self._began, self._cpu = -max(3, 64 // count), 0.0, 0.0  # warm: pace, first judgements
        self.over = asyncio.Event()
        self.answer: dict[str, float] = {}

    def step(self) -> None:
        """One step more is complete."""
        self._steps += 1
        if self._steps == 0:
            self._began, self._cpu = time.perf_counter(), time.process_time()
        elif self._steps > 0 and (passed := time.perf_counter() - self._began) >= self._seconds and not self.answer:
            cpu_s = time.process_time() - self._cpu
            self.answer = {"results": self._steps * self._count, "seconds": passed, "cpu_s": cpu_s}
            self.over.set()


# -- the coordinator's process


def ours(reply: Reply, *, size: str, count: int, seconds: float) -> None:
    """A run."""
    config = CoordinatorConfig(
        port=0, insecure=True, resume="never", min_workers=count, max_workers=count, evaluate=False, silence_s=60.0,
        grace_s=0.5, pacing=PacingConfig(target_lease_s=0.0, min_lease_s=0.0),
    )  # fmt: skip

    async def run() -> None:
        window, bus = Window(count, seconds), Bus()

        def see(event: Event) -> None:
            if isinstance(event, StepCommitted):
                window.step()

        bus.subscribe(see)
        async with Coordinator(job(size, count), config=config, bus=bus) as coordinator:
            reply(port=coordinator.port)
            async with asyncio.timeout(100):
                await window.over.wait()
        reply(**window.answer)

    uvloop.run(run())


def bare(reply: Reply, *, size: str, count: int, seconds: float) -> None:
    """The same frames, from a loop that decides nothing."""
    made = job(size, count)
    layout = Layout.of(made.model(), bucket_bytes=BUCKET_BYTES)
    loader_rows = [tensor[: made.microbatch_size] for tensor in made.dataset.tensors]
    batch = [(_spec(rows), memoryview(rows.numpy()).cast("B")) for rows in loader_rows]
    params = [bytes(layout.state_nbytes(bucket)) for bucket in layout.buckets]
    into = memoryview(bytearray(max(layout.result_nbytes(bucket) for bucket in layout.result_buckets)))
    leases = itertools.count(1)

    async def run() -> None:
        window, links, ended = Window(count, seconds), [], asyncio.Event()

        async def on_link(link: Link) -> None:
            link.caps = SESSION_CAPS
            links.append(link)
            await ended.wait()

        async def exchange(link: Link, step: int, frames: Sequence[Buffer]) -> None:
            samples = (made.microbatch_size,)
            lease = encode(
                Lease(next(leases), step, step, 0, samples, 60.0, True, b"\x92\xa1u\x92\x91\xa1t\x91\xa1t"), batch
            )
            await link.send([*lease, *frames])
            while True:
                message, _, _ = await link.recv(lambda message, specs: [into[: specs[0].nbytes]])
                if isinstance(message, Done):
                    return

        listener = await listen("127.0.0.1", 0, on_link, max_strangers=count + 8, max_of_address=count + 8)
        reply(port=listener.port)
        while len(links) < count:  # noqa: ASYNC110 - they come one by one, and nothing else is to be done
            await asyncio.sleep(0.002)
        step = 0
        while not window.over.is_set():
            frames: list[Buffer] = []
            for number, data in enumerate(params):
                spec = BufferSpec("", "float32", (len(data) // 4,), "raw", len(data))
                frames += encode(Params(step, number, len(params), 1.0), [(spec, data)])
            await asyncio.gather(*(exchange(link, step, frames) for link in links))
            window.step()
            step += 1
        ended.set()
        await listener.aclose()
        reply(**window.answer)

    uvloop.run(run())


def _spec(rows: torch.Tensor) -> BufferSpec:
    nbytes = rows.numel() * rows.element_size()
    return BufferSpec("", str(rows.dtype).removeprefix("torch."), tuple(rows.shape), "raw", nbytes)


# -- the workers' process


def members(reply: Reply, *, size: str, count: int, port: int, bare: bool) -> None:
    """Links that answer at once, until they are closed."""
    layout = Layout.of(job(size, count).model(), bucket_bytes=BUCKET_BYTES)
    gradient = [torch.ones(bucket.numel) for bucket in layout.result_buckets]
    buckets = [
        (BufferSpec("", "float32", (ones.numel(),), "raw", 4 * ones.numel()), memoryview(ones.numpy()).cast("B"))
        for ones in gradient
    ]
    most = max(1 << 20, *(layout.state_nbytes(bucket) for bucket in layout.buckets))
    scratch = memoryview(bytearray(most))  # one for all: nobody looks at what comes

    def accept(message: Message, specs: tuple[BufferSpec, ...]) -> list[memoryview]:
        return [scratch[: spec.nbytes] for spec in specs]

    async def member(number: int, joined: Callable[[], Any]) -> None:
        link = await connect("127.0.0.1", port, timeout_s=10)
        try:
            if not bare:
                name = f"member{number:03}"
                told = await join(link, key=name, name=name, token="", terms={})
                await link.send(encode(Ready(told.welcome.fingerprint, "cpu", "bench", 1, "0")))
            link.caps = SESSION_CAPS
            joined()
            await answer(link)
        except W5xdeError:
            pass  # the coordinator has gone
        finally:
            link.abort()

    async def answer(link: Link) -> None:
        waiting: list[Lease] = []
        version, missing, coming = -1, 0, -1
        while True:
            message = (await link.recv(accept)).message
            if isinstance(message, Lease):
                waiting.append(message)
            elif isinstance(message, Params):
                if message.version != coming:
                    coming, missing = message.version, message.num_buckets
                missing -= 1
                if missing <= 0:
                    version = coming
            elif isinstance(message, Bye):
                return
            for lease in [lease for lease in waiting if lease.version <= version]:
                waiting.remove(lease)
                chunks: list[Buffer] = []
                for number, bucket in enumerate(buckets):
                    chunks += encode(Result(lease.lease, number), [bucket])
                losses = (1.0,) * len(lease.samples)
                chunks += encode(Done(lease.lease, losses, (), (), (), (), 0, 0.001, 0.0, version=version))
                await link.send(chunks)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for first in range(0, count, 16):  # an address may have only so many that have not been let in
                there = asyncio.Semaphore(0)
                batch = range(first, min(first + 16, count))
                for number in batch:
                    tasks.create_task(member(number, there.release))
                for _ in batch:
                    await there.acquire()

    uvloop.run(run())
    reply(ended=True)


if __name__ == "__main__":
    sys.exit(main())
