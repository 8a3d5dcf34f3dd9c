"""Products with one order of sums: kernels have the bits of the specification, for parts as for the whole."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.exact.ordered import kernel, product, reference


def drawn(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (5, 7, 16), (33, 40, 70), (0, 4, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-19], ids=["normal", "to denormals"])
def test_the_kernel_has_the_bits_of_the_specification(rows: int, columns: int, width: int, size: float) -> None:
    x, weight = drawn(rows, width, seed=1, size=size), drawn(columns, width, seed=2, size=size)
    expected = reference.product(x, weight)
    assert torch.equal(kernel.product(x, weight).view(torch.int32), expected.view(torch.int32))


def test_a_part_has_the_bits_that_it_has_in_the_whole() -> None:
    x, weight = drawn(12, 48, seed=3), drawn(20, 48, seed=4)
    whole = product(x, weight)
    assert torch.equal(product(x[3:4], weight[7:].t().contiguous().t()), whole[3:4, 7:])
    wide = x.double() @ weight.double().t()
    assert (whole - wide).abs().max() <= 1e-5 * wide.abs().max()
