"""Inputs for the operations of exact mode, and results compared by their bits."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype, seed: int, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view({4: torch.int32, 2: torch.int16}[t.element_size()])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    differ = int((bits(found) != bits(expected)).sum())
    assert differ == 0, f"{what}: {differ} of {found.numel()} differ"
