"""What codecs cost and save on real gradients: GB/s of float32 encoded and decoded-and-added, ratio, relative error.

    python bench/codecs.py [--quick] [--json FILE] [--codecs int8,topk:0.01] [--device cuda] [--threads 1]

The gradients are computed here: of the GPT with 10.9M parameters of ``models.py`` (after a few steps of AdamW, on its
synthetic text) and of the digits CNN of ``examples/digits.py``. They are cut into buckets as a run does, each with the
matrices that the layout says; a sweep encodes every bucket into pooled memory, decodes it, adds it. ``--threads``: so
many side by side, as a run's coordinator and workers do it, a bucket each. Figures without a prefix are the GPT's (more
than a cache holds); ``hot_``: its largest bucket alone, again and again; ``cnn_``: the CNN's; ``wide_``, on a device:
one bucket of 64 MiB, where kernels cost more than to start them.

- ``{codec}_encode_gb_s``, ``{codec}_decode_gb_s``, ``{codec}_add_gb_s``: bytes of float32 over the time of a sweep
- ``{codec}_ratio``: bytes of float32 over bytes of the encoding, everything included
- ``{codec}_error``: |decoded - gradient| / |gradient|
- ``feedback_{codec}_gb_s``: gradient to encoding with a residual, verdicts included
- ``lz4..._gain``: the codec inside's bytes over lz4's, each bucket compressed whether that pays or not
- ``batch_{what}_gain``, ``batch_{what}_gb_s``: the bytes of a batch over those of ``lz4-shuffle``, and its speed: what
  compressing a LEASE would save, and cost
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import lz4.block
import torch
from torch import Tensor, nn

from models import make_job
from report import Report, parser
from w5xde_async.codecs.codec import BytePool, Codec, Encoded
from w5xde_async.codecs.feedback import Feedback
from w5xde_async.codecs.lossless import Lz4
from w5xde_async.codecs.registry import codec
from w5xde_async.job import Job
from w5xde_async.openmp import side_by_side
from w5xde_async.params.layout import Layout

CODECS = (
    "raw,bf16,fp16,int8,int4,sign,topk:0.01,topk:0.1,sparseloco,"
    "lz4,lz4-shuffle,lz4-shuffle:bf16,lz4:int8,lz4:int4,lz4:topk:0.01"
)
FEEDBACK = ("int8", "topk:0.01", "sparseloco")


def gradients(job: Job, steps: int) -> list[Tensor]:
    """The buckets of one gradient after ``steps`` optimizer steps."""
    torch.manual_seed(0)
    model: nn.Module = job.model()
    optimizer = job.optimizer(model)
    layout = Layout.of(model)
    samples = job.microbatch_size or job.batch_size
    for step in range(steps + 1):
        rows = [job.dataset[(step * samples + index) % len(job.dataset)] for index in range(samples)]
        inputs, targets = (torch.stack(column) for column in zip(*rows, strict=True))
        optimizer.zero_grad()
        job.loss(model(inputs), targets).backward()
        if step < steps:
            optimizer.step()
    named = dict(model.named_parameters(remove_duplicate=False))
    groups = {group.index: torch.zeros(group.numel) for group in layout.groups if group.role == "grad"}
    for entry in layout.entries:
        gradient = named[entry.name].grad if entry.role == "grad" else None
        if gradient is not None:
            groups[entry.group][entry.offset : entry.offset + entry.numel] = gradient.flatten()
    return [
        groups[bucket.group][bucket.offset : bucket.offset + bucket.numel].clone()
        for bucket in layout.buckets
        if bucket.group in groups
    ]


def timed(action: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class Sweep:
    """One gradient under one codec."""

    def __init__(self, chosen: Codec, buckets: list[Tensor], pool: BytePool) -> None:
        self.codec, self.buckets, self.pool = chosen, buckets, pool
        self.encoded: list[Encoded] = []
        self.out = [torch.empty_like(bucket) for bucket in buckets]

        self.whole = 4 * sum(bucket.numel() for bucket in buckets)

    def encode(self) -> None:
        for old in self.encoded:
            self.pool.give(old.data)
        self.encoded = side_by_side(lambda bucket: self.codec.encode(bucket, self.pool), self.buckets, self.whole)

    def decode(self) -> None:
        pairs = list(zip(self.encoded, self.out, strict=True))
        side_by_side(lambda pair: pair[0].codec.decode(pair[0].data, pair[1]), pairs, self.whole)

    def add(self) -> None:
        pairs = list(zip(self.encoded, self.out, strict=True))
        side_by_side(lambda pair: pair[0].codec.add_to(pair[0].data, pair[1]), pairs, self.whole)

    def error(self) -> float:
        self.decode()
        wrong = sum(float((out - b).double().square().sum()) for out, b in zip(self.out, self.buckets, strict=True))
        return (wrong / sum(float(bucket.double().square().sum()) for bucket in self.buckets)) ** 0.5

    def nbytes(self) -> int:
        return sum(what.data.numel() for what in self.encoded)

    def gain(self, chosen: Lz4) -> float:
        """Bytes without compression over bytes with it, whether it pays or not."""
        plain = packed = 0
        for bucket in self.buckets:
            data = chosen.inner.encode(bucket, self.pool).data
            plain += data.numel()
            packed += chosen.compressed_nbytes(data.cpu())
            self.pool.give(data)
        return plain / packed


def rows(report: Report, names: list[str], buckets: list[Tensor], repeats: int, prefix: str) -> Iterator[str]:
    """Measure and tell, codec by codec."""
    device = buckets[0].device
    whole = 4 * sum(bucket.numel() for bucket in buckets)
    for name in names:
        sweep = Sweep(codec(name), buckets, BytePool(device=device))
        sweep.encode()
        error = sweep.error()
        speeds = []
        for act, what in ((sweep.encode, "encode"), (sweep.decode, "decode"), (sweep.add, "add")):
            act()
            samples = [whole / timed(act, device) / 1e9 for _ in range(repeats)]
            speeds.append(report.add(f"{prefix}{name}_{what}_gb_s", samples))
        ratio = report.add(f"{prefix}{name}_ratio", [whole / sweep.nbytes()])
        report.add(f"{prefix}{name}_error", [error])
        if isinstance(sweep.codec, Lz4):
            report.add(f"{prefix}{name}_gain", [sweep.gain(sweep.codec)])
        yield (f"| {name} | {ratio:.2f} | {speeds[0]:.2f} | {speeds[1]:.1f} | {speeds[2]:.1f} | {error:.2g} |")


def with_feedback(report: Report, name: str, buckets: list[Tensor], repeats: int) -> float:
    """Gradient to encoding, its residual made, its verdict told."""
    device, sizes = buckets[0].device, {index: bucket.numel() for index, bucket in enumerate(buckets)}
    worker = Feedback(codec(name), sizes, pool=BytePool(device=device))

    def submit() -> None:
        for index, bucket in enumerate(buckets):
            worker.encode(0, index, bucket)
        worker.settle(0, applied=True)

    submit()
    submit()
    whole = 4 * sum(bucket.numel() for bucket in buckets)
    samples = [whole / timed(submit, device) / 1e9 for _ in range(repeats)]
    return report.add(f"feedback_{name}_gb_s", samples)


def batches() -> dict[str, Tensor]:
    """What leases carry, a few MiB of each."""
    text = "".join(path.read_text() for path in sorted(Path(torch.__file__).parent.glob("*.py")))[: 1 << 21]
    words = text.split(" ")
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    found = {
        "bytes_as_int64": torch.tensor(list(text.encode()[: 1 << 18])),
        "words_as_int64": torch.tensor([numbers[word] for word in words]),
        "words_as_int32": torch.tensor([numbers[word] for word in words], dtype=torch.int32),
        "noise_as_float32": torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)),
    }
    try:
        import sklearn.datasets as data
    except ImportError as error:
        print(f"without images: {error}", file=sys.stderr)
        return found
    found["digits_as_float32"] = torch.tensor(data.load_digits().data / 16, dtype=torch.float32)
    found["photos_as_uint8"] = torch.from_numpy(data.load_sample_images().images[0].copy())
    return found


def of_batches(report: Report, repeats: int) -> Iterator[str]:
    """What lz4 would make of batches."""
    for name, tensor in batches().items():
        data = tensor.contiguous().flatten().view(torch.uint8)
        word = tensor.element_size()

        def pack(data: Tensor = data, word: int = word) -> list[bytes]:
            pieces = data.split(256 << 10)
            return [lz4.block.compress(piece.view(-1, word).T.contiguous().numpy().tobytes()) for piece in pieces]

        gain = report.add(f"batch_{name}_gain", [data.numel() / sum(map(len, pack()))])
        speeds = [data.numel() / timed(pack, torch.device("cpu")) / 1e9 for _ in range(repeats)]
        yield f"| {name} | {gain:.1f} | {report.add(f'batch_{name}_gb_s', speeds):.2f} |"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--codecs", default=CODECS, help="names, separated by commas")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--threads", type=int, default=1, help="of the CPU, side by side (1)")
    arguments.add_argument("--steps", type=int, default=8, help="optimizer steps before the gradient is taken")
    given = arguments.parse_args()
    names = given.codecs.split(",")
    repeats = 5 if given.quick else 21
    report = Report({"codecs": names, "device": given.device, "threads": given.threads, "steps": given.steps})
    device = torch.device(given.device)
    if given.threads > 1 and device.type != "cpu":
        arguments.error("--threads are the CPU's")
    jobs: dict[str, Callable[[], Job]] = {"": lambda: make_job("gpt")}
    examples = Path(__file__).resolve().parents[1] / "examples"
    sys.path.insert(0, str(examples))
    try:
        import digits

        jobs["cnn_"] = digits.cnn
    except ImportError as error:
        print(f"without the CNN: {error}", file=sys.stderr)
    for prefix, make in jobs.items():
        buckets = gradients(make(), given.steps)
        torch.set_num_threads(given.threads)
        buckets = [bucket.to(device) for bucket in buckets]
        print(
            f"\n{'digits CNN' if prefix else 'GPT'}: {sum(b.numel() for b in buckets)} values, {len(buckets)} buckets"
        )
        print("| codec | ratio | encode GB/s | decode GB/s | decode and add GB/s | relative error |")
        print("|---|---|---|---|---|---|")
        for row in rows(report, names, buckets, repeats, prefix):
            print(row, flush=True)
        if not prefix:
            largest = max(buckets, key=Tensor.numel)
            print(f"\nOne bucket of {4 * largest.numel() / 2**20:.1f} MiB again and again: it stays in cache")
            for row in rows(report, names, [largest], 3 * repeats, "hot_"):
                print(row, flush=True)
            if device.type != "cpu":
                wide = torch.cat(buckets * 2)[: 16 << 20]
                print(f"\nOne bucket of {4 * wide.numel() / 2**20:.0f} MiB")
                for row in rows(report, names, [wide], repeats, "wide_"):
                    print(row, flush=True)
            for name in FEEDBACK:
                print(f"with feedback, {name}: {with_feedback(report, name, buckets, repeats):.2f} GB/s")
    for name, value in report.figures.items():
        if name.startswith("lz4") and name.endswith("_gain"):
            print(f"{name}: {value:.3f}")
    print("\nBatches under lz4-shuffle\n| batch | gain | encode GB/s |\n|---|---|---|")
    for row in of_batches(report, repeats):
        print(row, flush=True)
    print(f"medians of {repeats} sweeps")
    report.write(given.json)


if __name__ == "__main__":
    main()
