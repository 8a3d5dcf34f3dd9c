"""The kernels hold to their reference on random plans: every op, rule, block shape, split and layout of memory."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import OP, PIECE, RULE
from tests import reshard_reference as reference
from tests.unit.reshard.kernel_stand import (
    DTYPE,
    FP8_RULES,
    Plan,
    Tensor,
    plan,
    random_bits,
    random_weights,
    some_triton_scales,
)

TABLE = some_triton_scales()


def random_tensor(rng: random.Random, shape: tuple[int, int], *, finite: bool) -> Tensor:
    """A tensor of a random op, rule, dtype and block shape."""
    op = rng.choice(list(OP))
    item = {OP.FP32_TO_BF16: 4, OP.BF16_TO_FP32: 2}.get(op, rng.choice([2, 4]))
    if op == OP.QUANTIZE_INT4:
        shape = shape[0], -(-shape[1] // 32) * 32
    values = random_weights(shape, DTYPE[item], rng)
    if not finite:
        for _ in range(3):
            values.view(-1)[rng.randrange(values.numel())] = rng.choice([torch.inf, -torch.inf, torch.nan])
    block = rng.choice([(128, 128), (1, 128), (64, 32), (3, 5), (16, 16), (1, 1), (max(shape[0], 1), shape[1])])
    if op == OP.COPY:
        values = random_bits(shape, DTYPE[rng.choice([1, 2, 4])], rng.randrange(2**31))
    if op in (OP.COPY, OP.COPY_CHECKED):
        return Tensor(op, values, values.dtype)
    if op in (OP.FP32_TO_BF16, OP.BF16_TO_FP32):
        return Tensor(op, values, DTYPE[6 - item])
    if op == OP.QUANTIZE_FP8:
        rule = rng.choice(FP8_RULES if item == 2 else FP8_RULES[:-1])
        return Tensor(op, values, DTYPE[1], rule, block)
    if op == OP.QUANTIZE_MXFP8:
        return Tensor(op, values, DTYPE[1], RULE.MXFP8, (1, 32))
    if op == OP.QUANTIZE_INT4:
        return Tensor(op, values.clamp(-1e38, 1e38) if finite else values, DTYPE[1], RULE.INT4, (1, 32))
    codes = random_bits(shape, torch.uint8, rng.randrange(2**31))
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes) if finite else codes
    if op == OP.DEQUANTIZE_FP8:
        out = Tensor(op, codes, DTYPE[rng.choice([2, 4])], block=block)
        out.scales = torch.rand(out.scale_shape) * rng.choice([1e-30, 1.0])
    else:
        out = Tensor(op, codes, DTYPE[rng.choice([2, 4])], block=(1, 32))
        out.scales = torch.randint(0, 240 if finite else 256, out.scale_shape, dtype=torch.uint8)
    return out


@pytest.fixture(autouse=True)
def triton_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "scales.npy", TABLE.numpy())
    monkeypatch.setattr(kernel, "TRITON_SCALES", tmp_path / "scales.npy")


def packed(made: Plan, isa: str, threads: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    bucket, sums, flags = (
        torch.full((made.nbytes,), 7, dtype=torch.uint8),
        made.sums(),
        np.zeros(len(made.places), "u4"),
    )
    kernel.pack(made.pieces, bucket, sums, flags, isa=isa, threads=threads)
    return bucket, sums, flags


def check(tensors: list[Tensor], made: Plan, *, by_piece: bool) -> np.ndarray:
    """All instruction sets and numbers of threads agree with the reference; returns the flags."""
    results = [packed(made, isa, threads) for isa in kernel.isas() for threads in (1, 3)]
    bucket, sums, flags = results[0]
    for other in results[1:]:
        assert torch.equal(other[0], bucket)
        assert other[1].tolist() == sums.tolist() and other[2].tolist() == flags.tolist()
    if by_piece:
        expected = torch.full_like(bucket, 7), made.sums(), np.zeros_like(flags)
        reference.pack(made.pieces, *expected, TABLE)
        assert torch.equal(bucket, expected[0])  # also that nothing else was written
        assert sums.tolist() == expected[1].tolist() and flags.tolist() == expected[2].tolist()
    wholes = [data for t in tensors for data in t.expected(TABLE)]
    assert len(wholes) == len(made.places)
    for data, (offset, nbytes), total in zip(wholes, made.places, sums.tolist(), strict=True):
        assert np.array_equal(bucket.numpy()[offset : offset + nbytes], data)
        assert total == reference.checksum(torch.from_numpy(data))
    return flags


@pytest.mark.parametrize("seed", range(24))
def test_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(1, 1), (0, 5), (rng.randint(1, 40), rng.randint(1, 90)), (3, rng.randint(200, 500)), (33, 1)]
    tensors = [
        random_tensor(rng, shape, finite=True) for shape in (*shapes, (rng.randint(60, 140), rng.randint(9, 200)))
    ]
    flags = check(tensors, plan(tensors, rng), by_piece=True)
    assert not flags.any()


@pytest.mark.parametrize("seed", range(12))
def test_values_that_are_not_finite_flag_their_tensor(seed: int) -> None:
    rng = random.Random(100 + seed)
    tensors = [random_tensor(rng, (rng.randint(2, 40), rng.randint(2, 90)), finite=seed % 2 == k % 2) for k in range(4)]
    made = plan(tensors, rng)
    check(tensors, made, by_piece=True)


LARGE = {
    "bands of many blocks": (OP.QUANTIZE_FP8, 2, RULE.IEEE, (128, 128), (300, 5000)),
    "fp32 bands": (OP.QUANTIZE_FP8, 4, RULE.UE8M0, (128, 128), (130, 2300)),
    "a block as wide as a row": (OP.QUANTIZE_FP8, 2, RULE.TE, (1, 9001), (7, 9001)),
    "a block as large as the tensor": (OP.QUANTIZE_FP8, 2, RULE.UE8M0, (300, 5001), (300, 5001)),
    "blocks in one column": (OP.QUANTIZE_FP8, 2, RULE.TRITON, (128, 1), (260, 3000)),
    "mxfp8": (OP.QUANTIZE_MXFP8, 2, RULE.MXFP8, (1, 32), (200, 5003)),
    "fp32 to bf16": (OP.FP32_TO_BF16, 4, RULE.NONE, (0, 0), (3, 300_001)),
    "bf16 to fp32": (OP.BF16_TO_FP32, 2, RULE.NONE, (0, 0), (1503, 401)),
    "checked copy": (OP.COPY_CHECKED, 2, RULE.NONE, (0, 0), (3, 300_001)),
    "copy of long rows": (OP.COPY, 2, RULE.NONE, (0, 0), (3, 300_001)),
    "copy of short rows": (OP.COPY, 4, RULE.NONE, (0, 0), (1503, 401)),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tensors_are_cut_into_tiles_without_a_trace(name: str) -> None:
    op, item, rule, block, shape = LARGE[name]
    out = {OP.FP32_TO_BF16: 2, OP.BF16_TO_FP32: 4, OP.COPY: item, OP.COPY_CHECKED: item}.get(op, 1)
    rng = random.Random(name)
    values = random_weights(shape, DTYPE[item], rng)
    for layout in (values, values.t().contiguous().t()):
        tensors = [Tensor(op, layout, DTYPE[out], rule, block)]
        check(tensors, plan(tensors, rng, whole=True), by_piece=False)


@pytest.mark.parametrize("block", [(128, 128), (1, 32)])
def test_large_tensors_are_dequantized_without_a_trace(block: tuple[int, int]) -> None:
    mx = block == (1, 32)
    values = random_weights((300, 5003), torch.bfloat16, random.Random(0))
    codes, scales = reference.quantize(values, RULE.MXFP8 if mx else RULE.UE8M0, block)
    op = OP.DEQUANTIZE_MXFP8 if mx else OP.DEQUANTIZE_FP8
    for dtype in (torch.bfloat16, torch.float32):
        tensors = [Tensor(op, codes, dtype, block=block, scales=scales)]
        check(tensors, plan(tensors, random.Random(1), whole=True), by_piece=False)


def test_floating_point_modes_of_the_process_change_no_bits() -> None:
    tensors = [
        Tensor(
            OP.QUANTIZE_FP8, random_weights((64, 64), torch.bfloat16, random.Random(k)), torch.uint8, RULE.TE, (1, 64)
        )
        for k in range(3)
    ]
    made = plan(tensors, random.Random(0), whole=True)
    assert torch.set_flush_denormal(True)
    try:
        flushed = [packed(made, isa, 1) for isa in kernel.isas()]
        assert torch.tensor(1e-40) * 1.0 == 0.0  # in force
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(bucket, packed(made, "scalar", 1)[0]) for bucket, _, _ in flushed)


def test_pieces_of_no_elements_do_nothing() -> None:
    bucket, sums = torch.zeros(8, dtype=torch.uint8), np.zeros(1, np.uint64)
    kernel.pack(np.zeros(0, PIECE), bucket, sums)
    assert not bucket.any() and not sums.any()
