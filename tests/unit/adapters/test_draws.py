"""Seeded draws take the token of SGLang's fp64 expression: random, extreme and equal scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from slimx.adapters.sglang import seeded_sampling as draws

LAST = draws.LARGEST_HASH


def highest_by_fp64(hashed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """SGLang's expression over the whole row."""
    uniform = hashed.double() / LAST
    exponential = -uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - exponential.log()).argmax(1, keepdim=True)


SPREADS, COLUMNS, DTYPES = (0.0, 1.0, 30.0), (1, 256, 333, 20_001), (torch.float32, torch.float64)
RARE = {"hashes": None, "zero": 0, "largest": LAST, "next": LAST - 1}


def cases() -> Iterator[Any]:
    """The grid; every pair of a number of columns and a rare hash, and of either and another value, is not slow."""
    for n, (columns, name) in enumerate(product(COLUMNS, RARE)):
        row = n // len(RARE)
        for spread, dtype in product(SPREADS, DTYPES):
            kept = spread == SPREADS[(n + row) % 3] and dtype == DTYPES[(n + row) % 2]
            marks = [] if kept else [pytest.mark.slow("full grid")]
            yield pytest.param(spread, columns, dtype, RARE[name], marks=marks, id=f"{name}-{dtype}-{columns}-{spread}")


@pytest.mark.parametrize(("spread", "columns", "dtype", "rare"), list(cases()))
def test_a_draw_is_that_of_fp64(spread: float, columns: int, dtype: torch.dtype, rare: int | None) -> None:
    generator = torch.Generator().manual_seed(columns)
    shape = (2_000_000 // columns if columns > 256 else 500, columns)
    logprobs = (spread * torch.randn(shape, generator=generator, dtype=dtype)).log_softmax(-1)
    logprobs[:, 1:][torch.rand(shape, generator=generator)[:, 1:] < 0.5] = -torch.inf
    hashed = torch.randint(0, 2**32, shape, generator=generator)
    if rare is not None:
        few = torch.randint(0, columns, (shape[0], draws.BLOCKS), generator=generator)
        hashed.scatter_(1, few, rare)
    bits = hashed.to(torch.uint32)
    assert torch.equal(draws.highest(bits, logprobs), highest_by_fp64(bits, logprobs))


def test_an_estimate_near_the_maximum_is_within_2e_5_of_the_score() -> None:
    hashed = torch.cat([torch.arange(10**5), LAST - torch.arange(10**5), torch.randint(0, 2**32, (10**6,))])
    logprobs = -40 * torch.rand(hashed.shape)
    error = (draws.estimated_scores(hashed, logprobs) - draws.scores(hashed, logprobs))[1:].abs()
    assert error.max() < 2e-5
    assert draws.estimated_scores(hashed[:1], logprobs[:1]) >= draws.scores(hashed[:1], logprobs[:1])
