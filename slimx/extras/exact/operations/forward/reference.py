"""Forward functions of exact mode in torch, slow but simple, for any device. They are the specification: the kernels in
`csrc/exact.h`, called by functions of the same names in `kernel.py` and `kernel_cuda.py`, return the same bits.

Each row of a result is computed from the same row of the input, in an order that depends only on the widths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slimx.extras.exact.operations.forward.elementary import exp, log, row_sum, sqrt, sum_lanes, tree
from slimx.extras.exact.operations.sizes import KEY_BLOCK, LANES
from slimx.extras.exact.ordered.reference import fma, product

_MOST = 2**20
"""Maximum number of elements in a temporary tensor; rows are processed in parts of at most this size."""


def linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    leaves: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes one linear layer per expert, [T, N]: the first counts[0] rows of x [T, K] times weights[0] [N, K]
    transposed, the next counts[1] rows times weights[1] transposed, and so on.

    K is cut into `leaves` equal parts, each of which is a separate product
    (`slimx.extras.exact.ordered.reference.product`). Their results are added in a binary tree, and the sum is rounded
    to `dtype` once.
    """
    parts = []
    width = x.shape[1] // leaves
    for leaf in range(leaves):
        columns = slice(leaf * width, (leaf + 1) * width)
        rows = x[:, columns].split(list(counts))
        parts.append(torch.cat([product(part, weight[:, columns]) for part, weight in zip(rows, weights, strict=True)]))
    return tree(parts).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes (x * (1 / sqrt(sum(x^2) / hidden + eps))) * weight for x [rows, hidden] in fp32 and rounds to x's
    dtype."""
    wide = x.float()
    size = torch.tensor(x.shape[1], dtype=torch.float32, device=x.device)
    least = torch.tensor(eps, dtype=torch.float32, device=x.device)
    mean = row_sum(wide * wide) / size
    scale = torch.ones_like(mean) / sqrt(mean + least)
    return ((wide * scale[:, None]) * weight.float()).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes (gate / (1 + e^-gate)) * up [rows, n] in fp32 and rounds to x's dtype. x [rows, 2 n] contains the n
    gates, then the n ups."""
    gate, up = x.float().chunk(2, dim=1)
    return ((gate / (1.0 + exp(-gate))) * up).to(x.dtype)


class Gathered(NamedTuple):
    """Cached keys and values, and which of them each query row reads. Row r reads the slots index[begin[r] : begin[r] +
    length[r]], at least one, in that order."""

    key: torch.Tensor
    """Cached keys, [slots, groups, d]."""
    value: torch.Tensor
    """Cached values, [slots, groups, dv]."""
    index: torch.Tensor  # type: ignore[assignment]  # the field hides tuple.index, which nothing calls
    """Cache slots that the query rows read, int32 of any shape; `begin` contains indices into the flattened tensor."""
    begin: torch.Tensor
    """Index, in the flattened `index`, of the first slot that each query row reads, int64 [R]."""
    length: torch.Tensor
    """Number of elements of `index` that each query row reads, int64 [R]."""


def attend(query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Computes attention [R, heads, dv] of query [R, heads, d] over the keys and values that each row reads.

    A score is the sum of LANES chains of multiply-adds over d, times `scale`, and its weight is exp(score - largest
    score). The sum of weights (`row_sum`) and the sum of weights times values (multiply-adds in order) are computed in
    blocks of KEY_BLOCK keys, and blocks are added in order. The quotient of the two sums is rounded to query's dtype.
    `sinks` [heads] fp32: score of each head's attention sink, which precedes the keys and has no value.
    """
    out = torch.empty(*query.shape[:2], read.value.shape[2], dtype=query.dtype, device=query.device)
    values_per_key = query.shape[1] * max(query.shape[2], read.value.shape[2])
    if not len(query):
        return out
    longest = int(read.length.max())
    for rows in torch.arange(len(query)).split(max(1, _MOST // max(longest * values_per_key, 1))):
        part = read._replace(begin=read.begin[rows], length=read.length[rows])
        out[rows] = _attend(query[rows], part, scale, sinks).to(query.dtype)
    return out


def _attend(query: torch.Tensor, read: Gathered, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    key, value, index, begin, length = read
    rows, heads, width = query.shape
    groups = key.shape[1]
    longest = int(length.max())
    position = torch.arange(longest, device=query.device)
    seen = position < length[:, None]
    slots = index.reshape(-1)[begin[:, None] + torch.minimum(position, length[:, None] - 1)].long()
    # Both have shape [rows, heads, longest, d or dv].
    key = key[slots].double().repeat_interleave(heads // groups, dim=2).transpose(1, 2)
    value = value[slots].double().repeat_interleave(heads // groups, dim=2).transpose(1, 2)
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
        part = row_sum(weight[:, :, start : start + KEY_BLOCK].flatten(0, 1)).view(total.shape)  # 0 after the last key
        mixed_part = torch.zeros_like(mixed)
        for j in range(start, min(start + KEY_BLOCK, longest)):
            joined = fma(weight[:, :, j, None].double(), value[:, :, j], mixed_part)
            mixed_part = torch.where(seen[:, j, None, None], joined, mixed_part)
        reached = seen[:, start, None]
        total = torch.where(reached, total + part, total)
        mixed = torch.where(reached[:, :, None], mixed + mixed_part, mixed)
    return mixed / total[:, :, None]


def log_normalizer(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the two terms that log-softmax subtracts from z = logits / temperature, in fp32: max z and log(sum(exp(z
    - max z))), each [rows]. `logits` [rows, vocabulary], `temperature` [rows] fp32."""
    z = logits.float() / temperature[:, None]
    most = z.amax(1)
    return most, log(row_sum(exp(z - most[:, None])))


def combine(outputs: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Computes each token's weighted sum of expert outputs in fp32, in the order of the k experts, and rounds it to the
    dtype of `outputs`, [T, hidden]. `outputs` [T, k, hidden], `weights` [T, k] fp32; `shared` [T, hidden]: output of
    the shared experts, added last."""
    total = outputs[:, 0].float() * weights[:, 0, None]
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice].float() * weights[:, choice, None]
    return (total if shared is None else total + shared.float()).to(outputs.dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates pairs of dimensions of x [T, heads, d] by angles whose cosines and sines are `cosine` and `sine` [T,
    rotated / 2] fp32, and rounds to x's dtype.

    Dimensions from `rotated` on are unchanged. Pairs are (i, i + rotated / 2), or (2 i, 2 i + 1) if `interleaved`. A
    pair (a, b) becomes (a * cos - b * sin, b * cos + a * sin), computed in fp32.
    """
    half = cosine.shape[1]
    rotated = x[..., : 2 * half].float()
    if interleaved:
        a = rotated[..., ::2]
        b = rotated[..., 1::2]
    else:
        a, b = rotated.split(half, dim=-1)
    cosine = cosine[:, None]
    sine = sine[:, None]
    first = a * cosine - b * sine
    second = b * cosine + a * sine
    joined = torch.stack((first, second), dim=-1).flatten(-2) if interleaved else torch.cat((first, second), dim=-1)
    return torch.cat((joined.to(x.dtype), x[..., 2 * half :]), dim=-1)
