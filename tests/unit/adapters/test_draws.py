"""Seeded draws take the token of SGLang's fp64 expression: random, extreme and equal scores."""

from __future__ import annotations

import pytest
import torch

from slimx.adapters.sglang import draws

LAST = draws.LARGEST_HASH


def highest_by_fp64(hashed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """SGLang's expression over the whole row."""
    uniform = hashed.double() / LAST
    exponential = -uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - exponential.log()).argmax(1, keepdim=True)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("columns", [1, 256, 333, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rare", [None, 0, LAST, LAST - 1], ids=["hashes", "zero", "largest", "next"])
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
