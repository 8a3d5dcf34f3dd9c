"""The rule triton is what a Triton kernel computes, and the table of its scales gives the CPU the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slimx.reshard.kernels import cpu as kernel
from slimx.reshard.kernels import cuda as kernel_cuda
from slimx.reshard.kernels.record import OP, RULE
from tests.gpu.plans import MARGIN, TRITON, random_plan
from tests.gpu.running import on_cpu, on_gpu
from tests.gpu.tables import AMAX, one_block_per_amax

STORED = kernel.TRITON_SCALES
BLOCK = 128
"""Elements of a block in `one_block_per_amax`."""


@pytest.fixture
def table(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> np.ndarray:
    """The device's scales, given to the CPU kernels in place of the stored ones."""
    scales = kernel_cuda.triton_scales(device)
    np.save(tmp_path / STORED.name, scales)
    monkeypatch.setattr(kernel, "TRITON_SCALES", tmp_path / STORED.name)
    return scales


def test_the_table_is_close_to_the_division_that_it_stands_for(table: np.ndarray) -> None:
    amax = (np.arange(AMAX, dtype=np.uint32) << 16).view(np.float32)
    scale = np.maximum(amax, np.float32(1e-10)) / np.float32(448)
    assert table.shape == (AMAX, 2) and table.dtype == np.float32
    assert np.allclose(table[:, 0], scale, rtol=3e-7, atol=0)
    assert np.allclose(table[:, 1], 1 / table[:, 0].astype(np.float64), rtol=3e-7, atol=0)


def test_the_stored_table_is_this_device_s(table: np.ndarray) -> None:
    if not STORED.exists():
        pytest.skip(f"no {STORED.name} is stored yet: `make gpu` writes one")
    assert np.array_equal(np.load(STORED), table)


def test_gpu_equals_cpu_for_every_amax(device: torch.device, table: np.ndarray) -> None:
    plan = one_block_per_amax(OP.QUANTIZE_FP8, RULE.TRITON)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


@pytest.mark.parametrize("seed", range(6))
def test_gpu_equals_cpu_on_random_plans(device: torch.device, table: np.ndarray, seed: int) -> None:
    plan = random_plan(seed, forms=[TRITON], tensors=12)
    on_gpu(plan, device).must_equal(on_cpu(plan), plan.pieces)


def test_a_triton_kernel_gives_the_same_scales_and_codes(device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.gpu.triton_quantize import quantize

    plan = one_block_per_amax(OP.QUANTIZE_FP8, RULE.TRITON)
    x = torch.from_numpy(plan.memory).to(device).view(torch.bfloat16).view(AMAX, BLOCK)
    codes, scales = quantize(x)

    bucket = on_gpu(plan, device).bucket
    packed_codes = bucket[MARGIN : MARGIN + AMAX * BLOCK].reshape(AMAX, BLOCK)
    at = int(plan.pieces["scale"][0])
    packed_scales = bucket[at : at + 4 * AMAX].view(np.uint32)
    theirs = scales.cpu().numpy().view(np.uint32)
    wrong = np.flatnonzero(packed_scales != theirs)
    assert not len(wrong), f"{len(wrong)} scales differ, first at amax {wrong[0]:#06x}"
    wrong = np.argwhere(packed_codes != codes.view(torch.uint8).cpu().numpy())
    assert not len(wrong), f"{len(wrong)} codes differ, first at amax {wrong[0][0]:#06x}"
