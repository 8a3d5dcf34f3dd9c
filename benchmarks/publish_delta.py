"""Compares changes with whole weights: bytes of a publication by learning rate, and the cost of finding the changes.

    python benchmarks/publish_delta.py [--steps 12] [--warm 4] [--rates 1e-6 1e-5 1e-4] [--layers 15] [--disk DIRECTORY]

A transformer of 106 million parameters learns the text of docs/, byte by byte, by Adam: fp32 main weights, bf16 weights
that compute and are published, gradients clipped at 1. After each step the published bytes are compared with those of
the step before by slimx's kernel, bucket by bucket; the changes are applied to a receiver's weights, which must then
equal the published bytes, every time. Whole weights and changes alternate in one process.

    changed     elements of bf16 that differ from the step before
    left        bytes that travel, of those of all weights
    find, take  seconds to find the changes of all weights and to apply them, on this machine's cores
    copy        seconds to copy all weights once, which a publication of whole weights costs each side
    faster on   the rate of a link below which changes arrive earlier, if finding, sending and applying follow one
                another (they overlap by bucket in a run, which raises it)

With `--disk` the same versions are also written as files below DIRECTORY, as `publish.transport: disk` has them (each
file synchronized), and read as an engine does: changes, and whole files.

    write       seconds until a version is complete: changes, and whole
    read        seconds to have the whole bytes in memory: of changes, and of whole files
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from quantities import positive

from slimx.extras.direct.ends import frames  # noqa: E402
from slimx.extras.disk.changes import ChainReader, ChangesDirectory  # noqa: E402
from slimx.extras.disk.versions import VersionDirectory, newest  # noqa: E402
from slimx.reshard.manifest import Manifest  # noqa: E402
from slimx.reshard.packed import PackedBucket, PackedTensor  # noqa: E402
from slimx.reshard.transports.memory import open_memory  # noqa: E402

ROOT = Path(__file__).parents[1]
WIDTH, HEADS, VOCABULARY, ITEM = 768, 12, 256, 2
BUCKET = 64 << 20
"""Size of a bucket in bytes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class Training:
    """bf16 weights that are views of one buffer, as a trainer publishes them, and the fp32 main weights that Adam
    updates."""

    def __init__(self, layers: int, rate: float):
        torch.manual_seed(0)
        self.model = Model(layers)
        parameters = list(self.model.parameters())
        self.main = [parameter.detach().clone() for parameter in parameters]
        count = sum(-(-parameter.numel() // 8) * 8 for parameter in parameters)
        self.published = torch.zeros(count, dtype=torch.bfloat16)
        start = 0
        for parameter in parameters:
            view = self.published[start : start + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.data)
            start += -(-parameter.numel() // 8) * 8
        self.optimizer = torch.optim.AdamW(self.main, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.text = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md")))), dtype=torch.uint8
        )

    @property
    def bytes(self) -> torch.Tensor:
        """Returns the published weights, uint8 [bytes]."""
        return self.published.view(torch.uint8)

    def step(self, number: int, *, rows: int, length: int) -> float:
        """Trains one step on the text chosen by `number`; returns the loss."""
        draw = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.text) - length - 1, (rows,), generator=draw)
        tokens = torch.stack([self.text[start : start + length + 1] for start in starts.tolist()]).long()
        logits = self.model(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for main, parameter in zip(self.main, self.model.parameters(), strict=True):
            main.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.main, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for main, parameter in zip(self.main, self.model.parameters(), strict=True):
                parameter.copy_(main)
        return loss.item()


@dataclass
class Round:
    changed: float
    left: float
    find: float
    take: float
    copy: float


def publish(kept: torch.Tensor, received: torch.Tensor, fresh: torch.Tensor, frame: torch.Tensor) -> Round:
    """Publishes `fresh` to a receiver with the weights `received`, as changes from `kept`; all uint8 [bytes]."""
    changed = (kept.view(torch.int16) != fresh.view(torch.int16)).float().mean().item()
    sent, find, take = 0, 0.0, 0.0
    for start in range(0, len(fresh), BUCKET):
        part = slice(start, min(start + BUCKET, len(fresh)))
        began = time.perf_counter()
        length = frames.encode(kept[part], fresh[part], frame, item=ITEM)
        found = time.perf_counter()
        frames.apply(frame[:length], received[part], item=ITEM)
        find, take, sent = find + found - began, take + time.perf_counter() - found, sent + length
    assert torch.equal(received, fresh), "changes made other bytes than were published"
    began = time.perf_counter()
    kept.copy_(fresh)
    return Round(changed, sent / len(fresh), find, take, time.perf_counter() - began)


class Files:
    """Versions as files, both of changes and whole, and a reader of either."""

    def __init__(self, directory: Path):
        self.shelves = {
            "changes": ChangesDirectory(directory / "changes", ITEM, every_full=1_000_000),
            "whole": VersionDirectory(directory / "whole"),
        }
        self.reader = ChainReader(ITEM)
        self.seconds: dict[str, list[float]] = {}
        """Operation -> seconds for every version."""

    def publish(self, version: int, fresh: torch.Tensor, *, count: bool) -> None:
        """Writes `fresh`, uint8 [bytes], and reads it. `count`: True to record the durations."""
        for kind, shelf in self.shelves.items():
            began = time.perf_counter()
            shelf.begin(Manifest(policy="actor", version=version, trainer_step=version, membership_epoch=version))
            for number, part in enumerate(fresh.split(BUCKET)):
                shelf.add(number, described(part), part)
            shelf.commit()
            written = time.perf_counter()
            read = [self._read(bucket) for bucket in newest(shelf.directory).buckets]
            ended = time.perf_counter()
            assert torch.equal(torch.cat(read), fresh), f"{kind} made other bytes than were published"
            if count:
                self.seconds.setdefault(f"write {kind}", []).append(written - began)
                self.seconds.setdefault(f"read {kind}", []).append(ended - written)

    def _read(self, packed: PackedBucket) -> torch.Tensor:
        """Returns the bytes of a bucket, copied."""
        if not packed.chain:
            (tensor,) = packed.tensors
            return open_memory(packed.path, packed.size, private=True)[tensor.offset :].clone()
        with self.reader.landed(packed) as landed:
            return open_memory(landed.path, landed.size, private=True).clone()

    def __str__(self) -> str:
        medians = {name: median(seconds) for name, seconds in self.seconds.items()}
        return "          files: " + ", ".join(
            f"{what} {medians[f'{what} changes']:.3f} (whole {medians[f'{what} whole']:.3f})"
            for what in ("write", "read")
        )


def described(data: torch.Tensor) -> PackedBucket:
    """Returns a bucket whose only tensor is `data`."""
    tensor = PackedTensor("weights", "uint8", (len(data),), 0, len(data), checksum=0)
    return PackedBucket("", len(data), ((tensor,),))


def measure(rate: float, arguments: argparse.Namespace) -> None:
    training = Training(arguments.layers, rate)
    frame = torch.zeros(frames.room(BUCKET), dtype=torch.uint8)
    shape = {"rows": arguments.rows, "length": arguments.length}
    losses = [training.step(number, **shape) for number in range(arguments.warm)]
    kept, received = training.bytes.clone(), training.bytes.clone()
    rounds, files = [], None
    if arguments.disk is not None:
        directory = arguments.disk.resolve() / f"rate-{rate:.0e}"  # readers open absolute paths alone
        shutil.rmtree(directory, ignore_errors=True)
        files = Files(directory)
        files.publish(0, kept, count=False)
    for number in range(arguments.warm, arguments.warm + arguments.steps):
        losses.append(training.step(number, **shape))
        rounds.append(publish(kept, received, training.bytes, frame))
        if files is not None:
            files.publish(number + 1, training.bytes, count=True)
    one = Round(*(median(getattr(row, name) for row in rounds) for name in Round.__dataclass_fields__))
    spent = one.find + one.take - one.copy
    rate_text = f"{len(kept) * (1 - one.left) * 8 / spent / 1e9:.1f} Gb/s" if spent > 0 else "any"
    least, most = min(row.left for row in rounds), max(row.left for row in rounds)
    print(
        f"{rate:<9.0e}{one.changed:>8.2%}{one.left:>8.2%} ({least:.2%} to {most:.2%}){one.find:>8.3f}{one.take:>8.3f}"
        f"{one.copy:>8.3f}{rate_text:>12}   loss {losses[0]:.3f} to {losses[-1]:.3f}",
        flush=True,
    )
    if files is not None:
        print(files, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=12, help="publications")
    parser.add_argument("--warm", type=int, default=4, help="steps of Adam before the first of them")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--layers", type=positive, default=15)
    parser.add_argument("--rows", type=positive, default=2)
    parser.add_argument("--length", type=positive, default=256, help="bytes of text in a row")
    parser.add_argument("--disk", type=Path, metavar="DIRECTORY", help="write versions as files there, too")
    arguments = parser.parse_args()
    count = sum(parameter.numel() for parameter in Model(arguments.layers).parameters())
    print(f"{count / 1e6:.1f} million parameters, {2 * count / 1e6:.1f} MB of bf16; {torch.get_num_threads()} threads")
    print("rate      changed    left                        find    take    copy   faster on")
    for rate in arguments.rates:
        measure(rate, arguments)


if __name__ == "__main__":
    main()
