"""Compiles the kernels that SGLang makes at run time for the model of the loop: `python -m tools.gpu.kernels`.

    python -m tools.gpu.kernels [--out build/gpu-kernels] [--jobs N]

Each takes 10 to 20 s, and a server compiles one after another when it first needs them. Here all are compiled at once,
with a GPU or for an H100 without one, into SGLang's cache of them (SGLANG_JIT_CACHE_DIR). A kernel's place there is a
digest of its sources with all headers that they include, of what nvcc and c++ print as their versions, and of the
versions of torch and apache-tvm-ffi. A cache serves another machine only if all of these are the same: not one whose
distribution has another c++. Exits with 1 where a kernel failed.
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

from slimx.runtime.toolkit import set_build_tools

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-kernels"


def builders(head_dim: int, key_heads: int) -> dict[str, Callable[[], Any]]:
    """Returns by name the functions that compile and load a kernel; they import SGLang. Numbers of experts and of
    experts per token are arguments of the kernels, not of their compilation.

    As sglang 0.5.23 calls them for a Qwen3-MoE in bfloat16; experts are chosen by a kernel of Triton there."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module
    from sglang.kernels.ops.moe.moe_align import _jit_moe_align_module

    bf16 = torch.bfloat16
    row = key_heads * head_dim * bf16.itemsize
    return {
        "activation": lambda: activation_module(bf16),
        "moe_align": lambda: _jit_moe_align_module(torch.int32),
        "rope": lambda: _jit_fused_rope_module(True, head_dim, bf16, bf16),  # writes the KV cache, too
        "qknorm": lambda: _jit_qknorm_module(head_dim, bf16),  # not in deterministic inference
        "kvcache": lambda: _jit_kvcache_module(row, row, 0),  # where the rotation does not write the cache
        "clamp_position": lambda: _jit_clamp_position_module(torch.int64),
    }


def compile_all(named: dict[str, Callable[[], Any]], jobs: int) -> list[str]:
    """Compiles kernels, `jobs` at once, and prints a line for each; returns the names of those that failed."""

    def compile_one(name: str) -> bool:
        began = time.monotonic()
        try:
            named[name]()
        except Exception as error:  # the others are compiled all the same
            print(f"{name}: {type(error).__name__}: {str(error)[-2000:]}", flush=True)
            return False
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(jobs) as threads:
        return [name for name, done in zip(named, threads.map(compile_one, named), strict=True) if not done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kernels at once [the machine's CPUs]")
    options = parser.parse_args()
    os.environ["SGLANG_JIT_CACHE_DIR"] = str(options.out.resolve())  # SGLang's setting
    set_build_tools(os.environ)
    import torch

    from slimx.adapters.transformers import import_transformers
    from slimx.extras.cpu.adapters.absent import install
    from tools.gpu.model import GPU
    from tools.gpu.pretended import pretend_gpu

    import_transformers()
    install()
    if not torch.cuda.is_available():
        pretend_gpu()  # flags of the compiler, and so the place in the cache, follow the device
    failed = compile_all(builders(GPU.head_dim, GPU.key_heads), options.jobs)
    if failed:
        print(f"not compiled: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
