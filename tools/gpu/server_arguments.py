"""Arguments of SGLang for the servers of the loop, by device, and variables that they need on a bare GPU machine."""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, Any] = {
    "attention_backend": "triton",  # flashinfer is not there
    "moe_runner_backend": "triton",
    "disable_custom_all_reduce": True,  # sglang-kernel is not there
    "mem_fraction_static": 0.5,  # the trainer is on the same GPU
    "log_level": "info",
}
EAGER: dict[str, dict[str, Any]] = {"cuda": _PLAIN | {"disable_cuda_graph": True}, "cpu": {}}
"""Without CUDA graphs."""
GRAPHS: dict[str, dict[str, Any]] = {
    # Of prompts there are 58 sizes, which take longer to capture than the loop has.
    "cuda": _PLAIN | {"cuda_graph_max_bs_decode": 64, "disable_prefill_cuda_graph": True},
    "cpu": {},
}
"""With graphs of decoding."""
DETERMINISTIC: dict[str, dict[str, Any]] = {
    "cuda": GRAPHS["cuda"] | {"enable_deterministic_inference": True},
    "cpu": {},
}
"""With kernels whose results do not depend on the batch."""
EXACT: dict[str, dict[str, Any]] = {
    "cuda": {name: _PLAIN[name] for name in ("disable_custom_all_reduce", "mem_fraction_static", "log_level")},
    "cpu": {},
}
"""For numerics.mode exact, which chooses its kernels."""
VARIABLES = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # tools/gpu/stand_ins is in its place
}
