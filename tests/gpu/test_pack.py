"""The GPU packs the CPU's buckets, sums and flags, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.cuda import DevicePlan
from slimx.reshard.kernels.record import OP, RULE
from tests.gpu.plans import FORMS, Plan, random_plan
from tests.gpu.running import OnDevice, on_cpu, on_gpu
from tests.gpu.tables import matrix_plan, one_block_per_amax


def every_rounding(item: int) -> Plan:
    """Returns elements in blocks whose scale is 1: all e4m3 ties, neighbours, denormals, and random bits up to 448."""
    rng = np.random.default_rng(0)
    if item == 2:
        bits = np.arange(1 << 16, dtype=np.uint32)
        bits = bits[(bits & 0x7FFF) <= 0x43E0] << 16
    else:
        ends = np.arange(0x7F)  # the codes as numbers: 8 for every exponent, subnormals below
        exact = np.where(ends < 8, ends / 512, (1 + ends % 8 / 8) * 2.0 ** (ends // 8 - 7)).astype(np.float32)
        ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
        near = np.concatenate([exact, ties]).view(np.uint32)
        near = (near[:, None].astype(np.int64) + np.arange(-3, 4)).clip(0, 0x43E00000).reshape(-1).astype(np.uint32)
        some = rng.integers(0, 0x43E00001, 1 << 21, dtype=np.uint32)
        bits = np.concatenate([near, near | 0x80000000, some, some | 0x80000000])
    block = 128 * 128
    bits = np.concatenate([bits, np.zeros(-(-len(bits) // (block - 1)) * (block - 1) - len(bits), np.uint32)])
    top = np.full((len(bits) // (block - 1), 1), 0x43E00000, np.uint32)  # 448: the scale of the block is 1
    blocks = np.concatenate([top, bits.reshape(len(top), -1)], axis=1).reshape(-1, 128)
    elements = (blocks >> 16).astype(np.uint16) if item == 2 else blocks
    return matrix_plan(OP.QUANTIZE_FP8, RULE.IEEE, elements, (128, 128))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{OP(form[0]).name}-{RULE(form[1]).name}-{form[2]}-{form[3]}")
def test_gpu_equals_cpu_in_every_form(device: torch.device, form: tuple[int, int, int, int]) -> None:
    for seed in range(4):
        plan = random_plan(100 * seed + FORMS.index(form), forms=[form], tensors=12)
        on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("seed", range(40))
def test_gpu_equals_cpu_on_mixed_plans(device: torch.device, seed: int) -> None:
    plan = random_plan(seed)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("seed", range(4))
def test_gpu_equals_cpu_on_large_tensors(device: torch.device, seed: int) -> None:
    plan = random_plan(seed, tensors=8, side=3000)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


def test_thousands_of_pieces_find_their_tiles(device: torch.device) -> None:
    plan = random_plan(0, tensors=4000, side=40)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("blocks_per_sm", [1, 2, 3, 8])
def test_the_number_of_thread_blocks_changes_nothing(device: torch.device, blocks_per_sm: int) -> None:
    plan = random_plan(7, tensors=30)
    on_gpu(plan, device, blocks_per_sm).must_equal(on_cpu(plan), plan.pieces)


def test_packing_twice_gives_the_same(device: torch.device) -> None:
    on_device = OnDevice(random_plan(8, tensors=30), device)
    on_device.pack()
    first = on_device.outcome()
    on_device.clear()
    on_device.pack()
    on_device.outcome().must_equal(first, random_plan(8, tensors=30).pieces)


@pytest.mark.parametrize("rule", [RULE.IEEE, RULE.TE, RULE.UE8M0])
def test_every_bf16_amax_has_the_cpu_s_scale_and_codes(device: torch.device, rule: RULE) -> None:
    plan = one_block_per_amax(OP.QUANTIZE_FP8, rule)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("op", [OP.QUANTIZE_MXFP8, OP.QUANTIZE_INT4])
def test_every_bf16_amax_has_the_cpu_s_scale_in_narrow_blocks(device: torch.device, op: OP) -> None:
    plan = one_block_per_amax(op, RULE[op.name.removeprefix("QUANTIZE_")])
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("item", [2, 4])
def test_the_hardware_rounds_to_e4m3_as_the_cpu_does(device: torch.device, item: int) -> None:
    plan = every_rounding(item)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("seed", range(6))
def test_gpu_checksum_equals_cpu(device: torch.device, seed: int) -> None:
    plan: Plan = random_plan(seed, forms=[(OP.COPY, RULE.NONE, size, size) for size in (1, 2, 3, 4, 8)])
    memory = torch.from_numpy(plan.memory).to(device)
    names = [f"tensor {k}" for k in range(plan.tensors)]
    pieces = plan.at(memory.data_ptr())
    device_plan = DevicePlan(pieces, bucket_bytes=0, names=names, bucket="held", device=device, checksum=True)
    sums = torch.zeros(plan.tensors, dtype=torch.int64, device=device)
    kernel_cuda.checksum_rects(device_plan, sums)

    expected = np.zeros(plan.tensors, dtype=np.uint64)
    kernel.checksum_rects(plan.at(plan.memory.ctypes.data), expected)
    assert np.array_equal(kernel_cuda.results(device_plan, sums), expected)


def test_a_bucket_costs_one_launch(device: torch.device) -> None:
    on_device = OnDevice(random_plan(9, tensors=200), device)
    on_device.pack()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        on_device.pack()
        torch.cuda.synchronize()
    kernels = [e.key for e in profile.key_averages() if "reshard" in e.key]
    launches = sum(e.count for e in profile.key_averages() if "reshard" in e.key)
    if not kernels:
        pytest.skip("torch's profiler saw no kernel at all on this machine")
    assert launches == 1, kernels
