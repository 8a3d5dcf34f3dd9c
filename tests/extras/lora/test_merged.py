"""A merged weight has the same bits in all computations, and passes gradients on to A and B."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.lora.merged import Merged, merged

ROWS, COLS, RANK, SCALE = 24, 40, 6, 1.5


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=random).to(dtype) for shape in ((ROWS, COLS), (RANK, COLS), (ROWS, RANK)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_weight_is_merged_as_the_whole_is(dtype):
    weight, a, b = drawn(dtype)
    whole = merged(weight, a, b, SCALE)
    wide = weight.double() + SCALE * (b.double() @ a.double())
    assert (whole.double() - wide).abs().max() <= wide.abs().max() * torch.finfo(dtype).eps
    for rows, cols in ((slice(0, 12), slice(None)), (slice(5, 6), slice(None)), (slice(None), slice(20, 40))):
        part = merged(weight[rows, cols].contiguous(), a[:, cols].contiguous(), b[rows].contiguous(), SCALE)
        assert torch.equal(part, whole[rows, cols])


def test_a_merged_weight_is_rounded_once():
    # 256 + 1.5 lies between two bfloat16; rounded before the sum, 1.25 + 0.25 would be the same, 1.0 would be lost.
    weight = torch.tensor([[256.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0], [0.25]], dtype=torch.bfloat16), torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    assert merged(weight, a, b, 1.0).item() == 258.0  # 257.125, to the nearest of 256 and 258
    assert merged(weight, a, b, 0.5).item() == 256.0


def test_gradients_are_those_of_the_sum():
    weight, a, b = drawn(torch.float32)
    upstream = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(4))
    found, expected = [], []
    for compute, out in (
        (lambda: Merged.apply(weight, a, b, SCALE), found),
        (lambda: weight + SCALE * b @ a, expected),
    ):
        a.requires_grad_(), b.requires_grad_()
        a.grad = b.grad = None
        compute().backward(upstream)
        out += [a.grad, b.grad]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert weight.grad is None
