"""The forward of exact mode in torch, on any device: slow and obvious. This is the specification; the kernels of
`csrc/exact.h` have the same bits, and their Python sides (`kernel.py`, `kernel_cuda.py`) the same functions.

Every row of a result is computed from its own row of the input, in an order that depends on the widths alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward.elementary import exp, log, row_sum, sqrt, sum_lanes, tree
from slimx.extras.exact.operations.sizes import KEY_BLOCK, LANES
from slimx.extras.exact.ordered.reference import fma, product

_MOST = 2**20
"""Elements of a temporary: rows are taken in parts that stay below it."""


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Linear layers by expert: x [T, K], the first counts[0] rows times weights[0] [N, K] transposed, ... -> [T, N].

    Each of `leaves` equal parts of K is a product of its own (`slimx.extras.exact.ordered.reference.product`). Leaves
    meet in a binary tree, and the sum is rounded to `dtype` once.
    """
    parts = []
    for leaf in range(leaves):
        own = slice(leaf * (x.shape[1] // leaves), (leaf + 1) * (x.shape[1] // leaves))
        rows = x[:, own].split(list(counts))
        parts.append(torch.cat([product(part, weight[:, own]) for part, weight in zip(rows, weights, strict=True)]))
    return tree(parts).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm (x * (1 / sqrt(sum(x^2) / hidden + eps))) * weight of x [rows, hidden] in fp32, rounded to x's dtype."""
    wide = x.float()
    size, least = (torch.tensor(value, dtype=torch.float32, device=x.device) for value in (x.shape[1], eps))
    mean = row_sum(wide * wide) / size
    scale = torch.ones_like(mean) / sqrt(mean + least)
    return ((wide * scale[:, None]) * weight.float()).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Activation (gate / (1 + e^-gate)) * up in fp32: x [rows, 2 n], gate then up -> [rows, n] of x's dtype."""
    gate, up = x.float().chunk(2, dim=1)
    return ((gate / (1.0 + exp(-gate))) * up).to(x.dtype)


class Gathered(NamedTuple):
    """Keys and values of a cache, and those that each row of a query reads: row r the ones at
    index[begin[r] : begin[r] + length[r]], at least one, in that order."""

    key: torch.Tensor
    """[slots, groups, d]."""
    value: torch.Tensor
    """[slots, groups, dv]."""
    index: torch.Tensor
    """int32 of any shape, read flat."""
    begin: torch.Tensor
    """int64 [R]."""
    length: torch.Tensor
    """int64 [R]."""


def attend(query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of query [R, heads, d] over what its rows read: [R, heads, dv].

    Score: LANES chains of multiply-adds over d, summed, times `scale`. Weight: exp(score - largest
    score). Sums of weights (`row_sum`), and of weights times values (multiply-adds in order), are made in blocks of
    KEY_BLOCK keys, which are added in order; the quotient of the two is rounded. `sinks` [heads] fp32: a score without
    a value, that comes first.
    """
    out = torch.empty(*query.shape[:2], read.value.shape[2], dtype=query.dtype, device=query.device)
    share = query.shape[1] * max(query.shape[2], read.value.shape[2])
    if not len(query):
        return out
    longest = int(read.length.max())
    for own in torch.arange(len(query)).split(max(1, _MOST // max(longest * share, 1))):
        part = read._replace(begin=read.begin[own], length=read.length[own])
        out[own] = _attend(query[own], part, scale, sinks).to(query.dtype)
    return out


def _attend(query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    key, value, index, begin, length = read
    rows, heads, width = query.shape
    groups, longest = key.shape[1], int(length.max())
    place = torch.arange(longest, device=query.device)
    seen = place < length[:, None]
    at = index.reshape(-1)[begin[:, None] + torch.minimum(place, length[:, None] - 1)].long()
    key, value = (
        t[at].double().repeat_interleave(heads // groups, dim=2).transpose(1, 2) for t in (key, value)
    )  # [rows, heads, longest, d or dv]
    steps = F.pad(query.double(), (0, -width % LANES)).view(rows, heads, 1, -1, LANES)
    keys = F.pad(key, (0, -width % LANES)).view(rows, heads, longest, -1, LANES)
    lanes = torch.zeros(rows, heads, longest, LANES, device=query.device)
    for step in range(keys.shape[3]):
        lanes = fma(steps[:, :, :, step], keys[:, :, :, step], lanes)
    score = sum_lanes(lanes) * torch.tensor(scale, dtype=torch.float32, device=query.device)
    score = torch.where(seen[:, None], score, -torch.inf)
    most = score.amax(2)
    if sinks is not None:
        most = torch.maximum(most, sinks.float())
    weight = exp(score - most[:, :, None])
    total = torch.zeros_like(most) if sinks is None else exp(sinks.float() - most)
    mixed = torch.zeros(rows, heads, value.shape[3], device=query.device)
    for start in range(0, longest, KEY_BLOCK):
        part = row_sum(weight[:, :, start : start + KEY_BLOCK].flatten(0, 1)).view(total.shape)  # 0 beyond the end
        mixed_part = torch.zeros_like(mixed)
        for j in range(start, min(start + KEY_BLOCK, longest)):
            joined = fma(weight[:, :, j, None].double(), value[:, :, j], mixed_part)
            mixed_part = torch.where(seen[:, j, None, None], joined, mixed_part)
        reached = seen[:, start, None]
        total = torch.where(reached, total + part, total)
        mixed = torch.where(reached[:, :, None], mixed + mixed_part, mixed)
    return mixed / total[:, :, None]


def log_normaliser(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both terms of a log-softmax of z = logits / temperature in fp32: max z and log(sum(exp(z - max z))), each [rows]
    fp32, of logits [rows, vocabulary] and temperature [rows] fp32."""
    z = logits.float() / temperature[:, None]
    most = z.amax(1)
    return most, log(row_sum(exp(z - most[:, None])))


def combine(outputs: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Weighted sum of experts' outputs, in order and in fp32: outputs [T, k, hidden], weights [T, k] fp32 ->
    [T, hidden] of outputs' dtype; `shared` [T, hidden] is added last."""
    total = outputs[:, 0].float() * weights[:, 0, None]
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice].float() * weights[:, choice, None]
    return (total if shared is None else total + shared.float()).to(outputs.dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of dimensions of x [T, heads, d] by cosine and sine [T, rotated / 2] fp32, in x's dtype.

    Dimensions from `rotated` on are passed on. Pairs are (i, i + rotated / 2), or (2 i, 2 i + 1) where `interleaved`;
    (a, b) becomes (a * cos - b * sin, b * cos + a * sin) in fp32.
    """
    half = cosine.shape[1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    cosine, sine = cosine[:, None], sine[:, None]
    first, second = a * cosine - b * sine, b * cosine + a * sine
    joined = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)
