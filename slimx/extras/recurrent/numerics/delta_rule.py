"""The gated delta rule over packed sequences (Yang et al., Gated Delta Networks, 2412.06464) and the causal convolution
before it, in plain torch: neither a state nor a convolution reaches from one sequence into the next.

Every head keeps a state S [d_k, d_v], which token t with key k, value v, decay exp(g) and learning rate beta changes to

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        and reads as  o_t = S_t^T q_t

Sequences are cut into chunks (section 3.3 there): within a chunk all updates are one triangular system, so that only
the states between chunks follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.extras.recurrent.numerics.chunks import Chunks


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    lengths: Sequence[int],
    initial: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, heads, dv] in the dtype of `query`, and the states fp32 [sequences, heads, dk, dv] behind the last
    tokens.

    query and key [T, heads, dk], value [T, heads, dv], decay (its logarithm, at most 0) and rate [T, heads],
    T = sum(lengths), no length 0; `initial` [sequences, heads, dk, dv]: states before the first tokens (None: zeros).
    `scale` of the queries: None for dk^-1/2. Computed in fp32.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chunks = Chunks(lengths, query.device)
    q, k, v = (chunks.lay(x.float()).transpose(1, 2) for x in (query * scale, key, value))  # [chunks, heads, CHUNK, d]
    log, beta = (chunks.lay(x.float()).transpose(1, 2) for x in (decay, rate))  # [chunks, heads, CHUNK]
    log = log.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (log[..., :, None] - log[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = k * beta[..., None]
    # Row t of (1 + A) u = b subtracts what the chunk's earlier updates already answer at key t; A's diagonal is not
    # read.
    system = (weighted @ k.transpose(-1, -2)) * between
    right = torch.cat([v * beta[..., None], weighted * log.exp()[..., None]], dim=-1)
    updates, reads = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    inside = (q @ k.transpose(-1, -2)) * between
    q, k = q * log.exp()[..., None], k * (log[..., -1:] - log).exp()[..., None]
    forget = log[..., -1].exp()[..., None, None]
    state = (
        q.new_zeros(len(lengths), *q.shape[1:2], k.shape[-1], v.shape[-1])
        if initial is None
        else initial.float()[chunks.order]
    )
    outputs, finished = [], []
    for here in chunks.steps:
        # The longest sequences stand first: those that end before this chunk are at the end.
        finished.append(state[len(here) :])
        state = state[: len(here)]
        new = updates[here] - reads[here] @ state
        outputs.append(q[here] @ state + inside[here] @ new)
        state = state * forget[here] + k[here].transpose(-1, -2) @ new
    finished.append(state)
    out = torch.cat(outputs)[torch.cat(chunks.steps).argsort()]
    states = torch.cat(finished[::-1])[chunks.order.argsort()]
    return chunks.collect(out.transpose(1, 2)).to(query.dtype), states


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int], initial: torch.Tensor | None = None
) -> torch.Tensor:
    """Depthwise convolution of x [T, channels] with weight [channels, width], whose last column is the token's own;
    T = sum(lengths). Before a sequence stand zeros, or `initial` [sequences, channels, width - 1]. Computed in fp32, in
    x's dtype."""
    width = weight.shape[-1]
    sizes = torch.tensor(list(lengths), device=x.device)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = torch.arange(len(x), device=x.device) - starts
    kernel, x32 = weight.float(), x.float()
    out = x32 * kernel[:, -1]
    number = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)
    for back in range(1, width):
        before = F.pad(x32, (0, 0, back, 0))[: len(x)]
        earlier = torch.zeros_like(x32)
        if initial is not None:
            # Column -1 is the token just before the first.
            column = (width - 1 + place - back).clamp(0, width - 2)
            earlier = initial.float()[number, :, column]
        out = out + torch.where((place >= back)[:, None], before, earlier) * kernel[:, -1 - back]
    return out.to(x.dtype)


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, computed in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
