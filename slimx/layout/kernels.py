"""Limits of kernels: SGLang's, whose weights a publication writes, and DeepEP's (sgl-deep-ep 0.1.2), which exchange
tokens.

A publication is proven by the bytes that a rank holds. Some kernels of SGLang 0.5.23 compute with other bytes than were
loaded: on Blackwell (sm100) SGLang requantises the fp8 weights of linear layers for DeepGEMM and replaces their scales,
and its default for experts there, flashinfer_trtllm, holds gate and up the other way round and shuffles rows. What is
written there later would be proven and computed wrongly: engines on Blackwell name kernels that keep the checkpoint's
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks for which DeepEP has settings (`get_dispatch_config` in `deep_ep/buffers/legacy.py`)."""
DEEP_EP_NODE = 8
"""Ranks of a node to DeepEP, however many GPUs it has (`LEGACY_NUM_MAX_NVL_PEERS`)."""

EXPERTS, FP8 = "moe_runner_backend", "fp8_gemm_runner_backend"
PLAIN = {EXPERTS: "triton", FP8: "triton"}
"""Field of ServerArgs -> the value with which weights stay as they are loaded."""
BLACKWELL = 10
"""Major compute capability from which on SGLang chooses otherwise by itself."""


def unpublishable(chosen: Mapping[str, Any], *, experts: bool, fp8: bool) -> Iterator[tuple[str, str]]:
    """Fields whose value an engine on Blackwell must not have, with the one that it needs.

    `chosen`: values by field, "auto" where none was named; `experts`, `fp8`: whether the served model has such weights.
    """
    for field, needed in ((EXPERTS, experts), (FP8, fp8)):
        if needed and chosen.get(field, "auto") != PLAIN[field]:
            yield field, PLAIN[field]


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
