"""Rotary position embedding of exact mode (Su et al., 2104.09864)."""

from decimal import Context, Decimal
from typing import Any

import torch

from slimx.numerics.exact.backend import forward_on
from slimx.numerics.exact.elementary import sine_and_cosine


def rope_table(frequencies: torch.Tensor, positions: int, factor: float = 1.0) -> torch.Tensor:
    """The fp32 table [positions, 2 f] of cosines, then sines, of position * frequency, times `factor` (YaRN's).

    `frequencies` [f]: radians per position. Made in fp64 by a fixed order of operations, and rounded once: equal on
    every machine.
    """
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies.double().cpu()
    sine, cosine = sine_and_cosine(angle)
    return (torch.cat((cosine, sine), dim=1) * factor).float()


_POWERS = Context(prec=60)
"""Digits of a power before it is rounded: none lies so near the middle of two fp32 numbers."""


def rope_frequencies(dimensions: int, base: float) -> torch.Tensor:
    """1 / base^(2 i / dimensions), [dimensions / 2] fp32: exponent, power and quotient each rounded to fp32.

    That is the formula of transformers and SGLang, whose power is as good as the C library: here it is the nearest fp32
    number on every machine. Exponents are rounded too because models were trained with those.
    """
    exponents = torch.arange(0, dimensions, 2, dtype=torch.float32) / dimensions
    powers = [float(_POWERS.power(Decimal(base), Decimal(exponent))) for exponent in exponents.tolist()]
    return 1.0 / torch.tensor(powers, dtype=torch.float64).float()


def rope(
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [T, heads, d] and key [T, groups, d] by their positions [T], in fp32, rounded to their dtype once.

    `cos_sin`: a table of `rope_table`; where its width is below d, the dimensions behind it stay as they are.
    `interleaved`: pairs are neighbours, else the halves of the dimensions that are turned.
    """
    cosine, sine = cos_sin[positions].chunk(2, dim=1)
    return _Rotation.apply(query, cosine, sine, interleaved), _Rotation.apply(key, cosine, sine, interleaved)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return forward_on(x.device).rotate(x, cosine.contiguous(), sine.contiguous(), interleaved)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """The inverse of a rotation is its transpose."""
        cosine, sine = ctx.saved_tensors
        turned = forward_on(gradient.device).rotate(gradient, cosine.contiguous(), -sine, ctx.interleaved)
        return turned, None, None, None
