"""INT4 by the kernels of csrc: the codes of the package compressed-tensors, the same on a GPU, and the same again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from slimx.extras.low_precision import int4_kernel as int4
from slimx.extras.low_precision.int4 import GROUP, dequantize
from tests.refusals import refused
from tests.unit.emulation import CSRC, library
from tests.unit.reshard.cuda_stand import EMULATION

EPSILON = 2.0**-7
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP),
)


def matrix() -> torch.Tensor:
    """Weights of every size, some groups of zeros, of the smallest and of the largest numbers."""
    torch.manual_seed(0)
    weight = torch.randn(512, 256) * torch.logspace(-30, 30, 512).unsqueeze(1)
    weight[0], weight[1], weight[2] = 0, 1e-39, 3e38
    weight[3, :GROUP] = torch.linspace(-7.5, 7.5, GROUP)
    return weight.to(torch.bfloat16)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Computes the rule of docs/numerics.md in torch."""
    amax = weight.unflatten(1, (-1, GROUP)).abs().amax(-1)
    scale = (amax.float() / 7).to(torch.bfloat16)
    return torch.where(scale < 2.0**-126, torch.tensor(EPSILON, dtype=scale.dtype), scale)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns True if two tensors have the same dtype and bits."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_codes_and_values_are_those_of_compressed_tensors() -> None:
    weight = matrix()
    codes, scales, finite = int4.quantize(weight)
    theirs = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale_of(weight)}, SCHEME)
    assert finite
    assert same(scales, scale_of(weight))
    assert same(codes, theirs["weight_packed"])
    back = PackedQuantizationCompressor.decompress(dict(theirs), SCHEME)["weight"]
    rounded = weight.clone()
    int4.round_(rounded)
    # Their zero may be negative; a zero of codes is not.
    assert torch.equal(rounded, back)
    assert same(rounded, dequantize(codes, scales))


def test_rounding_twice_equals_rounding_once() -> None:
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = torch.zeros(len(amax), GROUP, dtype=torch.bfloat16)
    spread = torch.arange(-7, 8).float() / 7
    weight[:, 1:16] = (amax.float().unsqueeze(1) * spread).to(torch.bfloat16)
    weight[:, 0] = amax
    codes, scales, _ = int4.quantize(weight)
    fit = ~scales.isnan().squeeze(1)
    assert int((~fit).sum()) == 1  # the largest bf16, whose value would be infinite
    once = weight[fit].clone()
    int4.round_(once)
    twice = once.clone()
    int4.round_(twice)
    assert same(once, twice)
    again, scales_again, finite = int4.quantize(once)
    assert finite
    assert same(again, codes[fit])
    assert same(scales_again, scales[fit])
    used = (codes[fit].unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten(1)[scales[fit, 0] != EPSILON]
    assert used.unique().tolist() == list(range(1, 16))  # all codes but that of -8


@pytest.mark.parametrize("threads", [1, 3])
def test_fp32_is_rounded_as_the_nearest_bf16(threads: int) -> None:
    weight = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    for mine, plain in zip(int4.quantize(weight, threads=threads), int4.quantize(weight.bfloat16()), strict=True):
        assert mine == plain if isinstance(mine, bool) else same(mine, plain)
    rounded, narrow = weight.clone(), weight.bfloat16()
    int4.round_(rounded, threads=threads)
    int4.round_(narrow)
    assert same(rounded, narrow.float())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_group_that_is_not_finite_is_nan_and_reported(value: float) -> None:
    weight = matrix()
    plain, plain_scales, _ = int4.quantize(weight)
    weight[9, 70] = value
    codes, scales, finite = int4.quantize(weight)
    assert not finite
    assert scales[9, 2].isnan()
    rounded = weight.clone()
    int4.round_(rounded)
    assert rounded[9, 64:96].isnan().all()
    scales[9, 2], codes[9, 8:12] = plain_scales[9, 2], plain[9, 8:12]
    assert same(codes, plain)
    assert same(scales, plain_scales)


def test_part_of_a_matrix_is_rounded_in_place_alone() -> None:
    whole = matrix()
    before = whole.clone()
    int4.round_(whole[:, 64:128])
    expected = before[:, 64:128].contiguous()
    int4.round_(expected)
    assert same(whole[:, 64:128], expected)
    assert same(whole[:, :64], before[:, :64])
    assert same(whole[:, 128:], before[:, 128:])


@pytest.mark.parametrize("shape", [(4, 48), (4, 16), (64,), (2, 4, 32)])
def test_a_shape_without_groups_is_refused(shape: tuple[int, ...]) -> None:
    with refused("int4.shape"):
        int4.quantize(torch.zeros(shape, dtype=torch.bfloat16))


def test_a_transposed_matrix_is_refused() -> None:
    with refused("int4.shape"):
        int4.round_(torch.zeros(64, 64, dtype=torch.bfloat16).T)


def test_another_dtype_is_refused() -> None:
    with refused("kernel.dtype"):
        int4.quantize(torch.zeros(4, 32, dtype=torch.float16))


def test_the_kernel_for_gpus_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix()
    expected, narrow = int4.quantize(weight), weight.clone()
    int4.round_(narrow)
    emulate(monkeypatch)
    for dtype in (torch.bfloat16, torch.float32):
        rounded = weight.to(dtype)
        codes, scales, finite = int4.quantize(rounded)
        int4.round_(rounded)
        assert (same(codes, expected[0]), same(scales, expected[1]), finite) == (True, True, True)
        assert same(rounded, narrow.to(dtype))
    weight[9, 70] = float("nan")
    assert int4.quantize(weight)[2] is False


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernel's source on host memory, its threads one after another."""
    sources = (*CSRC.glob("*.cuh"), *CSRC.glob("*.h"), EMULATION / "device.cuh")
    emulated = int4._cuda(
        library(Path(__file__).with_name("int4_emulation") / "int4.cpp", sources, "-O2", "-std=c++17")
    )
    monkeypatch.setattr(int4, "_cpu", lambda: pytest.fail("the CPU's kernel was asked"))
    monkeypatch.setattr(int4, "_cuda", lambda path: emulated)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    run = int4._run
    pretended = SimpleNamespace(type="cuda")

    def on_device(record: object, device: object, threads: object, *, wait: bool = True) -> bool:
        return run(record, pretended, threads, wait=wait)

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **how: zeros(*size, **how))
    monkeypatch.setattr(int4, "_run", on_device)
