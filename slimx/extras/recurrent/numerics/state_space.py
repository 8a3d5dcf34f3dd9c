"""The state-space rule of Mamba-2 over packed sequences (Dao and Gu, Transformers are SSMs, arXiv:2405.21060), in plain
torch. States do not extend from one sequence into the next.

Each head has a state S [p, n], which token t with input x, step dt, and B and C of the head's group updates:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        and reads as  y_t = S_t C_t + D x_t

Sequences are cut into chunks (section 6 of the paper). Within a chunk, the outputs are one masked product; only the
states are passed from chunk to chunk sequentially.
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
    """Returns the outputs y [T, heads, p] in the dtype of `x`. Computes in fp32.

    `x` [T, heads, p]: inputs; `step` [T, heads]: dt, above 0; `decay` [heads]: A, below 0; `skip` [heads]: D; `key` and
    `query` [T, groups, n]: B and C, each for the same number of consecutive heads. `lengths`: tokens of each packed
    sequence, at least 1, with sum T.
    """
    chunks = Chunks(lengths, x.device)
    heads = x.shape[1]
    groups = key.shape[1]
    new = x.float() * step.float()[..., None]
    log = step.float() * decay.float()
    new = chunks.lay(new).transpose(1, 2).unflatten(1, (groups, -1))  # [chunks, groups, heads / groups, CHUNK, p]
    log = chunks.lay(log).transpose(1, 2).unflatten(1, (groups, -1)).cumsum(-1)
    keys = chunks.lay(key.float()).transpose(1, 2).unsqueeze(2)
    queries = chunks.lay(query.float()).transpose(1, 2).unsqueeze(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu(1)
    between = (log[..., :, None] - log[..., None, :]).masked_fill(later, -torch.inf).exp()
    inside = ((queries @ keys.transpose(-1, -2)) * between) @ new
    added = (keys * (log[..., -1:] - log).exp()[..., None]).transpose(-1, -2) @ new  # [..., n, p]
    reads = queries * log.exp()[..., None]
    forget = log[..., -1].exp()[..., None, None]
    state = added.new_zeros(len(lengths), *added.shape[1:])
    earlier = []
    for indices in chunks.steps:
        # The longest sequences come first, so those that end before this chunk are at the end.
        state = state[: len(indices)]
        earlier.append(reads[indices] @ state)
        state = state * forget[indices] + added[indices]
    out = inside + torch.cat(earlier)[torch.cat(chunks.steps).argsort()]
    out = chunks.collect(out.flatten(1, 2).transpose(1, 2))
    return (out + x.float() * skip.float().view(heads, 1)).to(x.dtype)
