"""Description of a model's rotary embedding in exact mode: equal on both sides, it gives the same table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slimx.numerics.exact.rope import rope_frequencies, rope_table


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
