"""One trainer rank's side of a publication: its parameters' bytes, where the plan wants them, in one kernel call per
bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.reshard import kernel
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.pieces import BucketForm, PlannedBuckets, compact, pieces_of
from slimx.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank added to a bucket."""

    sums: np.ndarray
    """Its share of each tensor's checksum [tensors] uint64, in the order of `BucketForm.tensors`."""
    flags: np.ndarray
    """What it met in each tensor [tensors] uint32 (kernel.NONFINITE)."""


class Packer:
    """Packs the buckets of `plan` from `parameters`, whose memory must stay where it is."""

    def __init__(self, plan: Plan, rank: int, parameters: Mapping[str, torch.Tensor]):
        self.plan, self.rank, self.parameters = plan, rank, parameters
        self.form = PlannedBuckets(plan).form
        self._pieces: dict[int, np.ndarray] = {}

    def pack(self, bucket: int, memory: torch.Tensor) -> Share:
        """Write this rank's part of `bucket` into `memory`, uint8 [form(bucket).size], zero where nobody writes."""
        return self._run(bucket, self._records(bucket), memory)

    def pack_run(self, bucket: int) -> tuple[torch.Tensor, Share]:
        """The same bytes in one run, uint8 [bytes], for `slimx.reshard.pieces.spread`."""
        pieces, size = compact(self._records(bucket))
        run = torch.empty(size, dtype=torch.uint8)
        return run, self._run(bucket, pieces, run)

    def _records(self, bucket: int) -> np.ndarray:
        if bucket not in self._pieces:
            moves = self.plan.moves_of(self.rank, bucket)
            self._pieces[bucket] = pieces_of(self.plan, moves, self.form(bucket), self.parameters)
        return self._pieces[bucket]

    def _run(self, bucket: int, pieces: np.ndarray, memory: torch.Tensor) -> Share:
        count = len(self.form(bucket).tensors)
        share = Share(np.zeros(count, np.uint64), np.zeros(count, np.uint32))
        kernel.pack(pieces, memory, share.sums, share.flags)
        return share


def describe(form: BucketForm, path: str, shares: list[Share]) -> PackedBucket:
    """The packed bucket in the memory file `path` that all ranks have written their part of.

    Raises SlimxError naming a tensor that is not finite.
    """
    sums, flags = kernel.seeds(form.nbytes), np.zeros(len(form.tensors), np.uint32)
    for share in shares:
        sums += share.sums
        flags |= share.flags
    if flags.any():
        first = int(np.flatnonzero(flags)[0])
        raise SlimxError(
            f"{form.tensors[first].name} holds a value that is infinite or not a number ({np.count_nonzero(flags)} "
            "such tensors of this bucket); these weights cannot be published: look at the last optimizer steps"
        )
    tensors = [
        PackedTensor(t.name, t.dtype, t.shape, int(offset), t.nbytes, int(total))
        for t, offset, total in zip(form.tensors, form.offset, sums, strict=True)
    ]
    edges = form.first.tolist()
    targets = tuple(tuple(tensors[start:stop]) for start, stop in zip(edges, edges[1:], strict=False))
    return PackedBucket(path, form.size, targets)
