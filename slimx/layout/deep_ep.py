"""Ranks and models among which DeepEP (sgl-deep-ep 0.1.2) can exchange tokens."""

from __future__ import annotations

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks for which DeepEP has settings (`get_dispatch_config` in `deep_ep/buffers/legacy.py`)."""
DEEP_EP_NODE = 8
"""Ranks of a node to DeepEP, however many GPUs it has (`LEGACY_NUM_MAX_NVL_PEERS`)."""


def crosses_nodes(hidden: int) -> bool:
    """True if DeepEP's kernels between nodes take rows of `hidden` elements: its combine asserts on the GPU that a bf16
    row is whole warps of 16 bytes (`hidden_int4 % 32 == 0`)."""
    return hidden % 256 == 0


def deep_ep_lacks(ranks: int, hidden: int) -> str | None:
    """Returns in words why DeepEP cannot exchange tokens of `hidden` elements among `ranks`; None if it can."""
    if ranks not in RANKS:
        return f"has no settings for {ranks} ranks, only for {', '.join(map(str, RANKS))}"
    if ranks > DEEP_EP_NODE and not crosses_nodes(hidden):
        return (
            f"has kernels for {ranks} ranks, more than {DEEP_EP_NODE}, only of hidden sizes that 256 divides, and not "
            f"for {hidden}"
        )
    return None
