"""Failures on a GPU become a SlimxError that names the bucket, and the tensor where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.kernels.record import OP
from tests.gpu.plans import random_plan
from tests.gpu.running import OnDevice
from tests.refusals import refused

ROOT = Path(__file__).parents[2]


def copies(t: torch.Tensor, op: OP = OP.COPY) -> np.ndarray:
    """Returns one piece that copies the matrix `t`."""
    rows, cols = t.shape
    piece = np.zeros(1, dtype=kernel.PIECE)
    size = t.element_size()
    piece["src"], piece["src_ld"], piece["src_step"] = t.data_ptr(), t.stride(0) * size, size
    piece["rows"], piece["cols"], piece["dst_ld"], piece["pos_ld"] = rows, cols, cols * size, cols * size
    piece["op"], piece["item"], piece["out"], piece["scale_tensor"] = op, size, size, -1
    return piece


def plan_of(t: torch.Tensor, device: torch.device, op: OP = OP.COPY, checksum: bool = False) -> DevicePlan:
    size = t.numel() * t.element_size()
    return DevicePlan(copies(t, op), bucket_bytes=size, names=["weight"], bucket="3", device=device, checksum=checksum)


def test_a_source_in_host_memory_is_refused_by_name(device: torch.device) -> None:
    with refused("kernel.address", about="weight"):
        plan_of(torch.zeros(8, 8), device)


def test_a_piece_outside_the_bucket_is_refused(device: torch.device) -> None:
    t = torch.zeros(8, 8, device=device)
    with refused("kernel.outside", about="0"):
        DevicePlan(copies(t), bucket_bytes=100, names=["weight"], bucket="3", device=device)


def test_tensors_of_another_kind_are_refused(device: torch.device) -> None:
    plan = plan_of(torch.zeros(8, 8, device=device), device)
    bucket = torch.zeros(256, dtype=torch.uint8, device=device)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    with refused("kernel.argument", about="the bucket"):
        kernel_cuda.pack(plan, bucket[:128], sums, flags)
    with refused("kernel.argument", about="sums"):
        kernel_cuda.pack(plan, bucket, flags, flags)
    with refused("kernel.argument", about="flags"):
        kernel_cuda.pack(plan, bucket, sums, flags.cpu())
    with refused("kernel.plan_kind", about="3"):
        kernel_cuda.checksum_rects(plan, sums)
    with refused("kernel.plan_kind", about="3"):
        kernel_cuda.pack(plan_of(torch.zeros(8, 8, device=device), device, checksum=True), bucket, sums, flags)


def test_a_value_that_is_not_finite_is_named(device: torch.device) -> None:
    t = torch.zeros(8, 8, device=device)
    t[3, 5] = float("nan")
    plan = plan_of(t, device, OP.COPY_CHECKED)
    sums = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    kernel_cuda.pack(plan, torch.zeros(256, dtype=torch.uint8, device=device), sums, flags)
    with refused("kernel.nonfinite", about="weight"):
        kernel_cuda.results(plan, sums, flags)


def test_a_bucket_at_an_odd_address_is_refused(device: torch.device) -> None:
    state = OnDevice(random_plan(15), device)
    shifted = torch.zeros(len(state.bucket) + 1, dtype=torch.uint8, device=device)[1:]
    with refused("kernel.alignment"):
        kernel_cuda.pack(state.plan, shifted, state.sums, state.flags)


FAULT = """
import torch
from slimx.errors import SlimxError
from slimx.reshard.kernels import cuda as kernel_cuda
from tests.gpu.test_errors import plan_of
device = torch.device("cuda", 0)
plan = plan_of(torch.zeros(512, 512, device=device), device)
plan._pieces[:8] = 0  # as if the source had been freed: its address is 0 now
bucket = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
sums = torch.zeros(1, dtype=torch.int64, device=device)
kernel_cuda.pack(plan, bucket, sums, torch.zeros(1, dtype=torch.int32, device=device))
try:
    kernel_cuda.results(plan, sums)
except SlimxError as error:
    print("refused:", error.code, error.about)
"""


def test_a_fault_of_the_device_names_the_bucket() -> None:
    """In a process of its own: a fault ends a process's use of the device."""
    run = subprocess.run([sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "refused: kernel.cuda 3\n" in run.stdout, run.stdout + run.stderr
