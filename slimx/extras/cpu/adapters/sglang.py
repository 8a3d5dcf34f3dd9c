"""Fixes for gaps in SGLang's CPU path, where SGLang would fail or compute wrong results; applied only if the server
runs on the CPU. Written for sglang 0.5.23. `Gap.open` returns True while SGLang has the gap. If a newer SGLang has
closed it, startup fails, so that developers delete the fix instead of letting it hide SGLang's own code. Functions are
wrapped through SGLang's HookRegistry where possible (the registry also reaches modules that imported the function by
name); the other fixes are entries in SGLang's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from slimx import entry_points
from slimx.adapters.device import Gap
from slimx.adapters.sglang.weights.layout import GROUP
from slimx.errors import SlimxError
from slimx.numerics.norm import rms_scale

BATCH_INVARIANT = "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode"
MINIMAX_SQUARES = "sglang.srt.models.minimax_m2.rms_sumsq_serial"
MINIMAX_NORM = "sglang.srt.models.minimax_m2.rms_apply_serial"
NATIVE_MOE = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
LING_EXPERTS = "sglang.srt.models.bailing_moe.BailingMoESparseMoeBlock._forward_router_experts"
DEVICE_MODULE = "torch.get_device_module"
SYNCHRONIZE = "torch.cuda.synchronize"


# Seeded sampling ----------------------------------------------------------------------------------------------------

MASK = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns MurmurHash3 (x86, 32 bits) of the 16 bytes (seed low, seed high, position, column), uint32 [seeds,
    columns].

    SGLang's Triton kernel (kernels/ops/sampling/murmur_hash.py) computes the same function, so a seed samples the same
    tokens on the CPU and on a GPU. Words are stored in int64, because torch has no wrapping uint32 arithmetic."""
    seed = seed.long()[:, None]
    positions = positions.long()[:, None]
    columns = columns.long()[None, :]
    state = torch.zeros_like(seed)
    for word in (seed & MASK, (seed >> 32) & MASK, positions & MASK, columns & MASK):
        mixed = _product(_rotate(_product(word, 0xCC9E2D51), 15), 0x1B873593)
        state = (_product(_rotate(state ^ mixed, 13), 5) + 0xE6546B64) & MASK
    state = state ^ 16  # length of the hashed data in bytes
    state = _product(state ^ (state >> 16), 0x85EBCA6B)
    state = _product(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & MASK


def _product(word: torch.Tensor, factor: int) -> torch.Tensor:
    """Returns word * factor mod 2^32, computed from the two halves of the factor, because the full product would
    overflow int64."""
    return (word * (factor & 0xFFFF) + (((word * (factor >> 16)) & 0xFFFF) << 16)) & MASK


def _has_murmur() -> bool:
    return hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu")


def _add_murmur() -> None:
    torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "cpu", murmur_hash32)


# Tables -------------------------------------------------------------------------------------------------------------


def _deterministic_choices() -> list[str]:
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    return DETERMINISTIC_ATTENTION_BACKEND_CHOICES


def _deterministic_mla_choices() -> list[str]:
    from sglang.srt.arg_groups.choices import RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND

    return RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND


def _host_allocators() -> dict[str, Callable[..., torch.Tensor]]:
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    return ALLOC_MEMORY_FUNCS


def _allocate_on_host(
    dims: tuple, dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, **_: Any
) -> torch.Tensor:
    return allocator.allocate(dims, dtype=dtype, device=device)


def _add_host_allocator() -> None:
    _host_allocators()["cpu"] = _allocate_on_host


def _native_attention() -> Any:
    """Returns the class of SGLang's attention backend "torch_native"."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend


def _add_idle_length() -> None:
    _native_attention().get_cpu_graph_seq_len_fill_value = lambda backend: 1  # as in SGLang's other CPU backend


CHOICES = (
    Gap(
        "deterministic-attention",
        "--enable-deterministic-inference (seeds, log-probs at the sampling temperature) refuses torch_native",
        open=lambda: "torch_native" not in _deterministic_choices(),
        close=lambda: _deterministic_choices().append("torch_native"),
    ),
    Gap(
        # Deterministic mode also makes SGLang use absorbed MLA for every batch, the only form that torch_native
        # computes. As a side effect of the list, the radix cache stays on unless --disable-radix-cache is set.
        "deterministic-mla",
        "--enable-deterministic-inference refuses torch_native for models with absorbed MLA (DeepSeek)",
        open=lambda: "torch_native" not in _deterministic_mla_choices(),
        close=lambda: _deterministic_mla_choices().append("torch_native"),
    ),
)
"""Values that would work on the CPU but that SGLang's argument checks refuse; each process makes the checks accept them
before it parses arguments."""

GAPS = (
    Gap(
        "seeded-sampling",
        "seeds need an operator of sgl_kernel's CPU build, which is not on PyPI, and crash the scheduler without it",
        open=lambda: not _has_murmur(),
        close=_add_murmur,
    ),
    Gap(
        "host-pool",
        "capture of routed experts would allocate by cudaHostRegister, the default for devices that are not listed",
        open=lambda: "cpu" not in _host_allocators(),
        close=_add_host_allocator,
    ),
    Gap(
        "idle-length",
        "DP-attention pads batches with sequences of a length that torch_native does not define",
        open=lambda: not hasattr(_native_attention(), "get_cpu_graph_seq_len_fill_value"),
        close=_add_idle_length,
    ),
)


# Functions ----------------------------------------------------------------------------------------------------------


def no_batch_invariant_mode(*args: Any, **kwargs: Any) -> None:
    """Replaces SGLang's function and does nothing; the original would install Triton kernels for deterministic mode
    that exist only for CUDA and XPU."""


def moe_without_absent_experts(
    native: Callable, layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Computes an MoE layer whose expert ids may include -1, which under expert parallelism marks experts of other
    ranks. SGLang's native CPU path, `native`, would use -1 as an index. If there are such ids, `native` is therefore
    called for one top-k slot at a time, with only the tokens whose expert is on this rank. `x`: [tokens, hidden]."""
    weights, ids, *_ = topk_output
    if bool((ids >= 0).all()):
        return native(layer, x, topk_output, config)
    out = torch.zeros_like(x)
    for slot in range(ids.shape[1]):
        rows = (ids[:, slot] >= 0).nonzero()[:, 0]
        if len(rows):
            one = (weights[rows, slot : slot + 1], ids[rows, slot : slot + 1], None)
            out[rows] += native(layer, x[rows], one, config)
    return out


def scaled_experts(original: Callable, block: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Multiplies the output of Ling-2's routed experts by the model's scaling factor; hidden: [tokens, hidden].

    SGLang's Ling-2 leaves the factor to the kernels, but its native CPU path ignores it; other families apply the
    factor in the model."""
    return original(block, hidden, batch) * block.routed_scaling_factor


def device_module(device: Any = None) -> ModuleType:
    """Returns torch.cpu as the device module, in place of the function with which torch chooses it. A CUDA build of
    torch chooses torch.cuda even without a GPU, and SGLang would synchronize with it when it releases memory."""
    return torch.cpu


def no_device_to_wait_for(device: Any = None) -> None:
    """Replaces torch.cuda.synchronize and does nothing; models call it after they share the embedding and the output
    layer with their draft model."""


def sums_of_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns the sums of squares of the rows of query [tokens, n] and then of key [tokens, m], fp32 [2 * tokens];
    replaces a Triton kernel of MiniMax-M2."""
    return torch.cat([x.float().square().sum(-1) for x in (query, key)])


def normed_by_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    sums: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalized query and key, computed with the `sums` of squares over all `ranks`, [2 * tokens];
    replaces a Triton kernel of MiniMax-M2."""
    query_sum, key_sum = sums[:, None].chunk(2)
    normed_query = rms_scale(query, query_sum / (query.shape[-1] * ranks), query_weight, eps)
    normed_key = rms_scale(key, key_sum / (key.shape[-1] * ranks), key_weight, eps)
    return normed_query, normed_key


def register_hooks(registry: Any, kinds: Any, *, experts: bool) -> None:
    """Registers those fixes of this module that wrap or replace functions in SGLang's HookRegistry `registry`.

    `kinds`: SGLang's HookType. `experts`: True to include `moe_without_absent_experts`, which is not used in numerics
    modes that replace MoE layers.
    """
    registry.register(DEVICE_MODULE, device_module, kinds.REPLACE)
    registry.register(SYNCHRONIZE, no_device_to_wait_for, kinds.REPLACE)
    registry.register(BATCH_INVARIANT, no_batch_invariant_mode, kinds.REPLACE)
    if experts:
        registry.register(NATIVE_MOE, moe_without_absent_experts, kinds.AROUND)
    for name, function in chain.from_iterable(kind.REPLACEMENTS for kind in _layer_kinds()):
        registry.register(name, function, kinds.REPLACE)
    registry.register(LING_EXPERTS, scaled_experts, kinds.AROUND)
    registry.register(MINIMAX_SQUARES, sums_of_squares, kinds.REPLACE)
    registry.register(MINIMAX_NORM, normed_by_sums, kinds.REPLACE)


def open_choices() -> None:
    """Makes SGLang accept arguments that it would refuse although they work on the CPU with this module's fixes."""
    _close(CHOICES)


def close_gaps() -> None:
    """Applies the fixes that SGLang's scheduler process needs to run on the CPU."""
    _close(_gaps())


def _gaps() -> tuple[Gap, ...]:
    return (*GAPS, *chain.from_iterable(kind.GAPS for kind in _layer_kinds()))


def _layer_kinds() -> Iterable[Any]:
    """Returns the Python modules that entry points register for layer kinds; each may define ROWS, GAPS and
    REPLACEMENTS."""
    return entry_points.load_all(GROUP).values()


def _close(gaps: tuple[Gap, ...]) -> None:
    """Applies the fixes of `gaps`. Raises SlimxError if SGLang no longer has one of the gaps."""
    for gap in gaps:
        if not gap.open():
            raise SlimxError(
                f"the installed SGLang no longer needs the workaround '{gap.name}' ({gap.reason}); delete it from "
                "slimx.extras.cpu.adapters.sglang",
            )
        gap.close()


def attest() -> dict[str, bool]:
    """Returns, for the name of each function that SGLang's CPU path lacks, True if slimx provides it in this
    process."""
    return {gap.name: not gap.open() for gap in (*CHOICES, *_gaps())}
