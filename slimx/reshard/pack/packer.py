"""Packs one trainer rank's parameters into buckets in the plan's layout, with one kernel call per bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from slimx.errors import SlimxError
from slimx.layout.form import DerivedTensors
from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.pack import PORTION
from slimx.reshard.pack.pieces import BucketForm, PlannedBuckets, Portion, compact, pieces_of, portions, spread
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.reshard.plan.copy_plan import Plan


@dataclass(frozen=True, slots=True)
class Contribution:
    """Checksums and flags of the bytes that one rank contributed to a bucket."""

    sums: np.ndarray
    """This rank's part of each tensor's checksum: the sum over the bytes that it contributed, [tensors] uint64, in the
    order of `BucketForm.tensors`. The parts of all ranks and the seed add up to the checksum."""
    flags: np.ndarray
    """Flags of each tensor, [tensors] uint32: NONFINITE if this rank contributed an infinite or NaN value."""


class Packer:
    """Packs the buckets of `plan` from `parameters`, the tensors of one trainer rank by name. If tensors move in
    memory, `refresh_addresses` must be called before the next bucket is packed."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        *,
        derived: DerivedTensors | None = None,
        apart: bool = False,
        portion: int = PORTION,
    ):
        """Creates the packer of trainer rank `rank`.

        `derived`: tensors that are computed before packing and packed instead of parameters; computed once per part of
        a bucket that contains them. `apart`: True if each target's part of a bucket is a separate allocation; False if
        all are consecutive in one allocation (`slimx.reshard.pack.pieces.BucketForm`). `portion`: size in bytes of the
        GPU buffer in which data is packed before it is copied to host memory."""
        self.plan = plan
        self.rank = rank
        self.parameters = parameters
        self.portion = portion
        self._derived = DerivedTensors() if derived is None else derived
        self.parts = plan.targets if apart else 1
        """Number of parts of a bucket, each a separate allocation: one per target if `apart`, otherwise a single
        one."""
        self.form = PlannedBuckets(plan, apart=apart).form
        self._device = next((p.device for p in parameters.values() if p.is_cuda), None)
        self._addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        self._pieces: dict[tuple[int, int], np.ndarray] = {}
        """(bucket, part) -> records of this rank's pieces, [pieces] of `PIECE`."""
        self._device_plans: dict[tuple[int, int, bool], DevicePlan] = {}
        """(bucket, part, True if its pieces are compacted) -> plan with which one kernel launch packs the part."""
        self._portions: dict[tuple[int, int], list[tuple[Portion, DevicePlan]]] = {}
        """(bucket, part) -> portions in which that part is packed before it is copied to host memory, each with the
        plan of the kernel launch that packs it."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters: a GPU, or the CPU."""
        return self._device or torch.device("cpu")

    def refresh_addresses(self) -> None:
        """Reads the addresses of the parameters again after they may have moved in memory
        (`slimx.trainer.device.offload`); if any did, discards the records and launch plans that contain the old
        addresses."""
        addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        if addresses != self._addresses:
            self._addresses = addresses
            self._pieces.clear()
            self._device_plans.clear()
            self._portions.clear()

    def pack(self, bucket: int, *memories: torch.Tensor) -> Contribution:
        """Writes this rank's contribution to `bucket` into host memory and returns the contribution's checksums and
        flags.

        `memories`: one tensor per part, `parts` in total, each uint8 [form(bucket).size]. Bytes that no rank writes
        must be zero already."""
        return total([self._pack(bucket, part, memory) for part, memory in enumerate(memories)])

    def _pack(self, bucket: int, part: int, memory: torch.Tensor) -> Contribution:
        if self._device is None:
            return self._run(bucket, part, self._records(bucket, part), memory)
        # Other ranks write into the same memory, so the GPU packs one run, and the CPU copies its pieces into place.
        run, contribution = self.pack_run(bucket, part=part)
        kernel.pack(spread(self._records(bucket, part), run), memory, np.zeros(1, np.uint64))
        return contribution

    def pack_run(
        self, bucket: int, memory: torch.Tensor | None = None, *, part: int = 0
    ) -> tuple[torch.Tensor, Contribution]:
        """Returns this rank's contribution to one part of `bucket` as a run: its pieces one after the other in host
        memory, uint8 [bytes]. Receivers copy the pieces to their positions in the tensors with
        `slimx.reshard.pack.pieces.spread`.

        `memory`: uint8 host memory of at least the run's size; the run is written at its start. None allocates
        memory."""
        pieces, size = compact(self._records(bucket, part))
        on_gpu = self._device is not None
        run = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) if memory is None else memory[:size]
        if on_gpu:
            return run, self._pack_portions(bucket, part, run)
        return run, self._run(bucket, part, pieces, run)

    def pack_at(self, bucket: int, part: int, address: int) -> Contribution:
        """Writes this rank's contribution to one part of `bucket` into GPU memory at `address`, which may belong to
        another rank's GPU, and waits until it is written."""
        return self._launch(bucket, part, self._records(bucket, part), self.form(bucket).size, address, compacted=False)

    def pack_device_run(self, bucket: int, part: int = 0) -> tuple[torch.Tensor, Contribution]:
        """Packs this rank's contribution to one part of `bucket` as `pack_run` does, its pieces one after the other,
        but into newly allocated memory on the rank's GPU. Returns after the data has been written."""
        pieces, size = compact(self._records(bucket, part))
        run = torch.empty(size, dtype=torch.uint8, device=self.device)
        return run, self._launch(bucket, part, pieces, size, run.data_ptr(), compacted=True)

    def pack_run_at(self, bucket: int, address: int) -> Contribution:
        """Writes this rank's contribution to part 0 of `bucket`, its pieces one after the other as in `pack_run`, into
        memory of this rank's GPU at `address`, and waits until it is written."""
        pieces, size = compact(self._records(bucket, 0))
        return self._launch(bucket, 0, pieces, size, address, compacted=True)

    def _records(self, bucket: int, part: int) -> np.ndarray:
        if (bucket, part) not in self._pieces:
            moves = self._moves(bucket, part)
            parameters = {**self.parameters, **self._derived.places(bucket)}
            self._pieces[bucket, part] = pieces_of(self.plan, moves, self.form(bucket), parameters)
        for name, address in self._addresses.items():
            if self.parameters[name].data_ptr() != address:
                raise SlimxError(
                    f"parameter {name} has moved in memory since its records were prepared; update parameters in "
                    "place, or call refresh_addresses after moving parameters",
                    code="pack.moved",
                    about=name,
                )
        return self._pieces[bucket, part]

    def _moves(self, bucket: int, part: int) -> np.ndarray:
        moves = self.plan.moves_of(self.rank, bucket)
        return moves[moves["target"] == part] if self.parts > 1 else moves

    def _run(self, bucket: int, part: int, pieces: np.ndarray, memory: torch.Tensor) -> Contribution:
        contribution = self._nothing(bucket)
        if len(pieces):  # with many ranks, most of them contribute nothing to a given bucket
            self._derived.make(bucket, self._moves(bucket, part))
            kernel.pack(pieces, memory, contribution.sums, contribution.flags)
        return contribution

    def _launch(
        self, bucket: int, part: int, pieces: np.ndarray, size: int, address: int, *, compacted: bool
    ) -> Contribution:
        """Writes `pieces` into the `size` bytes of GPU memory at `address` with one kernel launch, and waits until the
        launch has finished. `compacted`: True if `pieces` were laid out by `compact`; determines which cached
        `DevicePlan` is used."""
        if not len(pieces):
            return self._nothing(bucket)
        if (bucket, part, compacted) not in self._device_plans:
            self._device_plans[bucket, part, compacted] = self._device_plan(bucket, pieces, size)
        plan = self._device_plans[bucket, part, compacted]
        self._derived.make(bucket, self._moves(bucket, part))
        sums, flags = self._counters(bucket)
        kernel_cuda.pack_at(plan, address, sums, flags)
        return replace(self._nothing(bucket), sums=kernel_cuda.results(plan, sums, flags))

    def _pack_portions(self, bucket: int, part: int, run: torch.Tensor) -> Contribution:
        """Writes this rank's contribution to one part of `bucket`, its pieces one after the other, into the host memory
        `run`, and waits until the writes have finished.

        The contribution is packed in portions, one after the other in the same GPU memory, and each portion is copied
        to its position in `run`."""
        if (bucket, part) not in self._portions:
            steps = []
            for portion in portions(self._records(bucket, part), self.portion):
                steps.append((portion, self._device_plan(bucket, portion.pieces, portion.size)))
            self._portions[bucket, part] = steps
        steps = self._portions[bucket, part]
        if not steps:
            return self._nothing(bucket)
        self._derived.make(bucket, self._moves(bucket, part))
        sums, flags = self._counters(bucket)
        size = max(portion.size for portion, _ in steps)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        for portion, plan in steps:  # one stream keeps the order: a portion is copied before the next overwrites it
            kernel_cuda.pack_at(plan, memory.data_ptr(), sums, flags)
            for start, run_start, nbytes in portion.copies:
                run[run_start : run_start + nbytes].copy_(memory[start : start + nbytes], non_blocking=True)
        return replace(self._nothing(bucket), sums=kernel_cuda.results(steps[-1][1], sums, flags))

    def _device_plan(self, bucket: int, pieces: np.ndarray, size: int) -> DevicePlan:
        names = [tensor.name for tensor in self.form(bucket).tensors]
        return DevicePlan(pieces, bucket_bytes=size, names=names, bucket=str(bucket), device=self.device)

    def _counters(self, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zeroed arrays in GPU memory for the checksums and the flags of the bucket's tensors, [tensors]
        each."""
        count = len(self.form(bucket).tensors)
        sums = torch.zeros(count, dtype=torch.int64, device=self.device)
        flags = torch.zeros(count, dtype=torch.int32, device=self.device)
        return sums, flags

    def _nothing(self, bucket: int) -> Contribution:
        count = len(self.form(bucket).tensors)
        return Contribution(np.zeros(count, np.uint64), np.zeros(count, np.uint32))


def total(contributions: Sequence[Contribution]) -> Contribution:
    """Returns the sum of one or more contributions to a bucket: checksums are added, and flags are combined by bitwise
    OR."""
    sums = np.stack([contribution.sums for contribution in contributions]).sum(axis=0, dtype=np.uint64)
    flags = np.stack([contribution.flags for contribution in contributions])
    return Contribution(sums, np.bitwise_or.reduce(flags))


def describe(form: BucketForm, paths: Sequence[str], contributions: Sequence[Contribution]) -> PackedBucket:
    """Returns the description that engines receive of a complete bucket: its tensors with offsets and checksums, and
    the paths of its memory.

    `paths`: one path per part of the bucket. `contributions`: those of all ranks. Raises SlimxError naming a tensor
    that contains an infinite or NaN value."""
    bucket = total(contributions)
    sums = kernel.seeds(form.nbytes) + bucket.sums
    kernel.refuse_nonfinite(bucket.flags, [tensor.name for tensor in form.tensors])
    tensors = []
    for t, offset, checksum in zip(form.tensors, form.offset, sums, strict=True):
        tensors.append(PackedTensor(t.name, t.dtype, t.shape, int(offset), t.nbytes, int(checksum)))
    targets = tuple(tuple(tensors[start:stop]) for start, stop in pairwise(form.first.tolist()))
    return PackedBucket(paths[0], form.size, targets, tuple(paths[1:]))
