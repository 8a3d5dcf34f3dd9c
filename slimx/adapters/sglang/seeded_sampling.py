"""Seeded sampling with few fp64 logarithms, which samples the same tokens as SGLang 0.5.23's `multinomial_with_seed`.

SGLang samples with the Gumbel-max trick in fp64: two logarithms per request and vocabulary entry, although some GPUs,
such as Blackwell Ultra, have little fp64 throughput. Here an fp32 estimate finds the blocks of the vocabulary that can
contain the maximum, and the fp64 expression decides among the tokens of these blocks.

For a token near the maximum, the estimate is within 2e-5 of the fp64 score. A sample can differ only if 8 tokens in 8
other blocks score within 4e-5 of the maximum. The number of tokens within d of a Gumbel maximum is bounded by a
geometric distribution with mean exp(d) - 1, so the probability is below 1e-35 per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

DRAW = "sglang.srt.layers.sampler.multinomial_with_seed"
LARGEST_HASH = 2**32 - 1
LEAST_NOISE = 2.0**-32
"""SGLang's lower bound of -log(u), where u = hash / `LARGEST_HASH`; without it, -log(u) would be 0 for the largest
hash."""
WIDTH = 256
"""Number of vocabulary entries in a block, the unit in which candidates for the maximum are selected."""
BLOCKS = 8
"""Number of vocabulary blocks per request whose tokens are scored in fp64."""


def estimated_scores(hashed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the score of each token in fp32: its log-prob plus the Gumbel noise -log(-log(u)), where u = hash /
    `LARGEST_HASH`. `hashed`: int64, with the shape of `logprobs`.

    For u above one half, -log(u) is computed from 1 - u, so that its relative error remains that of fp32 up to the
    largest hash.
    """
    below = (LARGEST_HASH - hashed).float() / LARGEST_HASH
    above = hashed.float() / LARGEST_HASH
    exponential = torch.where(hashed > LARGEST_HASH // 2, -torch.log1p(-below), -torch.log(above))
    return logprobs.float() - torch.log(exponential.clamp(LEAST_NOISE, torch.finfo(torch.float32).max))


def scores(hashed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the score of each token in fp64: its log-prob plus Gumbel noise, computed by the same operations in the
    same order as in SGLang. `hashed`: int64, with the shape of `logprobs`."""
    uniform = hashed.double() / LARGEST_HASH
    exponential = -torch.clamp(torch.log(uniform), min=torch.finfo(torch.float64).min, max=-LEAST_NOISE)
    return -torch.log(exponential) + logprobs.double()


def highest(hashed: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns the column with the highest score in each row, int64 [rows, 1]. The score of a column is its log-prob
    plus the Gumbel noise derived from its hash. `hashed`: uint32 [rows, columns]; `logprobs`: fp32 or fp64 of the same
    shape."""
    rows, columns = logprobs.shape
    bits = hashed.view(torch.int32)  # few torch operations accept uint32
    estimate = estimated_scores(bits.long() & LARGEST_HASH, logprobs)
    blocks = -(-columns // WIDTH)
    estimate = torch.nn.functional.pad(estimate, (0, blocks * WIDTH - columns), value=-torch.inf)
    best = estimate.view(rows, blocks, WIDTH).amax(-1).topk(min(BLOCKS, blocks)).indices
    # The blocks are sorted by column, so that the first of equal scores wins.
    inside = (best.sort().values[..., None] * WIDTH + torch.arange(WIDTH, device=best.device)).flatten(1)
    taken = inside.clamp(max=columns - 1)
    exact = scores(bits.gather(1, taken).long() & LARGEST_HASH, logprobs.gather(1, taken))
    return taken.gather(1, exact.argmax(1, keepdim=True))


def draw(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Samples one column (token) per row, int64 [rows, 1]; replaces SGLang's `multinomial_with_seed`.

    `logprobs`: [rows, columns]; `seed`: each request's seed, integer [rows]; `positions`: position of each sampled
    token in its sequence, integer [rows].
    """
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    columns = torch.arange(logprobs.shape[1], device=logprobs.device)
    return _fused()(murmur_hash32(seed.to(torch.uint64), positions, columns), logprobs)


@cache
def _fused() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns `highest`, compiled on the first call, because importing the compiler takes seconds and few processes
    sample."""
    return torch.compile(highest, dynamic=True)
