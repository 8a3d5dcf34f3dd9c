"""Every rounding decision, exhaustively: all bf16 values, all codes, and all bf16 amax for every rule."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels.record import NONFINITE, OP, RULE
from tests import reshard_reference as reference
from tests.unit.reshard.kernel_stand import FP8_RULES, Tensor, all_bf16, bits, plan, some_triton_scales

TABLE = some_triton_scales()
RULES = [*FP8_RULES, RULE.MXFP8]
MOST_INT4 = 0x7F7F
"""The one finite bf16 magnitude that INT4 cannot hold: seven times its scale is infinite."""
FINITE = 0x7F80
"""So many bf16 magnitudes are finite."""


@pytest.fixture(autouse=True)
def triton_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "scales.npy", TABLE.numpy())
    monkeypatch.setattr(kernel, "TRITON_SCALES", tmp_path / "scales.npy")


def run(t: Tensor, isa: str) -> tuple[list[np.ndarray], bool]:
    """The bytes of the tensor and of its scales, and whether it was flagged."""
    made = plan([t], random.Random(0), whole=True)
    bucket, flags = torch.zeros(made.nbytes, dtype=torch.uint8), np.zeros(len(made.places), np.uint32)
    kernel.pack(made.pieces, bucket, made.sums(), flags, isa=isa)
    return [bucket.numpy()[at : at + nbytes] for at, nbytes in made.places], bool(flags[0] & NONFINITE)


def check(t: Tensor, *, flagged: bool) -> list[np.ndarray]:
    """Every instruction set gives the reference's bytes; returns them."""
    expected = t.expected(TABLE)
    for isa in kernel.isas():
        found, flag = run(t, isa)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)), isa
        assert flag == flagged, isa
    return expected


def quantized(x: torch.Tensor, rule: RULE, block: tuple[int, int]) -> Tensor:
    return Tensor(OP.QUANTIZE_MXFP8 if rule == RULE.MXFP8 else OP.QUANTIZE_FP8, x, torch.uint8, rule, block)


def blocks_of_every_amax(width: int) -> torch.Tensor:
    """[32640, width] bf16: row k has the magnitude with bits k as its largest, in one place, and smaller ones of it."""
    generator = torch.Generator().manual_seed(0)
    amax = all_bf16()[:FINITE].float()[:, None]
    part = torch.rand(FINITE, width, generator=generator) * 2 - 1
    part[:, 1::3] *= torch.exp2(-12 * torch.rand(FINITE, (width + 1) // 3, generator=generator))  # subnormal codes
    x = (amax * part).bfloat16()
    place = torch.randint(0, width, (FINITE, 1), generator=generator)
    sign = torch.randint(0, 2, (FINITE, 1), generator=generator) * 2 - 1
    return x.scatter(1, place, (amax * sign).bfloat16())


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_amax(rule: RULE) -> None:
    x = blocks_of_every_amax(32)
    check(quantized(x, rule, (1, 32)), flagged=False)
    if rule != RULE.TRITON:
        check(quantized(x.float(), rule, (1, 32)), flagged=False)


@pytest.mark.parametrize("rule", [rule for rule in FP8_RULES if rule != RULE.TRITON])
def test_amax_of_fp32_between_those_of_bf16(rule: RULE) -> None:
    x = blocks_of_every_amax(32)[:, :32].float().view(torch.int32)
    x = (x + torch.randint(0, 65536, x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)).view(
        torch.float32
    )
    check(quantized(x, rule, (1, 32)), flagged=False)


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_alone_in_its_block(rule: RULE) -> None:
    x = all_bf16()
    padded = torch.stack([x, torch.zeros_like(x)], dim=1) if rule == RULE.MXFP8 else x[:, None]
    check(quantized(padded, rule, (1, 32) if rule == RULE.MXFP8 else (1, 1)), flagged=True)


def test_every_bf16_below_448_at_scale_1() -> None:
    x = all_bf16()
    x = x[x.float().abs() <= 448]
    x = torch.nn.functional.pad(x, (0, -len(x) % 63)).view(-1, 63)
    x = torch.cat([torch.full((len(x), 1), 448.0, dtype=torch.bfloat16), x], dim=1)
    codes, scales = check(quantized(x, RULE.UE8M0, (1, 64)), flagged=False)
    assert (scales.view(np.float32) == 1).all()
    assert np.array_equal(codes, bits(x.float().to(torch.float8_e4m3fn)))


def test_every_code_at_every_e8m0_scale() -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(256, 1)
    scales = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 8)
    for dtype in (torch.bfloat16, torch.float32):
        check(Tensor(OP.DEQUANTIZE_MXFP8, codes, dtype, block=(1, 32), scales=scales), flagged=True)


def test_every_code_at_fp32_scales_of_every_kind() -> None:
    special = [0.0, 1e-45, 1e-40, 1.0, 448.0, 1e36, 3.4e38, torch.inf, -torch.inf, torch.nan]
    scales = torch.cat([torch.tensor(special), torch.rand(200, generator=torch.Generator().manual_seed(0))])[:, None]
    codes = torch.arange(256).to(torch.uint8).repeat(len(scales), 1)
    for dtype in (torch.bfloat16, torch.float32):
        check(Tensor(OP.DEQUANTIZE_FP8, codes, dtype, block=(1, 256), scales=scales), flagged=True)


def test_every_bf16_amax_in_int4() -> None:
    x = blocks_of_every_amax(32)
    for source in (x, x.float()):
        int4 = Tensor(OP.QUANTIZE_INT4, source[:MOST_INT4], torch.uint8, RULE.INT4, (1, 32))
        check(int4, flagged=False)
    check(Tensor(OP.QUANTIZE_INT4, x[MOST_INT4:], torch.uint8, RULE.INT4, (1, 32)), flagged=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bf16_in_int4_among_those_next_to_it(dtype: torch.dtype) -> None:
    x = all_bf16().view(-1, 32).to(dtype)
    check(Tensor(OP.QUANTIZE_INT4, x, torch.uint8, RULE.INT4, (1, 32)), flagged=True)


def test_rounding_to_bf16_around_every_bf16() -> None:
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = ((torch.arange(65536, dtype=torch.int32) << 16)[:, None] | low).view(torch.float32)
    check(Tensor(OP.FP32_TO_BF16, x, torch.bfloat16), flagged=True)
    finite = x[(x.abs() < 3.38e38).all(1)]
    assert len(finite) > 65000
    check(Tensor(OP.FP32_TO_BF16, finite, torch.bfloat16), flagged=False)


def test_an_fp32_too_large_for_bf16_is_flagged() -> None:
    check(Tensor(OP.FP32_TO_BF16, torch.tensor([[1.0, 3.4e38]]), torch.bfloat16), flagged=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checked_copy_and_a_widening_flag_what_is_not_finite(dtype: torch.dtype) -> None:
    for op in (OP.COPY_CHECKED, OP.BF16_TO_FP32) if dtype == torch.bfloat16 else (OP.COPY_CHECKED,):
        out = torch.float32 if op == OP.BF16_TO_FP32 else dtype
        x = all_bf16()[:FINITE].to(dtype)[None]
        check(Tensor(op, x, out), flagged=False)
        check(Tensor(op, -x, out), flagged=False)
        for position in (0, 1000, FINITE - 1):
            for value in (torch.inf, -torch.inf, torch.nan):
                bad = x.clone()
                bad[0, position] = value
                check(Tensor(op, bad, out), flagged=True)


@pytest.mark.parametrize("rule", RULES)
def test_quantized_values_are_near(rule: RULE) -> None:
    x = blocks_of_every_amax(32)[0x2000:0x7000]  # amax from 2^-63 to 2^97
    codes, scales = reference.quantize(x, rule, (1, 32), TABLE)
    back = reference.dequantize(codes, scales, (1, 32), torch.float32)
    s = reference.from_e8m0(scales) if rule == RULE.MXFP8 else scales
    room = torch.maximum(x.float().abs() * 2**-4 * 1.0001, s * 2**-10 * (2 if rule == RULE.UE8M0 else 1) * 1.0001)
    assert (abs(back - x.float()) <= room).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ue8m0_is_a_fixed_point_of_requantization(dtype: torch.dtype) -> None:
    """Engines dequantize such weights and quantize them again on loading."""
    x = blocks_of_every_amax(32)[: FINITE - 8].to(dtype)  # above, dequantized values overflow
    codes, scales = reference.quantize(x, RULE.UE8M0, (1, 32))
    again = reference.dequantize(codes, scales, (1, 32), dtype)
    codes_again, scales_again = reference.quantize(again, RULE.UE8M0, (1, 32))
    assert torch.equal(scales, scales_again) and torch.equal(codes, codes_again)
    largest = (codes & 0x7F).amax(1)
    assert (largest == 0x7E).float().mean() > 0.02  # 448: some were doubled, or nothing was tested
    assert not ((largest == 0x76) & (scales[:, 0] > 2**-22)).any()  # 224 is left at the floor of amax alone
