"""Rotary position embedding of exact mode (Su et al., 2104.09864): the rotation, its table, and a description of a
model's embedding that gives the same table on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.elementary import sine_and_cosine


def rope_table(frequencies: torch.Tensor, positions: int, factor: float = 1.0) -> torch.Tensor:
    """Computes the fp32 table [positions, 2 f] of cosines, then sines, of position * frequency, times `factor`
    (YaRN's).

    `frequencies` [f]: radians per position. Computed in fp64 in a fixed order of operations and rounded once: equal on
    every machine.
    """
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies.double().cpu()
    sine, cosine = sine_and_cosine(angle)
    return (torch.cat((cosine, sine), dim=1) * factor).float()


_POWERS = Context(prec=60)
"""Decimal digits of a power before rounding: enough to decide every rounding to fp32."""


def rope_frequencies(dimensions: int, base: float) -> torch.Tensor:
    """Computes 1 / base^(2 i / dimensions), [dimensions / 2] fp32: exponent, power and quotient each rounded to fp32.

    The formula of transformers and SGLang, but their power depends on the C library; here it is the nearest fp32 number
    on every machine. Exponents are rounded too because models were trained with rounded ones.
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
    """Rotates query [T, heads, d] and key [T, groups, d] by their positions [T], in fp32, rounded to their dtype once.

    `cos_sin`: a table of `rope_table`; dimensions beyond its width are left unchanged. `interleaved`: pairs are
    neighbouring dimensions, else the two halves of the rotated dimensions.
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
        """Rotates by the negative angle: the inverse of a rotation is its transpose."""
        cosine, sine = ctx.saved_tensors
        rotated = forward_on(gradient.device).rotate(gradient, cosine.contiguous(), -sine, ctx.interleaved)
        return rotated, None, None, None


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's frequencies (transformers, `_compute_llama3_parameters`): long wavelengths are multiplied by
    `factor`."""

    factor: float
    low: float
    """Wavelengths above `original / low` are stretched."""
    high: float
    """Wavelengths below `original / high` are left unchanged."""
    original: int
    """Context length of the model before the extension."""

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scales fp64 `frequencies` [f] to fp32."""
        turns = self.original * frequencies / (2 * math.pi)  # within the original positions
        blend = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return ((1 - blend) * frequencies / self.factor + blend * frequencies).float()


def yarn_lengthening(factor: float, magnitude: float) -> float:
    """Returns YaRN's attention factor ("mscale") for a context extended by `factor`."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., 2309.00071) as in DeepSeek-V3."""

    factor: float
    original: int
    """Context length of the model before the extension."""
    fast: float
    """Rotations within `original` positions from which a dimension keeps its frequency (beta_fast)."""
    slow: float
    """Rotations below which its frequency is divided by `factor` (beta_slow)."""
    magnitude: float
    """Factor of both queries and keys."""

    def scaled(self, frequencies: torch.Tensor, base: float) -> torch.Tensor:
        """Scales fp64 `frequencies` [f] of 2 f dimensions to fp32."""
        dimensions = 2 * len(frequencies)

        def dimension(turns: float) -> float:
            return dimensions * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(self.fast)), 0)
        high = min(math.ceil(dimension(self.slow)), dimensions - 1)
        ramp = (torch.arange(len(frequencies), dtype=torch.float64) - low) / max(high - low, 0.001)
        blend = ramp.clamp(0, 1)
        return (blend * frequencies / self.factor + (1 - blend) * frequencies).float()


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding of `dimensions` of a head."""

    dimensions: int
    base: float
    scaling: Llama3 | Yarn | None = None

    def table(self, positions: int) -> torch.Tensor:
        """Returns the table that `rope` reads: [positions, dimensions] fp32."""
        frequencies = rope_frequencies(self.dimensions, self.base).double()
        match self.scaling:
            case Llama3():
                return rope_table(self.scaling.scaled(frequencies), positions)
            case Yarn():
                scaled = self.scaling.scaled(frequencies, self.base)
                return rope_table(scaled, positions, self.scaling.magnitude)
        return rope_table(frequencies, positions)
