"""Limitations of SGLang's kernels, which compute with published weights, and of DeepEP's (sgl-deep-ep 0.1.2), which
exchange tokens between expert-parallel ranks.

A publication verifies the bytes in a rank's parameters, but some kernels of SGLang 0.5.23 compute with bytes other than
those that were loaded. On Blackwell (sm100) SGLang requantizes the fp8 weights of linear layers for DeepGEMM and
replaces their scales, and its default expert kernel, flashinfer_trtllm, swaps gate and up and shuffles rows. A later
publication would pass verification but give wrong results, so engines on Blackwell must select kernels that keep the
checkpoint's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of expert-parallel ranks that DeepEP supports: those for which `get_dispatch_config` in
`deep_ep/buffers/legacy.py` has settings."""
DEEP_EP_NODE = 8
"""Number of ranks that DeepEP considers one node, regardless of the actual number of GPUs
(`LEGACY_NUM_MAX_NVL_PEERS`)."""

EXPERTS = "moe_runner_backend"
FP8 = "fp8_gemm_runner_backend"
PLAIN = {EXPERTS: "triton", FP8: "triton"}
"""Field of SGLang's ServerArgs that selects kernels -> a value whose kernels do not change weights after loading."""
BLACKWELL = 10
"""Lowest major CUDA compute capability at which SGLang's default kernels differ from those on earlier GPUs."""


def unpublishable(chosen: Mapping[str, object], *, experts: bool, fp8: bool) -> Iterator[tuple[str, str]]:
    """Yields (field, required value) for each field of ServerArgs that must be changed before weights can be published
    to an engine on Blackwell, because the field's value selects kernels that change weights after loading.

    `chosen`: configured values of the fields; a missing field is "auto". `experts`: True if the model has experts;
    `fp8`: True if it has fp8 weights."""
    for field, needed in ((EXPERTS, experts), (FP8, fp8)):
        if needed and chosen.get(field, "auto") != PLAIN[field]:
            yield field, PLAIN[field]


def crosses_nodes(hidden: int) -> bool:
    """Returns True if DeepEP's internode kernels support a hidden size of `hidden` elements.

    Their combine kernel asserts that a bf16 row consists of whole warps of 16 bytes per thread (`hidden_int4 % 32 ==
    0`)."""
    return hidden % 256 == 0


def deep_ep_lacks(ranks: int, hidden: int) -> str | None:
    """Returns the reason why DeepEP cannot exchange tokens of hidden size `hidden` among `ranks` ranks, worded as the
    end of a sentence ("has no settings for ..."); None if it can."""
    if ranks not in RANKS:
        return f"has no settings for {ranks} ranks, only for {', '.join(map(str, RANKS))}"
    if ranks > DEEP_EP_NODE and not crosses_nodes(hidden):
        return (
            f"supports {ranks} ranks, more than {DEEP_EP_NODE}, only with hidden sizes that are multiples of 256, not "
            f"{hidden}"
        )
    return None
