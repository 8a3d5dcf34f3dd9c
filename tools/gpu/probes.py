"""Measurements of one GPU that `slimx plan` assumes, each in a new process.

    python -m tools.gpu.probes NAME

The last line printed is the finding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from slimx.runtime.ports import free_port
from tools.gpu.check import no_gpu

GIB = 2**30


def overhead() -> str:
    """Measures the GPU memory that a process uses in addition to its tensors: context, NCCL, cuBLAS, a graph."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used() -> float:
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB

    import torch
    import torch.distributed as dist

    marks = [("", used())]

    def mark(name: str) -> None:
        torch.cuda.synchronize()
        marks.append((name, used() - torch.cuda.memory_reserved() / GIB))

    torch.zeros(1, device="cuda")
    mark("context")
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    mark("NCCL")
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    left @ left
    mark("cuBLAS")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left @ left
    graph.replay()
    mark("a graph")
    dist.destroy_process_group()
    taken = [f"{name} {value - before:.2f}" for (_, before), (name, value) in zip(marks, marks[1:], strict=False)]
    total = pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB
    return f"GiB: {', '.join(taken)}; {marks[0][1]:.2f} of {total:.2f} in use before"


def pinned() -> str:
    """Measures how much host memory 5 GiB of pinned memory take."""
    import torch

    def available() -> float:
        text = Path("/proc/meminfo").read_text()
        return int(next(line for line in text.splitlines() if line.startswith("MemAvailable")).split()[1]) / 2**20

    torch.zeros(1, device="cuda")
    before, began = available(), time.perf_counter()
    host = torch.empty(5 * GIB, dtype=torch.uint8, pin_memory=True)
    seconds, taken = time.perf_counter() - began, before - available()
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    rates = []
    for source, target in ((device, host[:GIB]), (host[:GIB], device)):
        target.copy_(source)
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(GIB / (time.perf_counter() - began) / 1e9)
    return f"5 GiB take {taken:.2f} GiB in {seconds:.1f} s; to the host {rates[0]:.0f} GB/s, from it {rates[1]:.0f}"


def attention() -> str:
    """Finds the kernels of torch's attention that accept gpt-oss's shapes, with sinks as one more column of the
    head."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, out = 2048, []
    mask = torch.ones(length, length + 1, dtype=torch.bool, device="cuda").tril(1)
    for head, grouped in ((65, True), (72, True), (72, False)):
        kv = 8 if grouped else 64
        query = torch.randn(1, 64, length, head, dtype=torch.bfloat16, device="cuda")
        key, value = (torch.randn(1, kv, length + 1, head, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        usable = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    torch.nn.functional.scaled_dot_product_attention(
                        query, key, value, attn_mask=mask, enable_gqa=grouped
                    )
                usable.append(backend.name.removesuffix("_ATTENTION").lower())
            except RuntimeError:
                continue
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / GIB
        how = f"head {head}, {'grouped' if grouped else 'expanded'} keys"
        out.append(f"{how}: {', '.join(usable) or 'math alone'}, {peak:.2f} GiB, {time.perf_counter() - began:.3f} s")
    return "; ".join(out)


def seeded_sampling() -> str:
    """Measures the time of sampling 256 requests over 152k tokens, by SGLang's sampler and by slimx's draws."""
    import torch
    from sglang.srt.layers.sampler import multinomial_with_seed

    from slimx.adapters.sglang.seeded_sampling import draw

    rows = torch.randn(256, 151936, device="cuda").log_softmax(-1)
    seeds = torch.arange(256, device="cuda")
    positions = torch.arange(256, device="cuda")
    differ = int((multinomial_with_seed(rows, seeds, positions) != draw(rows, seeds, positions)).sum())
    found = []
    for sample in (multinomial_with_seed, draw):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            sample(rows, seeds, positions)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / 20 * 1e3)
    return f"{found[0]:.2f} ms, slimx {found[1]:.2f} ms for 256 x 151,936; {differ} tokens differ"


FINDINGS: dict[str, Callable[[], str]] = {
    "overhead": overhead,
    "pinned memory": pinned,
    "attention": attention,
    "seeded sampling": seeded_sampling,
}
PROBES = {
    "overhead": "at most 3 GiB, which `slimx plan` assumes",
    "pinned memory": "5 GiB",
    "attention": "a fused kernel for gpt-oss's shapes",
    "seeded sampling": "0 tokens differ",
}
"""Name -> expected result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=FINDINGS)
    options = parser.parse_args()
    if reason := no_gpu():
        parser.error(reason)
    print(FINDINGS[options.name]())


if __name__ == "__main__":
    main()
