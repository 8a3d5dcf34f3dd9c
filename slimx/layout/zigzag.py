"""Tokens of a packed micro-batch that a context-parallel rank holds.

Each sequence is cut into 2 * CP equal pieces; rank r holds pieces r and 2 * CP - 1 - r (zigzag), so that under a causal
mask every rank has the same work. This is the order that megatron-core's rotary embedding and Transformer Engine's
attention assume.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimx.errors import SlimxError


def zigzag(lengths: Sequence[int], size: int, rank: int) -> np.ndarray:
    """Positions in the pack, int64 [T / size], that rank `rank` of `size` holds, in its own order.

    Raises SlimxError for a sequence that does not divide into 2 * size pieces."""
    if size == 1:
        return np.arange(sum(lengths))
    pieces, start = [], 0
    for length in lengths:
        if length % (2 * size):
            raise SlimxError(
                f"a packed sequence of {length} tokens does not divide into {2 * size} pieces for trainer.context="
                f"{size}; it must be padded before it is packed",
                code="layout.zigzag",
                about="trainer.context",
            )
        cut = np.arange(start, start + length).reshape(2 * size, -1)
        pieces += [cut[rank], cut[2 * size - 1 - rank]]
        start += length
    return np.concatenate(pieces)
