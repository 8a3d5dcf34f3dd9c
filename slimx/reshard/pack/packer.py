"""One trainer rank's side of a publication: its parameters' bytes, where the plan wants them, in one kernel call per
bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.layout.form import Made
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack import PORTION
from slimx.reshard.pack.pieces import BucketForm, PlannedBuckets, Portion, compact, pieces_of, portions, spread
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.plan.copy_plan import Plan


@dataclass(frozen=True, slots=True)
class Share:
    """The contribution of one rank to a bucket."""

    sums: np.ndarray
    """Its share of each tensor's checksum [tensors] uint64, in the order of `BucketForm.tensors`."""
    flags: np.ndarray
    """Flags of what it met in each tensor [tensors] uint32 (kernel.NONFINITE)."""


class Packer:
    """Packs the buckets of `plan` from `parameters`, whose memory must stay where it is."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        *,
        made: Made | None = None,
        apart: bool = False,
        portion: int = PORTION,
    ):
        """`made`: tensors that are read in place of parameters, made once for every part of a bucket that they are in.
        `apart`: what each target gets goes into memory of its own (`slimx.reshard.pack.pieces.BucketForm`). `portion`:
        bytes of the GPU's memory through which a run goes to host memory."""
        self.plan, self.rank, self.parameters, self.portion = plan, rank, parameters, portion
        self._made = Made() if made is None else made
        self.parts = plan.targets if apart else 1
        """Memories of a bucket."""
        self.form = PlannedBuckets(plan, apart=apart).form
        self._device = next((p.device for p in parameters.values() if p.is_cuda), None)
        self._addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        self._pieces: dict[tuple[int, int], np.ndarray] = {}
        """By bucket and part."""
        self._device_plans: dict[tuple[int, int, bool], DevicePlan] = {}
        """By bucket and part, and whether its pieces are compacted."""
        self._portions: dict[tuple[int, int], list[tuple[Portion, DevicePlan]]] = {}
        """By bucket and part."""

    @property
    def device(self) -> torch.device:
        """Addresses of the parameters."""
        return self._device or torch.device("cpu")

    def refresh_addresses(self) -> None:
        """Look the parameters up anew, which may have other addresses now (`slimx.trainer.device.offload`)."""
        addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        if addresses != self._addresses:
            self._addresses = addresses
            self._pieces.clear()
            self._device_plans.clear()
            self._portions.clear()

    def pack(self, bucket: int, *memories: torch.Tensor) -> Share:
        """Write this rank's part of `bucket` into its `parts` memories, uint8 [form(bucket).size] each, zero where
        nobody writes."""
        return total([self._pack(bucket, part, memory) for part, memory in enumerate(memories)])

    def _pack(self, bucket: int, part: int, memory: torch.Tensor) -> Share:
        if self._device is None:
            return self._run(bucket, part, self._records(bucket, part), memory)
        # Others write into the same memory: what the device packed crosses in one run and is put in its places here.
        run, share = self.pack_run(bucket, part=part)
        kernel.pack(spread(self._records(bucket, part), run), memory, np.zeros(1, np.uint64))
        return share

    def pack_run(self, bucket: int, memory: torch.Tensor | None = None, *, part: int = 0) -> tuple[torch.Tensor, Share]:
        """The bytes for one of a bucket's memories in one run in host memory, uint8 [bytes], for
        `slimx.reshard.pack.pieces.spread`: at the start of `memory`, which has room for them, or in memory of its
        own."""
        pieces, size = compact(self._records(bucket, part))
        on_gpu = self._device is not None
        run = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) if memory is None else memory[:size]
        return run, self._pack_portions(bucket, part, run) if on_gpu else self._run(bucket, part, pieces, run)

    def pack_at(self, bucket: int, part: int, address: int) -> Share:
        """Write one part of what `pack` does into memory of a GPU, this rank's or another's, which its own reaches at
        `address`."""
        return self._launch(bucket, part, self._records(bucket, part), self.form(bucket).size, address, compacted=False)

    def pack_device_run(self, bucket: int, part: int = 0) -> tuple[torch.Tensor, Share]:
        """`pack_run` into the memory of this rank's GPU."""
        pieces, size = compact(self._records(bucket, part))
        run = torch.empty(size, dtype=torch.uint8, device=self.device)
        return run, self._launch(bucket, part, pieces, size, run.data_ptr(), compacted=True)

    def pack_run_at(self, bucket: int, address: int) -> Share:
        """`pack_run` into memory of this rank's GPU at `address`, which has room for it; returns when it is there."""
        pieces, size = compact(self._records(bucket, 0))
        return self._launch(bucket, 0, pieces, size, address, compacted=True)

    def _records(self, bucket: int, part: int) -> np.ndarray:
        if (bucket, part) not in self._pieces:
            moves = self._moves(bucket, part)
            parameters = {**self.parameters, **self._made.places(bucket)}
            self._pieces[bucket, part] = pieces_of(self.plan, moves, self.form(bucket), parameters)
        for name, address in self._addresses.items():
            if self.parameters[name].data_ptr() != address:
                raise SlimxError(
                    f"parameter {name} has moved in memory since its plan was prepared; weights must be changed in "
                    "place, or prepared again",
                    code="pack.moved",
                    about=name,
                )
        return self._pieces[bucket, part]

    def _moves(self, bucket: int, part: int) -> np.ndarray:
        moves = self.plan.moves_of(self.rank, bucket)
        return moves[moves["target"] == part] if self.parts > 1 else moves

    def _run(self, bucket: int, part: int, pieces: np.ndarray, memory: torch.Tensor) -> Share:
        share = self._nothing(bucket)
        if len(pieces):  # of many ranks most bring nothing to a bucket
            self._made.make(bucket, self._moves(bucket, part))
            kernel.pack(pieces, memory, share.sums, share.flags)
        return share

    def _launch(self, bucket: int, part: int, pieces: np.ndarray, size: int, address: int, *, compacted: bool) -> Share:
        """`pieces` into the `size` bytes at `address` by one launch; returns when it has ended."""
        if not len(pieces):
            return self._nothing(bucket)
        if (bucket, part, compacted) not in self._device_plans:
            self._device_plans[bucket, part, compacted] = self._device_plan(bucket, pieces, size)
        plan = self._device_plans[bucket, part, compacted]
        self._made.make(bucket, self._moves(bucket, part))
        sums, flags = self._counters(bucket)
        kernel_cuda.pack_at(plan, address, sums, flags)
        return replace(self._nothing(bucket), sums=kernel_cuda.results(plan, sums, flags))

    def _pack_portions(self, bucket: int, part: int, run: torch.Tensor) -> Share:
        """One part of a bucket into `run` in host memory, through one portion's memory of the GPU; returns when it is
        there."""
        if (bucket, part) not in self._portions:
            self._portions[bucket, part] = [
                (portion, self._device_plan(bucket, portion.pieces, portion.size))
                for portion in portions(self._records(bucket, part), self.portion)
            ]
        if not (steps := self._portions[bucket, part]):
            return self._nothing(bucket)
        self._made.make(bucket, self._moves(bucket, part))
        sums, flags = self._counters(bucket)
        room = max(portion.size for portion, _ in steps)
        memory = torch.empty(room, dtype=torch.uint8, device=self.device)
        for portion, plan in steps:  # in the order of one stream: a portion has left before the next is packed
            kernel_cuda.pack_at(plan, memory.data_ptr(), sums, flags)
            for start, place, nbytes in portion.copies:
                run[place : place + nbytes].copy_(memory[start : start + nbytes], non_blocking=True)
        return replace(self._nothing(bucket), sums=kernel_cuda.results(steps[-1][1], sums, flags))

    def _device_plan(self, bucket: int, pieces: np.ndarray, size: int) -> DevicePlan:
        names = [tensor.name for tensor in self.form(bucket).tensors]
        return DevicePlan(pieces, bucket_bytes=size, names=names, bucket=str(bucket), device=self.device)

    def _counters(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Checksums and flags of the bucket's tensors on the GPU, all 0."""
        count = len(self.form(bucket).tensors)
        kinds = (torch.int64, torch.int32)
        sums, flags = (torch.zeros(count, dtype=kind, device=self.device) for kind in kinds)
        return sums, flags

    def _nothing(self, bucket: int) -> Share:
        count = len(self.form(bucket).tensors)
        return Share(np.zeros(count, np.uint64), np.zeros(count, np.uint32))


def total(shares: Sequence[Share]) -> Share:
    """The contribution of all `shares`, at least one, together."""
    sums = np.sum([share.sums for share in shares], axis=0, dtype=np.uint64)
    return Share(sums, np.bitwise_or.reduce([share.flags for share in shares]))


def describe(form: BucketForm, paths: Sequence[str], shares: Sequence[Share]) -> PackedBucket:
    """The packed bucket in the memories at `paths` that all ranks have written their part of.

    Raises SlimxError naming a tensor that is not finite.
    """
    whole = total(shares)
    sums = kernel.seeds(form.nbytes) + whole.sums
    kernel.refuse_nonfinite(whole.flags, [tensor.name for tensor in form.tensors])
    tensors = [
        PackedTensor(t.name, t.dtype, t.shape, int(offset), t.nbytes, int(total))
        for t, offset, total in zip(form.tensors, form.offset, sums, strict=True)
    ]
    edges = form.first.tolist()
    targets = tuple(tuple(tensors[start:stop]) for start, stop in zip(edges, edges[1:], strict=False))
    return PackedBucket(paths[0], form.size, targets, tuple(paths[1:]))
