"""Runs a random plan on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from tests.gpu.plans import Plan

FILL = 7
"""Byte of a bucket where nothing was written."""


@dataclass(frozen=True)
class Outcome:
    bucket: np.ndarray
    sums: np.ndarray
    flags: np.ndarray

    def must_equal(self, other: Outcome, pieces: np.ndarray) -> None:
        """Fails with the first piece that wrote other bytes, or the first sum or flag that differs."""
        wrong = np.flatnonzero(self.bucket != other.bucket)
        if len(wrong):
            begins = pieces["dst"] <= wrong[0]
            near = pieces[begins][np.argmax(pieces[begins]["dst"])] if begins.any() else None
            mine, theirs = self.bucket[wrong[:8]], other.bucket[wrong[:8]]
            raise AssertionError(f"{len(wrong)} bytes differ, first at {wrong[:8]}: {mine} and {theirs}; near {near}")
        for what in ("sums", "flags"):
            mine, theirs = getattr(self, what), getattr(other, what)
            assert np.array_equal(mine, theirs), f"{what} differ for tensors {np.flatnonzero(mine != theirs)[:8]}"


def on_cpu(plan: Plan) -> Outcome:
    memory = np.zeros(len(plan.memory) + 64, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: len(plan.memory)]
    memory[:] = plan.memory
    bucket = torch.full((plan.bucket_bytes,), FILL, dtype=torch.uint8)
    sums, flags = np.zeros(plan.tensors, dtype=np.uint64), np.zeros(plan.tensors, dtype=np.uint32)
    kernel.pack(plan.at(memory.ctypes.data), bucket, sums, flags=flags)
    return Outcome(bucket.numpy(), sums, flags)


class OnDevice:
    """A plan whose sources lie on a device, with the tensors that it is packed into."""

    def __init__(self, plan: Plan, device: torch.device, blocks_per_sm: int = 0):
        self.memory = torch.from_numpy(plan.memory).to(device)
        self.names = [f"tensor {k}" for k in range(plan.tensors)]
        self.plan = DevicePlan(
            plan.at(self.memory.data_ptr()),
            bucket_bytes=plan.bucket_bytes,
            names=self.names,
            bucket="random",
            device=device,
            blocks_per_sm=blocks_per_sm,
        )
        self.bucket = torch.full((plan.bucket_bytes,), FILL, dtype=torch.uint8, device=device)
        self.sums = torch.zeros(plan.tensors, dtype=torch.int64, device=device)
        self.flags = torch.zeros(plan.tensors, dtype=torch.int32, device=device)

    def clear(self) -> None:
        self.bucket.fill_(FILL)
        self.sums.zero_()
        self.flags.zero_()

    def pack(self, stream: torch.cuda.Stream | None = None) -> None:
        kernel_cuda.pack(self.plan, self.bucket, self.sums, self.flags, stream)

    def outcome(self) -> Outcome:
        sums = kernel_cuda.results(self.plan, self.sums)
        return Outcome(self.bucket.cpu().numpy(), sums, self.flags.cpu().numpy().view(np.uint32))


def on_gpu(plan: Plan, device: torch.device, blocks_per_sm: int = 0) -> Outcome:
    state = OnDevice(plan, device, blocks_per_sm)
    state.pack()
    return state.outcome()
