"""Kernels of SGLang 0.5.23 whose weights a publication can write and prove.

A publication is proven by the bytes that a rank holds. Some kernels compute with other bytes than were loaded: on
Blackwell (sm100) SGLang requantises the fp8 weights of linear layers for DeepGEMM and replaces their scales, and its
default for experts there, flashinfer_trtllm, holds gate and up the other way round and shuffles rows. What is written
there later would be proven and computed wrongly: engines on Blackwell name kernels that keep the checkpoint's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
