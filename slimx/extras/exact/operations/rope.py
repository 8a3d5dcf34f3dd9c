"""Rotary position embedding of exact mode (Su et al., 2104.09864): the rotation, its table, and the description of a
model's embedding, which gives the same table on both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.elementary import sine_and_cosine


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


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's frequencies (transformers, `_compute_llama3_parameters`): long waves become `factor` times longer."""

    factor: float
    low: float
    """A wave longer than `original / low` is stretched."""
    high: float
    """One shorter than `original / high` is not."""
    original: int
    """Positions of the model before the stretching."""

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scale fp64 `frequencies` [f] to fp32."""
        turns = self.original * frequencies / (2 * math.pi)  # within the original positions
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return ((1 - share) * frequencies / self.factor + share * frequencies).float()


def yarn_lengthening(factor: float, magnitude: float) -> float:
    """YaRN's factor of attention ("mscale") for positions that are stretched by `factor`."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., 2309.00071) as DeepSeek-V3 has it."""

    factor: float
    original: int
    """Positions of the model before the stretching."""
    fast: float
    """Turns within them from which on a dimension keeps its frequency (beta_fast)."""
    slow: float
    """Turns below which it is divided by `factor` (beta_slow)."""
    magnitude: float
    """Factor by which queries and keys are lengthened, each."""

    def scaled(self, frequencies: torch.Tensor, base: float) -> torch.Tensor:
        """Scale fp64 `frequencies` [f] of 2 f dimensions to fp32."""
        dimensions = 2 * len(frequencies)

        def dimension(turns: float) -> float:
            return dimensions * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(self.fast)), 0)
        high = min(math.ceil(dimension(self.slow)), dimensions - 1)
        ramp = (torch.arange(len(frequencies), dtype=torch.float64) - low) / max(high - low, 0.001)
        share = ramp.clamp(0, 1)
        return (share * frequencies / self.factor + (1 - share) * frequencies).float()


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding of `dimensions` of a head."""

    dimensions: int
    base: float
    scaling: Llama3 | Yarn | None = None

    def table(self, positions: int) -> torch.Tensor:
        """The table that `rope` reads: [positions, dimensions] fp32."""
        frequencies = rope_frequencies(self.dimensions, self.base).double()
        match self.scaling:
            case Llama3():
                return rope_table(self.scaling.scaled(frequencies), positions)
            case Yarn():
                scaled = self.scaling.scaled(frequencies, self.base)
                return rope_table(scaled, positions, self.scaling.magnitude)
        return rope_table(frequencies, positions)
