"""The gated delta rule over packed sequences (Yang et al., Gated Delta Networks, arXiv:2412.06464) and the causal
convolution before it, in plain torch. Neither states nor convolutions extend from one sequence into the next.

Each head has a state S [d_k, d_v], which token t with key k, value v, decay exp(g) and learning rate beta updates:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        and reads as  o_t = S_t^T q_t

Sequences are cut into chunks (section 3.3 of the paper). Within a chunk, all updates are the solution of one triangular
system; only the states are passed from chunk to chunk sequentially.
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
    """Returns the outputs [T, heads, dv] in the dtype of `query`, and each sequence's final state, fp32 [sequences,
    heads, dk, dv]. Computes in fp32.

    `query`, `key` [T, heads, dk]; `value` [T, heads, dv]; `decay` [T, heads]: g, logarithms of the decays, at most 0;
    `rate` [T, heads]: beta. `lengths`: tokens of each packed sequence, at least 1, with sum T. `initial` [sequences,
    heads, dk, dv]: states before the first tokens; None: zeros. `scale`: factor applied to the queries; None: dk^-1/2.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chunks = Chunks(lengths, query.device)
    q = chunks.lay((query * scale).float()).transpose(1, 2)  # [chunks, heads, CHUNK, d], like k and v
    k = chunks.lay(key.float()).transpose(1, 2)
    v = chunks.lay(value.float()).transpose(1, 2)
    log = chunks.lay(decay.float()).transpose(1, 2)  # [chunks, heads, CHUNK], like beta
    beta = chunks.lay(rate.float()).transpose(1, 2)
    log = log.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (log[..., :, None] - log[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = k * beta[..., None]
    # In (1 + A) u = b, row t subtracts the values that the chunk's earlier updates return for key t. The diagonal of A
    # is not read.
    system = (weighted @ k.transpose(-1, -2)) * between
    right = torch.cat([v * beta[..., None], weighted * log.exp()[..., None]], dim=-1)
    updates, reads = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    inside = (q @ k.transpose(-1, -2)) * between
    q = q * log.exp()[..., None]
    k = k * (log[..., -1:] - log).exp()[..., None]
    forget = log[..., -1].exp()[..., None, None]
    if initial is None:
        state = q.new_zeros(len(lengths), q.shape[1], k.shape[-1], v.shape[-1])
    else:
        state = initial.float()[chunks.order]
    outputs = []
    finished = []
    for step in chunks.steps:
        # The longest sequences come first, so those that end before this chunk are at the end.
        finished.append(state[len(step) :])
        state = state[: len(step)]
        new = updates[step] - reads[step] @ state
        outputs.append(q[step] @ state + inside[step] @ new)
        state = state * forget[step] + k[step].transpose(-1, -2) @ new
    finished.append(state)
    out = torch.cat(outputs)[torch.cat(chunks.steps).argsort()]
    states = torch.cat(finished[::-1])[chunks.order.argsort()]
    return chunks.collect(out.transpose(1, 2)).to(query.dtype), states


def causal_convolution(
    x: torch.Tensor, weight: torch.Tensor, lengths: Sequence[int], initial: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes, in fp32, the causal depthwise convolution of x [T, channels] with `weight` [channels, width], whose
    last column multiplies the current token. Returns the result in x's dtype. `lengths`: tokens of each packed
    sequence, with sum T.

    `initial` [sequences, channels, width - 1]: inputs before the start of each sequence; None: zeros.
    """
    width = weight.shape[-1]
    sizes = torch.tensor(list(lengths), device=x.device)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    position = torch.arange(len(x), device=x.device) - starts
    kernel = weight.float()
    x32 = x.float()
    out = x32 * kernel[:, -1]
    sequence = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)
    for back in range(1, width):
        before = F.pad(x32, (0, 0, back, 0))[: len(x)]
        earlier = torch.zeros_like(x32)
        if initial is not None:
            # The last column is the token just before the first one.
            column = (width - 1 + position - back).clamp(0, width - 2)
            earlier = initial.float()[sequence, :, column]
        out = out + torch.where((position >= back)[:, None], before, earlier) * kernel[:, -1 - back]
    return out.to(x.dtype)


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Computes x / sqrt(sum(x^2) + eps) over the last dimension in fp32, and rounds to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
