"""Compiles the kernels that SGLang makes at run time for the model of the loop: `python -m tools.gpu.kernels`.

    python -m tools.gpu.kernels [--out build/gpu-kernels]

Each takes half a minute, and a server compiles one after another when it first needs them. Here all are compiled at
once, with a GPU or without one, into SGLang's cache of them (SGLANG_JIT_CACHE_DIR). A cache that was filled on one
machine serves another whose compilers (nvcc, c++) and versions of torch and apache-tvm-ffi are the same. Exits with 1
where a kernel failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slimx.runtime.toolkit import set_cuda_home

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-kernels"


def builders() -> dict[str, Callable[[], Any]]:
    """Returns by name the functions that compile and load a kernel; they import SGLang."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.fused_qknorm_rope import _jit_fused_qknorm_rope_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module
    from sglang.kernels.ops.moe.moe_align import _jit_moe_align_module
    from sglang.kernels.ops.moe.moe_topk_softmax import _jit_moe_topk_softmax_module

    from tools.gpu.model import GPU

    head, bf16 = GPU.head_dim, torch.bfloat16
    row = GPU.key_heads * head * bf16.itemsize
    return {
        "activation": lambda: activation_module(bf16),
        "topk_softmax": lambda: _jit_moe_topk_softmax_module(torch.float32),
        "moe_align": lambda: _jit_moe_align_module(torch.int32),
        "qknorm_rope": lambda: _jit_fused_qknorm_rope_module(head, True, False),
        "qknorm": lambda: _jit_qknorm_module(head, bf16),
        "rope": lambda: _jit_fused_rope_module(True, head, bf16, bf16),
        "kvcache": lambda: _jit_kvcache_module(row, row, 0),
        "clamp_position": lambda: _jit_clamp_position_module(torch.int64),
    }


def compiled(name: str, build: Callable[[], Any]) -> str:
    """Compiles one kernel; returns its seconds, or the error."""
    began = time.monotonic()
    try:
        build()
    except Exception as error:  # the others are wanted all the same
        return f"FAILED {name}: {type(error).__name__}: {str(error)[-2000:]}"
    return f"ok {name}: {time.monotonic() - began:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kernels at once [the machine's CPUs]")
    options = parser.parse_args()
    os.environ["SGLANG_JIT_CACHE_DIR"] = str(options.out.resolve())  # SGLang's setting
    set_cuda_home(os.environ)
    import torch
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch

    if torch.cuda.is_available():
        found = build_all(options.jobs)
    else:
        with override_jit_cuda_arch(9, 0):
            found = build_all(options.jobs)
    return int(any(line.startswith("FAILED") for line in found))


def build_all(jobs: int) -> list[str]:
    """Compiles all kernels, `jobs` at once; returns a line for each."""
    with ThreadPoolExecutor(jobs) as threads:
        lines = []
        for line in threads.map(lambda pair: compiled(*pair), builders().items()):
            print(line, flush=True)
            lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(main())
