"""Arguments of SGLang for the loop's servers, by device, and environment variables for a machine with few packages.

Written for sglang 0.5.23. slimx adds the arguments that every engine gets (slimx.engines.server.spec): the pytorch
sampler, routed experts, the memory saver, max_total_tokens.
"""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, Any] = {
    "attention_backend": "triton",  # Hopper's default is sglang-kernel's FlashAttention 3; flashinfer is not there
    "moe_runner_backend": "triton",  # auto may choose DeepGEMM or flashinfer by what is installed
    "disable_custom_all_reduce": True,  # an operation of sglang-kernel
    "mem_fraction_static": 0.5,  # the trainer is on the same GPU
    "log_level": "info",  # batches' sizes and tokens/s, and the seconds of each part of a start
}
EAGER: dict[str, dict[str, Any]] = {"cuda": _PLAIN | {"disable_cuda_graph": True}, "cpu": {}}
"""Arguments without CUDA graphs."""
GRAPHS: dict[str, dict[str, Any]] = {
    "cuda": _PLAIN
    | {
        "cuda_graph_max_bs_decode": 64,  # the loop's rollouts: 12 graphs in 3 s on an H100
        "disable_prefill_cuda_graph": True,  # of prompts there are 58 sizes: longer to capture than the loop has
    },
    "cpu": {},
}
"""Arguments with CUDA graphs for decoding."""
DETERMINISTIC: dict[str, dict[str, Any]] = {
    "cuda": GRAPHS["cuda"] | {"enable_deterministic_inference": True},
    "cpu": {},
}
"""Arguments for kernels whose results do not depend on the batch."""
EXACT: dict[str, dict[str, Any]] = {
    "cuda": {name: _PLAIN[name] for name in ("disable_custom_all_reduce", "mem_fraction_static", "log_level")},
    "cpu": {},
}
"""Arguments for numerics.mode exact, which chooses its kernels."""
VARIABLES = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # tools/gpu/stand_ins has no metadata of a package
}
"""Environment variables of servers that use the stand-in for sglang-kernel."""
