"""Probes of one GPU and its libraries, each in a process of its own: the last line printed is what was found.

    python -m tools.first_hour.probes NAME

Exits with 1 and one sentence where something is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools.gpu.check import no_gpu

LENGTHS = (700, 300, 24)
"""Lengths of the packed sequences, in tokens."""
INSIDE, TAG = "--inside", "first-hour"
NEAR = 0.02
"""Largest accepted error of a bfloat16 result, relative to the largest element."""


def topology() -> str:
    """Checks that NVLink connects all GPUs."""
    table = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True, timeout=60).stdout
    print(table)
    links = [cell for line in table.splitlines() if line.startswith("GPU") for cell in line.split()[1:]]
    joined = [cell for cell in links if re.fullmatch(r"NV\d+", cell)]
    if not joined:
        raise SystemExit("no two GPUs are joined by NVLink (nvidia-smi topo -m)")
    return f"{len(joined)} pairs by NVLink: {', '.join(sorted(set(joined)))}"


def versions() -> str:
    """Checks that every locked package is installed in its locked version."""
    from slimx.extras.doctor.machine import lock_of

    lock, pins = lock_of()
    if not pins:
        raise SystemExit("this environment was not made by `make venv`, so there is no lock to compare with")
    wrong = []
    for name, pinned in pins.items():
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "absent"
        wrong += [f"{name} {found}, not {pinned}"] if pinned.partition("+")[0] != found else []
    print(*wrong, sep="\n")
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(pins)} packages differ from {lock}: {', '.join(wrong[:4])}")
    return f"all {len(pins)} packages of {lock}"


def transformer_engine() -> str:
    """Checks that a layer of Transformer Engine computes the same as torch."""
    import torch
    import transformer_engine
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.LayerNormLinear(512, 256, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16).cuda()
    inputs = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
    normed = torch.nn.functional.rms_norm(inputs.float(), (512,), layer.layer_norm_weight.float(), layer.eps)
    expected = normed @ layer.weight.float().T
    off = _off(layer(inputs).float(), expected)
    return f"Transformer Engine {transformer_engine.__version__}, off by {off:.1e} of the largest element"


def _off(found: object, expected: object) -> float:
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    if not off <= NEAR:
        raise SystemExit(f"off by {off:.1e} of the largest element, the limit is {NEAR:.0e}")
    return off


def attention(kind: str) -> str:
    """Checks that packed attention of one backend of Transformer Engine computes the same as torch."""
    for name in ("FLASH", "FUSED", "UNFUSED"):  # read when Transformer Engine is imported
        os.environ[f"NVTE_{name}_ATTN"] = str(int(name == kind.upper()))
    import torch
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    query, key, value = torch.randn(3, sum(LENGTHS), 8, 128, dtype=torch.bfloat16, device="cuda")
    layer = te.DotProductAttention(8, 128, qkv_format="thd", attn_mask_type="padding_causal")
    found = layer(
        query,
        key,
        value,
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    sequences = [part.transpose(0, 1).float().split(list(LENGTHS), 1) for part in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [attend(*qkv, is_causal=True) for qkv in zip(*sequences, strict=True)]
    expected = torch.cat(parts, 1).transpose(0, 1).flatten(1)
    return f"off by {_off(found.float(), expected):.1e} of the largest element"


def deep_gemm() -> str:
    """Checks that DeepGEMM compiles a kernel and multiplies block-fp8 matrices correctly."""
    import deep_gemm
    import torch

    torch.manual_seed(0)
    left, right = (torch.randn(256, 512, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    # Powers of two, which Blackwell's kernels take alone.
    of_rows, of_blocks = (torch.randint(-2, 3, (rows, 4), device="cuda").float().exp2() for rows in (256, 2))
    out = torch.empty(256, 256, dtype=torch.bfloat16, device="cuda")
    deep_gemm.fp8_gemm_nt((left, of_rows), (right, of_blocks), out)
    whole = (
        left.float() * of_rows.repeat_interleave(128, 1),
        right.float() * of_blocks.repeat_interleave(128, 0).repeat_interleave(128, 1),
    )
    return f"compiled, off by {_off(out.float(), whole[0] @ whole[1].T):.1e} of the largest element"


def deep_ep() -> str:
    """Checks that DeepEP can be imported."""
    import deep_ep

    return f"imported from {Path(deep_ep.__file__).parent}; HybridEP: {hasattr(deep_ep, 'HybridEPBuffer')}"


def memory_saver() -> str:
    """Checks that SGLang's memory saver releases memory and allocates it again."""
    import torch_memory_saver

    if INSIDE not in sys.argv:
        with torch_memory_saver.configure_subprocess():  # it takes the place of the allocator of a new process
            done = subprocess.run([sys.executable, "-m", __spec__.name, "memory_saver", INSIDE], timeout=300)
        raise SystemExit(done.returncode)
    import torch

    saver = torch_memory_saver.torch_memory_saver
    with saver.region(tag=TAG):
        block = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    saver.pause(TAG)
    paused = torch.cuda.mem_get_info()[0]
    saver.resume(TAG)
    block.fill_(1)
    freed, back = (paused - before) / 2**30, (paused - torch.cuda.mem_get_info()[0]) / 2**30
    if min(freed, back) < 3.9:
        raise SystemExit(f"4 GiB were paused, {freed:.1f} came free and {back:.1f} were taken again")
    return f"4 GiB paused: {freed:.1f} GiB came free, {back:.1f} taken again"


PROBES: dict[str, Callable[[], str]] = {
    "topology": topology,
    "versions": versions,
    "transformer_engine": transformer_engine,
    "attention_flash": lambda: attention("flash"),
    "attention_fused": lambda: attention("fused"),
    "attention_unfused": lambda: attention("unfused"),
    "deep_gemm": deep_gemm,
    "deep_ep": deep_ep,
    "memory_saver": memory_saver,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=PROBES)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.name != "versions" and (reason := no_gpu()):
        parser.error(reason)
    print(PROBES[options.name]())


if __name__ == "__main__":
    main()
