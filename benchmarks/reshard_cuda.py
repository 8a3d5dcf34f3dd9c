"""Speed of packing a bucket on a GPU: slimx's one launch, straightforward torch and a bare device copy, in turns in one
run.

    python benchmarks/reshard_cuda.py [--experts 128] [--rounds 9]

The layer of benchmarks/reshard.py, and single matrices for the other ops, with the checksum of every tensor. GB/s count
the bytes read and written, as those of the copy do; "of copy" is the share of the copy's GB/s in the same rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # slimx need not be installed

from quantities import positive
from reshard_layer import Job, Pieces, Shards, checksums, straightforward  # noqa: E402

from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan  # noqa: E402
from slimx.reshard.kernels.record import OP, PIECE, QUANTIZES, RULE, scale_bytes  # noqa: E402
from tests import reshard_reference as reference

LAYER = [
    Job("bf16 permute", OP.COPY_CHECKED),
    Job("bf16 permute, unchecked", OP.COPY),
    Job("fp8 128x128 ieee", OP.QUANTIZE_FP8, RULE.IEEE),
    Job("fp8 128x128 te", OP.QUANTIZE_FP8, RULE.TE),
    Job("fp8 128x128 triton", OP.QUANTIZE_FP8, RULE.TRITON),
    Job("fp8 128x128 ue8m0", OP.QUANTIZE_FP8, RULE.UE8M0),
]
SIDE = 16384
"""Rows and columns of the single matrices."""


@dataclass(frozen=True)
class Form:
    """An op on one matrix."""

    name: str
    op: OP
    item: int
    out: int
    rule: RULE = RULE.NONE
    block: tuple[int, int] = (0, 0)
    transposed: bool = False


MATRICES = [
    Form("copy, one run", OP.COPY_CHECKED, 2, 2),
    Form("copy, transposed", OP.COPY_CHECKED, 2, 2, transposed=True),
    Form("fp32 to bf16", OP.FP32_TO_BF16, 4, 2),
    Form("bf16 to fp32", OP.BF16_TO_FP32, 2, 4),
    Form("fp8 from fp32", OP.QUANTIZE_FP8, 4, 1, RULE.IEEE, (128, 128)),
    Form("mxfp8", OP.QUANTIZE_MXFP8, 2, 1, RULE.MXFP8, (1, 32)),
    Form("int4", OP.QUANTIZE_INT4, 2, 1, RULE.INT4, (1, 32)),
    Form("dequantize fp8", OP.DEQUANTIZE_FP8, 1, 2, RULE.NONE, (128, 128)),
    Form("dequantize mxfp8", OP.DEQUANTIZE_MXFP8, 1, 2, RULE.NONE, (1, 32)),
]


class Packing:
    """A plan on the device, with its output buffer."""

    def __init__(self, records: np.ndarray, size: int, tensors: int, device: torch.device, blocks_per_sm: int = 0):
        names = [f"tensor {k}" for k in range(tensors)]
        start = time.perf_counter()
        self.plan = DevicePlan(
            records, bucket_bytes=size, names=names, bucket="layer", device=device, blocks_per_sm=blocks_per_sm
        )
        self.planned = time.perf_counter() - start
        self.bucket = torch.empty(size, dtype=torch.uint8, device=device)
        self.sums = torch.zeros(tensors, dtype=torch.int64, device=device)
        self.flags = torch.zeros(tensors, dtype=torch.int32, device=device)
        out, item = records["out"].astype(np.int64), records["item"].astype(np.int64)
        self.moved = int((records["rows"] * records["cols"] * (item + out)).sum())
        """Bytes read and written, without scales."""

    def __call__(self) -> None:
        kernel_cuda.pack(self.plan, self.bucket, self.sums, self.flags)

    def host_seconds(self, calls: int = 100) -> float:
        """Returns the host's seconds for one call. The device is kept busy, so that waiting for work hides nothing."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            self()
        taken = (time.perf_counter() - start) / calls
        torch.cuda.synchronize()
        return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=9)
    options = parser.parse_args()
    reason = kernel_cuda.missing()
    if reason:
        sys.exit(reason)
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    versions = f"torch {torch.__version__}, {options.rounds} rounds"
    print(f"{properties.name}, {properties.multi_processor_count} processors, {versions}")
    print(
        f"{'':26}{'GB/s':>8} (best){'of copy':>10}{'to torch':>10}{'+checksum':>10}{'host us':>9}  pieces tiles blocks"
    )
    shards = moved_to(Shards(options.experts), device)
    for job in LAYER:
        one_layer(job, shards, options.rounds, device)
    for form in MATRICES:
        one_matrix(form, options.rounds, device)
    print("thread blocks on a processor (GB/s):")
    for job in (LAYER[0], LAYER[2]):
        sweep(job, shards, options.rounds, device)


def moved_to(shards: Shards, device: torch.device) -> Shards:
    shards.qkv = [t.to(device) for t in shards.qkv]
    shards.out = [t.to(device) for t in shards.out]
    shards.norms = [t.to(device) for t in shards.norms]
    shards.router = shards.router.to(device)
    shards.fc1 = [[t.to(device) for t in parts] for parts in shards.fc1]
    shards.fc2 = [[t.to(device) for t in parts] for parts in shards.fc2]
    return shards


def one_layer(job: Job, shards: Shards, rounds: int, device: torch.device) -> None:
    pieces = Pieces(shards, job)
    packing = Packing(pieces.records, pieces.size, len(pieces.places), device)
    sides: dict[str, Callable[[], object]] = {"slimx": packing, "copy": copy_of(packing.moved, device)}
    if job.rule in (RULE.NONE, RULE.IEEE):
        words = max(nbytes for _, nbytes in pieces.places) // 4
        multipliers = torch.from_numpy(reference.multipliers(np.arange(words)).view(np.int64)).to(device)
        if not job.quantizes:  # torch divides by a number as it multiplies by its inverse on a GPU: other scales
            must_equal(job, shards, packing, multipliers)
        sides["torch"] = lambda: straightforward(shards, job)
        sides["torch + checksum"] = lambda: checksums(straightforward(shards, job)[0], multipliers)
    report(job.name, packing, in_turns(sides, rounds))


def one_matrix(form: Form, rounds: int, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}[form.item]
    source = torch.randn(SIDE, SIDE, device=device, generator=generator).mul_(0.02).to(dtype)
    piece = np.zeros(1, dtype=PIECE)
    piece["src"], piece["rows"], piece["cols"] = source.data_ptr(), SIDE, SIDE
    along, across = SIDE * form.item, form.item
    piece["src_ld"], piece["src_step"] = (across, along) if form.transposed else (along, across)
    line = SIDE * form.out // (2 if form.op == OP.QUANTIZE_INT4 else 1)
    piece["dst_ld"] = piece["pos_ld"] = line
    piece["op"], piece["rule"], piece["item"], piece["out"] = form.op, form.rule, form.item, form.out
    size, scale_tensor, scales = SIDE * line, -1, None
    if form.block[0]:
        piece["block_rows"], piece["block_cols"] = form.block
        width = int(scale_bytes(piece)[0])
        shape = (SIDE // form.block[0], SIDE // form.block[1] * width)
        piece["scale_ld"] = piece["scale_pos_ld"] = shape[1]
        if form.op in QUANTIZES:
            piece["scale"], scale_tensor, size = size, 1, size + shape[0] * shape[1]
        else:
            scales = torch.full(shape, 0x3F, dtype=torch.uint8, device=device)
            piece["scale"] = scales.data_ptr()
    piece["scale_tensor"] = scale_tensor
    packing = Packing(piece, size, 2, device)
    report(form.name, packing, in_turns({"slimx": packing, "copy": copy_of(packing.moved, device)}, rounds))
    del scales


def sweep(job: Job, shards: Shards, rounds: int, device: torch.device) -> None:
    pieces = Pieces(shards, job)
    sides = {
        str(n): Packing(pieces.records, pieces.size, len(pieces.places), device, blocks_per_sm=n)
        for n in (1, 2, 3, 4, 6, 16)
    }
    seconds = in_turns(dict(sides), rounds)
    speeds = ", ".join(f"{n}: {sides[n].moved / median(taken) / 1e9:.0f}" for n, taken in seconds.items())
    print(f"  {job.name}: {speeds}")


def copy_of(moved: int, device: torch.device) -> Callable[[], object]:
    """Returns a function that copies on the device, reading and writing `moved` bytes together."""
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def in_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Measures all sides alternately by the device's clock; returns their seconds in every round. Two rounds are not
    counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(rounds + 2):
        for name, side in sides.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            side()
            end.record()
            torch.cuda.synchronize()
            if n >= 2:
                seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def report(name: str, packing: Packing, seconds: dict[str, list[float]]) -> None:
    taken = seconds["slimx"]

    def ratio(other: str) -> float:
        return median(a / b for a, b in zip(seconds[other], taken, strict=True))

    compared = [f"x {ratio(side):.2f}" if side in seconds else "" for side in ("torch", "torch + checksum")]
    plan = packing.plan
    gigabytes = packing.moved / 1e9
    host_us = packing.host_seconds() * 1e6
    print(
        f"{name:26}{gigabytes / median(taken):8.0f} ({gigabytes / min(taken):4.0f}){ratio('copy'):9.1%}"
        f"{compared[0]:>10}{compared[1]:>10}{host_us:9.1f}  {plan.count} {plan.tiles} {plan.blocks}",
        flush=True,
    )


def must_equal(job: Job, shards: Shards, packing: Packing, multipliers: torch.Tensor) -> None:
    """Exits unless both methods give the same bytes and checksums."""
    tensors, _ = straightforward(shards, job)
    packing.sums.zero_()
    packing()
    places = Pieces(shards, job).places
    for t, (at, nbytes) in zip(tensors, places, strict=True):
        if not torch.equal(packing.bucket[at : at + nbytes], t.view(-1).view(torch.uint8)):
            raise SystemExit(f"{job.name}: slimx and torch differ in tensor {tuple(t.shape)}")
    if not torch.equal(packing.sums, checksums(tensors, multipliers)):
        raise SystemExit(f"{job.name}: the checksums of slimx and torch differ")


if __name__ == "__main__":
    main()
