"""Rotary position embedding of exact mode (Su et al., 2104.09864): the rotation, its table of cosines and sines, and
`Rotary`, a model's settings from which trainer and engines compute the same table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import torch

from slimx.extras.exact.operations.forward import forward_on
from slimx.extras.exact.operations.forward.elementary import sine_and_cosine


def rope_table(frequencies: torch.Tensor, positions: int, factor: float = 1.0) -> torch.Tensor:
    """Computes the fp32 table [positions, 2 f] of the cosines, then the sines, of position * frequency, all multiplied
    by `factor` (YaRN's magnitude).

    `frequencies` [f]: radians per position. The table is computed in fp64 in a fixed order of operations and rounded
    once, so it is bitwise equal on every machine.
    """
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies.double().cpu()
    sine, cosine = sine_and_cosine(angle)
    return (torch.cat((cosine, sine), dim=1) * factor).float()


_POWERS = Context(prec=60)
"""Context for decimal powers with 60 digits, enough to round every power to fp32 correctly."""


def rope_frequencies(dimensions: int, base: float) -> torch.Tensor:
    """Computes the frequencies 1 / base^(2 i / dimensions), fp32 [dimensions / 2], with exponent, power and quotient
    each rounded to fp32.

    transformers and SGLang use the same formula, but the result of their power function depends on the C library. Here
    the power is rounded to the nearest fp32 number on every machine. Exponents are rounded, too, because models were
    trained with rounded exponents.
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
    """Applies the rotary embedding to query [T, heads, d] and key [T, groups, d] at `positions` [T], in fp32, and
    rounds once to their dtype.

    `cos_sin`: table from `rope_table`; dimensions beyond its width are unchanged. `interleaved`: True if a pair
    consists of two adjacent dimensions, False if it consists of corresponding dimensions of the two halves of the
    rotated dimensions.
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
        """Rotates the gradient by the negative angles, because a rotation's transpose is its inverse."""
        cosine, sine = ctx.saved_tensors
        rotated = forward_on(gradient.device).rotate(gradient, cosine.contiguous(), -sine, ctx.interleaved)
        return rotated, None, None, None


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling of rotary frequencies (`_compute_llama3_parameters` in transformers): long wavelengths are
    multiplied by `factor`, short ones are kept, and those in between are interpolated."""

    factor: float
    low: float
    """Llama 3.1's `low_freq_factor`: wavelengths above `original / low` positions are multiplied by `factor`."""
    high: float
    """Llama 3.1's `high_freq_factor`: wavelengths below `original / high` positions are unchanged."""
    original: int
    """Context length for which the model was trained before the extension."""

    def scaled(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scales `frequencies`, fp64 [f], and rounds the result to fp32."""
        turns = self.original * frequencies / (2 * math.pi)  # rotations within the original context length
        blend = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return ((1 - blend) * frequencies / self.factor + blend * frequencies).float()


def yarn_lengthening(factor: float, magnitude: float) -> float:
    """Returns YaRN's attention factor ("mscale") for a context length extended by `factor`. `magnitude`: coefficient of
    the attention factor, mscale or mscale_all_dim in config.json."""
    return 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's scaling of rotary frequencies (Peng et al., 2309.00071), as in DeepSeek-V3: high frequencies are kept, low
    ones are divided by `factor`, and those in between are interpolated."""

    factor: float
    original: int
    """Context length for which the model was trained before the extension."""
    fast: float
    """Number of rotations within `original` positions at or above which a dimension keeps its frequency (beta_fast)."""
    slow: float
    """Number of rotations within `original` positions at or below which a dimension's frequency is divided by `factor`
    (beta_slow)."""
    magnitude: float
    """Factor by which both queries and keys are multiplied."""

    def scaled(self, frequencies: torch.Tensor, base: float) -> torch.Tensor:
        """Scales `frequencies`, fp64 [f], of 2 f rotated dimensions, and rounds the result to fp32. `base`: the
        embedding's base (rope_theta)."""
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
    """Settings of a model's rotary embedding. `dimensions`: number of rotated dimensions of each head; `base`:
    rope_theta; `scaling`: None if frequencies are not scaled."""

    dimensions: int
    base: float
    scaling: Llama3 | Yarn | None = None

    def table(self, positions: int) -> torch.Tensor:
        """Returns the table of cosines and sines for `rope`, fp32 [positions, dimensions]."""
        frequencies = rope_frequencies(self.dimensions, self.base).double()
        match self.scaling:
            case Llama3():
                return rope_table(self.scaling.scaled(frequencies), positions)
            case Yarn():
                scaled = self.scaling.scaled(frequencies, self.base)
                return rope_table(scaled, positions, self.scaling.magnitude)
        return rope_table(frequencies, positions)
