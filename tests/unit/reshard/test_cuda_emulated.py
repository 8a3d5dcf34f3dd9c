"""The CUDA kernels' own source, run by emulated threads on the CPU, gives the CPU kernels' buckets, sums and flags.

So the binding, the tiling, every path, the checksums and the barriers are tested without a GPU
(cuda_emulation/device.cuh says what is not). `tests/gpu` runs the same plans on one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.kernels.record import OP, RULE
from tests.gpu.plans import FORMS, Plan, random_plan
from tests.gpu.running import OnDevice, on_cpu
from tests.refusals import refused
from tests.unit.reshard.cuda_stand import DEVICE, use_emulator

PATHS = 9
"""Number of values of slimx::Path in csrc/tiles.cuh."""


@pytest.fixture
def emulator(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    return use_emulator(emulator_library, monkeypatch)


def assert_equal_to_the_cpu(plan: Plan, blocks: int) -> None:
    on_device = OnDevice(plan, DEVICE, blocks)
    on_device.pack()
    on_device.outcome().must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{OP(form[0]).name}-{RULE(form[1]).name}-{form[2]}-{form[3]}")
def test_emulated_kernel_equals_the_cpu_kernel_in_every_form(
    emulator: ctypes.CDLL, form: tuple[int, int, int, int]
) -> None:
    emulator.emulator_seed(FORMS.index(form))
    assert_equal_to_the_cpu(random_plan(FORMS.index(form), forms=[form], tensors=12), blocks=3)


@pytest.mark.parametrize("seed", range(12))
def test_emulated_kernel_equals_the_cpu_kernel_on_mixed_plans(emulator: ctypes.CDLL, seed: int) -> None:
    emulator.emulator_seed(seed)
    assert_equal_to_the_cpu(random_plan(seed), blocks=1 + seed % 5)


def test_the_plans_reach_every_path(emulator: ctypes.CDLL) -> None:
    pieces = np.concatenate([random_plan(seed).at(64) for seed in range(12)])
    some = pieces[(pieces["rows"] > 0) & (pieces["cols"] > 0)]
    reached = {emulator.emulator_path(ctypes.c_void_p(some[k : k + 1].ctypes.data)) for k in range(len(some))}
    assert reached == set(range(PATHS))


def test_thousands_of_pieces_find_their_tiles(emulator: ctypes.CDLL) -> None:
    plan = random_plan(0, forms=[(OP.COPY, RULE.NONE, 2, 2)], tensors=750, side=6)
    assert len(plan.pieces) > 33**2  # three rounds of the search
    assert_equal_to_the_cpu(plan, blocks=2)


@pytest.mark.parametrize("seed", range(4))
def test_emulated_checksum_equals_the_cpu_kernel(emulator: ctypes.CDLL, seed: int) -> None:
    plan = random_plan(seed, forms=[(OP.COPY, RULE.NONE, size, size) for size in (1, 2, 3, 4, 8)])
    pieces, names = plan.at(plan.memory.ctypes.data), ["weight"] * plan.tensors
    device_plan = DevicePlan(pieces, bucket_bytes=0, names=names, bucket="0", device=0, checksum=True)
    sums, right = torch.zeros(plan.tensors, dtype=torch.int64), np.zeros(plan.tensors, dtype=np.uint64)
    kernel_cuda.checksum_rects(device_plan, sums)
    kernel.checksum_rects(pieces, right)
    assert np.array_equal(kernel_cuda.results(device_plan, sums), right)


def test_the_table_of_the_rule_triton_has_every_amax(emulator: ctypes.CDLL) -> None:
    table = kernel_cuda.triton_scales(0)
    amax = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    scale = np.maximum(amax, np.float32(1e-10)) / np.float32(448)
    assert np.array_equal(table, np.stack([scale, np.float32(1) / scale], axis=1))  # as the emulated division is exact


# Errors ---------------------------------------------------------------------------------------------------------------


def plan_on_device(value: float = 1.0) -> OnDevice:
    """Returns one checked copy of a matrix of fp32, of which one element is `value`."""
    plan = random_plan(0, forms=[(OP.COPY_CHECKED, RULE.NONE, 4, 4)], tensors=1, side=1)
    plan.memory[:] = 0
    start = int(plan.pieces["src"][0])
    plan.memory[start : start + 4] = np.array([value], dtype=np.float32).view(np.uint8)
    return OnDevice(plan, DEVICE)


def test_a_launch_that_fails_names_its_bucket(emulator: ctypes.CDLL) -> None:
    on_device = plan_on_device()
    emulator.emulator_fail(719)
    with refused("kernel.cuda", about="random"):
        on_device.pack()
    emulator.emulator_fail(0)


def test_a_value_that_is_not_finite_names_its_tensor(emulator: ctypes.CDLL) -> None:
    on_device = plan_on_device(float("inf"))
    on_device.pack()
    with refused("kernel.nonfinite", about="tensor 0"):
        kernel_cuda.results(on_device.plan, on_device.sums, on_device.flags)


def test_a_source_that_the_device_cannot_read_is_named(emulator: ctypes.CDLL) -> None:
    pieces = random_plan(0, forms=[(OP.COPY, RULE.NONE, 1, 1)], tensors=1, side=1).at(8)
    with refused("kernel.address", about="weight"):
        DevicePlan(pieces, bucket_bytes=1 << 20, names=["weight"], bucket="7", device=0)


def test_pieces_that_a_kernel_cannot_count_are_refused(emulator: ctypes.CDLL) -> None:
    pieces = random_plan(0, forms=[(OP.COPY, RULE.NONE, 1, 1)], tensors=1, side=1).at(8)
    pieces["cols"], pieces["rows"] = 1 << 31, 1
    with refused("kernel.piece", about="0"):
        DevicePlan(pieces, bucket_bytes=1 << 40, names=["weight"], bucket="7", device=0)


@pytest.mark.parametrize(("which", "about"), [("bucket", "the bucket"), ("sums", "sums"), ("flags", "flags")])
def test_memory_of_another_kind_is_refused(emulator: ctypes.CDLL, which: str, about: str) -> None:
    on_device = plan_on_device()
    setattr(on_device, which, getattr(on_device, which)[:0])
    with refused("kernel.argument", about=about):
        on_device.pack()


def test_without_library_or_device_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libslimx_cuda.so"
    monkeypatch.setattr(kernel_cuda, "LIBRARY", library)
    for code in ("library.missing", "library.broken"):
        assert str(library) in kernel_cuda.missing()
        with refused(code, about=str(library)):
            kernel_cuda.triton_scales(0)
        library.write_text("no library")
