"""Products of a linear layer in fp8, held against the recipes written out in torch."""

from __future__ import annotations

import pytest
import torch

from slimx.extras.low_precision.products import linear
from slimx.extras.low_precision.recipes import RECIPES
from slimx.reshard.kernels.record import RULE
from tests import reshard_reference as reference

RULES = {"blockwise": RULE.TE, "mxfp8": RULE.MXFP8}


def spread(seed: int, *shape: int) -> torch.Tensor:
    """Returns numbers whose size differs from row to row and from column to column, with some rows zero."""
    random = torch.Generator().manual_seed(seed)
    down, across = (10 ** torch.randn(n, generator=random) for n in shape)
    down[::7] = 0
    return (torch.randn(shape, generator=random) * down[:, None] * across).bfloat16()


def rounded(x: torch.Tensor, recipe: str, block: tuple[int, int]) -> torch.Tensor:
    codes, scales = reference.quantize(x, RULES[recipe], block)
    return reference.dequantize(codes, scales, block, torch.float32)


def along_rows(x: torch.Tensor, recipe: str) -> torch.Tensor:
    """Blocks of one column, as the reference knows only blocks of MXFP8 that are one row."""
    width = RECIPES[recipe].width
    return rounded(x.T.contiguous(), recipe, (1, width)).T


@pytest.mark.parametrize(
    ("recipe", "tokens", "cols", "rows"),
    [
        ("blockwise", 256, 256, 384),
        ("blockwise", 200, 256, 128),
        (
            "blockwise",
            256,
            256,
            192,
        ),  # the last block of weights has 64 rows, that of the output's gradients 64 columns
        ("mxfp8", 256, 256, 384),
        ("mxfp8", 40, 64, 96),
    ],
)
def test_each_product_is_that_of_the_recipe(recipe: str, tokens: int, cols: int, rows: int) -> None:
    x, weight, above = spread(1, tokens, cols), spread(2, rows, cols), spread(3, tokens, rows)
    found = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = linear(found[0].view(tokens, 1, cols), found[1], RECIPES[recipe])
    out.backward(above.view(tokens, 1, rows))
    if recipe == "blockwise":
        run = (1, 128)
        weights = [rounded(weight, recipe, (128, 128))] * 2
    else:
        run = (1, 32)
        weights = [rounded(weight, recipe, run), along_rows(weight, recipe)]
    expected = (
        rounded(x, recipe, run) @ weights[0].T,
        rounded(above, recipe, run) @ weights[1],
        along_rows(above, recipe).T @ along_rows(x, recipe),
    )
    for one, other in zip((out.view(tokens, rows), found[0].grad, found[1].grad), expected, strict=True):
        assert other.abs().max() > 0
        assert torch.equal(one, other.bfloat16())


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    x, weight = torch.zeros(0, 64).bfloat16(), spread(2, 96, 64).requires_grad_()
    out = linear(x, weight, RECIPES["mxfp8"])
    out.sum().backward()
    assert out.shape == (0, 96)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_value_that_is_not_finite_shows() -> None:
    x = spread(1, 128, 128)
    x[3, 5] = torch.inf
    out = linear(x, spread(2, 128, 128), RECIPES["blockwise"])
    assert out[3].isnan().all()
    assert out[4].isfinite().all()
