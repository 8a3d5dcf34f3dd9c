"""One layer of Qwen3-30B-A3B as the trainer's ranks hold it, packed into Hugging Face tensors in two ways.

`straightforward` is what a converter does with the shards after gathering them: a few torch operations per tensor.
`Pieces` is the same work as records for the reshard kernels. benchmarks/reshard.py compares their speed and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE

HIDDEN, HEADS, GROUPS, HEAD_DIM, EXPERT = 2048, 32, 4, 128, 768
"""Hidden size, attention heads, query groups, dimensions of a head, and of an expert's inner layer."""
TP, ETP = 4, 2
BLOCK = 128
ALIGNMENT = 256
"""Alignment of tensors in the bucket, in bytes."""


@dataclass(frozen=True, slots=True)
class Job:
    """A packing of the layer to measure."""

    name: str
    op: OP
    rule: RULE = RULE.NONE

    @property
    def quantizes(self) -> bool:
        return self.op == OP.QUANTIZE_FP8


class Shards:
    """The layer's weights by rank, bf16: q, k, v interleaved by query group; a rank's gate and up in one tensor."""

    def __init__(self, experts: int):
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.bfloat16).mul_(0.02)

        per_group = HEADS // GROUPS + 2
        self.qkv = [weight(GROUPS // TP * per_group * HEAD_DIM, HIDDEN) for _ in range(TP)]
        self.out = [weight(HIDDEN, HEADS * HEAD_DIM // TP) for _ in range(TP)]
        self.router = weight(experts, HIDDEN)
        self.norms = [weight(HIDDEN), weight(HIDDEN), weight(HEAD_DIM), weight(HEAD_DIM)]
        self.fc1 = [[weight(2 * EXPERT // ETP, HIDDEN) for _ in range(ETP)] for _ in range(experts)]
        self.fc2 = [[weight(HIDDEN, EXPERT // ETP) for _ in range(ETP)] for _ in range(experts)]

    @property
    def nbytes(self) -> int:
        experts = [t for shards in self.fc1 + self.fc2 for t in shards]
        return sum(t.numel() * 2 for t in [*self.qkv, *self.out, self.router, *self.norms, *experts])


# The straightforward way ----------------------------------------------------------------------------------------------


def hugging_face_tensors(shards: Shards) -> list[tuple[str, torch.Tensor]]:
    """Returns names and tensors (often views), in the order of a checkpoint."""
    qkv = torch.cat(shards.qkv).view(GROUPS, -1, HEAD_DIM, HIDDEN)
    q, k, v = (part.reshape(-1, HIDDEN) for part in qkv.split([HEADS // GROUPS, 1, 1], dim=1))
    out = [("q", q), ("k", k), ("v", v), ("o", torch.cat(shards.out, dim=1)), ("router", shards.router)]
    out += [(f"norm{i}", t) for i, t in enumerate(shards.norms)]
    for e, (fc1, fc2) in enumerate(zip(shards.fc1, shards.fc2, strict=True)):
        gate, up = (torch.cat(parts) for parts in zip(*(t.chunk(2) for t in fc1), strict=True))
        out += [(f"gate{e}", gate), (f"up{e}", up), (f"down{e}", torch.cat(fc2, dim=1))]
    return out


def is_quantized(name: str) -> bool:
    return name != "router" and not name.startswith("norm")


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 codes and scales [block rows, block cols] of a matrix of whole blocks, by the rule `ieee`."""
    rows, cols = x.shape
    blocks = x.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(min=1e-10) / 448.0
    codes = (blocks.float() * (1.0 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(rows, cols), scales.view(rows // BLOCK, cols // BLOCK)


def straightforward(shards: Shards, job: Job) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the tensors in order (codes, then scales where quantized), and all of them in one bucket."""
    tensors: list[torch.Tensor] = []
    for name, t in hugging_face_tensors(shards):
        tensors += quantize(t) if job.quantizes and is_quantized(name) else [t.contiguous()]
    return tensors, torch.cat([t.view(-1).view(torch.uint8) for t in tensors])


def checksums(tensors: list[torch.Tensor], multipliers: torch.Tensor) -> torch.Tensor:
    """Returns the kernels' checksum of each tensor without its seed, int64. `multipliers`: [words of the longest
    tensor], int64."""
    out = []
    for t in tensors:
        words = t.contiguous().view(-1).view(torch.int32).long() & 0xFFFFFFFF
        out.append((words * multipliers[: len(words)]).sum())
    return torch.stack(out)


# The kernels' way -----------------------------------------------------------------------------------------------------


class Pieces:
    """Records of the whole layer, and each tensor's place in the bucket in the order of `straightforward`."""

    def __init__(self, shards: Shards, job: Job):
        self.job, self.size = job, 0
        self.places: list[tuple[int, int]] = []
        """(offset, size) of each tensor in bytes."""
        self._records: list[np.ndarray] = []
        heads = HEADS // GROUPS
        per_rank = GROUPS // TP
        for name, first, count in (("q", 0, heads), ("k", heads, 1), ("v", heads + 1, 1)):
            parts = []
            for rank, t in enumerate(shards.qkv):
                by_head = t.view(per_rank, (heads + 2) * HEAD_DIM, HIDDEN)
                for group in range(per_rank):
                    view = by_head[group, first * HEAD_DIM : (first + count) * HEAD_DIM]
                    parts.append((view, (rank * per_rank + group) * count * HEAD_DIM, 0))
            self._add(name, (GROUPS * count * HEAD_DIM, HIDDEN), parts)
        self._add("o", (HIDDEN, HEADS * HEAD_DIM), [(t, 0, r * t.shape[1]) for r, t in enumerate(shards.out)])
        self._add("router", tuple(shards.router.shape), [(shards.router, 0, 0)])
        for i, t in enumerate(shards.norms):
            self._add(f"norm{i}", (1, len(t)), [(t.view(1, -1), 0, 0)])
        half = EXPERT // ETP
        for fc1, fc2 in zip(shards.fc1, shards.fc2, strict=True):
            for name, first in (("gate", 0), ("up", half)):
                self._add(name, (EXPERT, HIDDEN), [(t[first : first + half], r * half, 0) for r, t in enumerate(fc1)])
            self._add("down", (HIDDEN, EXPERT), [(t, 0, r * half) for r, t in enumerate(fc2)])
        self.records = np.array(self._records, dtype=PIECE)

    def _place(self, nbytes: int) -> int:
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.places.append((offset, nbytes))
        self.size = offset + nbytes
        return offset

    def _add(self, name: str, shape: tuple[int, int], parts: list[tuple[torch.Tensor, int, int]]) -> None:
        quantizes = self.job.quantizes and is_quantized(name)
        op = self.job.op if quantizes or not self.job.quantizes else OP.COPY_CHECKED
        item, index, width = 1 if quantizes else 2, len(self.places), shape[1] // BLOCK * 4
        dst = self._place(shape[0] * shape[1] * item)
        scale = self._place(shape[0] // BLOCK * width) if quantizes else 0
        for view, row, col in parts:
            record = np.zeros((), PIECE)
            record["src"], record["src_ld"], record["src_step"] = view.data_ptr(), view.stride(0) * 2, 2
            record["rows"], record["cols"] = view.shape
            place = (row * shape[1] + col) * item
            record["dst"], record["pos"] = dst + place, place
            record["dst_ld"] = record["pos_ld"] = shape[1] * item
            record["tensor"], record["scale_tensor"] = index, index + 1 if quantizes else -1
            record["op"], record["item"], record["out"] = op, 2, item
            if quantizes:
                at = row // BLOCK * width + col // BLOCK * 4
                record["rule"], record["block_rows"], record["block_cols"] = self.job.rule, BLOCK, BLOCK
                record["scale"], record["scale_pos"] = scale + at, at
                record["scale_ld"] = record["scale_pos_ld"] = width
            self._records.append(record)

    def seeds(self) -> np.ndarray:
        return kernel.seeds([nbytes for _, nbytes in self.places])
