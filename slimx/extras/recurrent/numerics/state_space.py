"""The state-space rule of Mamba-2 over packed sequences (Dao and Gu, Transformers are SSMs, 2405.21060), in plain
torch: no state reaches from one sequence into the next.

Every head keeps a state S [p, n], which token t with input x, step dt, and B and C of the head's group changes to

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        and reads as  y_t = S_t C_t + D x_t

Sequences are cut into chunks (section 6 there): within a chunk the outputs are one masked product, so that only the
states between chunks follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimx.extras.recurrent.numerics.chunk_sizes import CHUNK
from slimx.extras.recurrent.numerics.chunks import Chunks


def state_space_rule(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    key: torch.Tensor,
    query: torch.Tensor,
    skip: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Outputs y [T, heads, p] in the dtype of `x`.

    x [T, heads, p], step (dt, above 0) [T, heads], decay (A, below 0) and skip (D) [heads], key (B) and query (C) [T,
    groups, n], T = sum(lengths), no length 0. Heads are shared out over groups in their order. Computed in fp32.
    """
    chunks = Chunks(lengths, x.device)
    heads, groups = x.shape[1], key.shape[1]
    new, log = x.float() * step.float()[..., None], step.float() * decay.float()
    new = chunks.lay(new).transpose(1, 2).unflatten(1, (groups, -1))  # [chunks, groups, heads / groups, CHUNK, p]
    log = chunks.lay(log).transpose(1, 2).unflatten(1, (groups, -1)).cumsum(-1)
    keys, queries = (chunks.lay(each.float()).transpose(1, 2).unsqueeze(2) for each in (key, query))
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (log[..., :, None] - log[..., None, :]).masked_fill(later, -torch.inf).exp()
    inside = ((queries @ keys.transpose(-1, -2)) * between) @ new
    added = (keys * (log[..., -1:] - log).exp()[..., None]).transpose(-1, -2) @ new  # [..., n, p]
    reads, forget = queries * log.exp()[..., None], log[..., -1].exp()[..., None, None]
    state = added.new_zeros(len(lengths), *added.shape[1:])
    earlier = []
    for here in chunks.steps:
        # The longest sequences stand first: those that end before this chunk are at the end.
        state = state[: len(here)]
        earlier.append(reads[here] @ state)
        state = state * forget[here] + added[here]
    out = inside + torch.cat(earlier)[torch.cat(chunks.steps).argsort()]
    out = chunks.collect(out.flatten(1, 2).transpose(1, 2))
    return (out + x.float() * skip.float().view(heads, 1)).to(x.dtype)
