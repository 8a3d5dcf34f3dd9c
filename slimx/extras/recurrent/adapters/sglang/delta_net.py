"""Gated delta nets and gated attention for SGLang on the CPU, in plain torch: replaces operators and functions of
sgl_kernel's CPU build, which is not on PyPI, and three Triton kernels. Written for sglang 0.5.23
(`sglang.srt.layers.attention.linear.gdn_backend`, `sglang.srt.models.qwen3_5`).

SGLang stores two states per request, each in a slot of a pool: the convolution's last inputs [slots, channels, width -
1], and the state of each value head [slots, heads, dv, dk]. A new request gets a slot of zeros.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F

from slimx.extras.recurrent.numerics.delta_rule import causal_convolution, gated_delta_rule, l2norm
from slimx.numerics.norm import rms_norm, zero_centered_rms_norm

GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated"
GATED_LAYER_NORM = "sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn"
SHARED_EXPERT = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
"""Dotted name of SGLang's function that adds the gated shared expert's output. Like GATED_NORM and GATED_LAYER_NORM, it
launches a Triton kernel and is replaced on the CPU."""
_OPERATORS = {
    "fused_gdn_gating_cpu": "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(state!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor"
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        "(Tensor mixed_qkvz, Tensor mixed_ba, int num_heads_qk, int num_heads_v, int head_qk, int head_v) -> "
        "(Tensor, Tensor, Tensor, Tensor)"
    ),
    "fused_qk_gemma_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)"
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_head) -> "
        "(Tensor, Tensor, Tensor)"
    ),
    "fused_sigmoid_mul_cpu": "(Tensor(a!) x, Tensor gate) -> ()",
}


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
) -> torch.Tensor:
    """Computes silu of the causal convolution of x [channels, T], the tokens of several prompts or parts of prompts.

    Each sequence continues from its slot (`cache_indices`) in `conv_states` if its element of `has_initial_state` is
    True, and from zeros otherwise. Its last inputs are written to that slot.
    """
    initial = conv_states[cache_indices] * has_initial_state[:, None, None]
    return _convolve(x.T, weight, bias, seq_lens_cpu, initial, conv_states, cache_indices).T


def causal_conv1d_update(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Computes silu of the causal convolution of x [requests, channels], the next token of each request. Reads and
    updates the requests' slots (`conv_state_indices`) of `conv_states`."""
    initial = conv_states[conv_state_indices]
    return _convolve(x, weight, bias, [1] * len(x), initial, conv_states, conv_state_indices)


def fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logarithms of the decays, and the learning rates, each fp32 [1, T, heads], computed from the
    projections `a` and `b` [T, heads]."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None, None]:
    """Computes the gated delta rule for several prompts or parts of prompts that are packed in one row; returns its
    outputs [1, T, value heads, dv]. `g`: logarithms of the decays; `beta`: learning rates; `cu_seqlens`: bounds of the
    sequences. Reads and updates the slots `initial_state_indices` of the pool `initial_state`."""
    lengths = cu_seqlens.diff().tolist()
    out = _apply_rule(q[0], k[0], v[0], g[0], beta[0], lengths, initial_state, initial_state_indices)
    return out[None], None, None


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Computes what `chunk_gated_delta_rule` computes, for the next token of each request, with the decays and learning
    rates that `fused_gdn_gating` returns."""
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    lengths = [1] * q.shape[1]
    return _apply_rule(q[0], k[0], v[0], g[0], beta[0], lengths, initial_state_source, initial_state_indices)[None]


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str,
    residual: None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor:
    """Computes RMSNorm(x) times silu of the gate `g`, both [T, n], in fp32, and rounds to x's dtype."""
    return (rms_norm(x.float(), weight.float(), eps) * F.silu(g.float())).to(x.dtype)


def layer_norm_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    z: torch.Tensor,
    eps: float,
    group_size: None,
    norm_before_gate: bool,
    is_rms_norm: bool,
    activation: str,
) -> torch.Tensor:
    """Computes `rms_norm_gated` of x with the gate `z`, both [T, n]; replaces the function that Qwen3.5 calls. Raises
    NotImplementedError for the function's other variants."""
    if group_size is not None or not (norm_before_gate and is_rms_norm and activation in ("swish", "silu")):
        raise NotImplementedError(
            "layer_norm_gated has unsupported options; use RMSNorm over whole rows, followed by a silu gate"
        )
    return rms_norm_gated(x, z, weight, bias, activation, eps=eps)


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits the outputs of two fused projections by kind: `mixed_qkvz` [T, rows] into queries, keys, values and output
    gates, and `mixed_ba` [T, 2 * value heads] into b and a. Returns queries, keys and values in one tensor [T, rows],
    output gates [T, value heads, dv], b and a [T, value heads]."""
    mixed = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    qkv, z = mixed_qkvz.split([mixed, num_heads_v * head_v], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.clone(), z.reshape(-1, num_heads_v, head_v).clone(), b.clone(), a.clone()


def norm_heads(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes zero-centered RMSNorms over each head of `q` and `k`, both [T, heads * head_dim]; returns them as [T *
    heads, head_dim]."""
    normed_q = zero_centered_rms_norm(q.reshape(-1, head_dim), q_weight, eps)
    normed_k = zero_centered_rms_norm(k.reshape(-1, head_dim), k_weight, eps)
    return normed_q, normed_k


def norm_gated_heads(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_head: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `norm_heads` for the queries in `q_gate` [T, heads * 2 * head_dim], where each head's query precedes its
    output gate. Also returns the gates [T * heads, head_dim]."""
    q, gate = q_gate.reshape(-1, num_head, 2 * head_dim).chunk(2, dim=-1)
    normed = norm_heads(q.flatten(1), k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.reshape(-1, head_dim).clone()


def multiply_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies `x` in place by the sigmoid of `gate`, which has as many elements as `x`. Computes in fp32."""
    x.copy_(x.float() * gate.reshape(x.shape).float().sigmoid())


def add_gated_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the shared expert's output times the sigmoid of its gate to `final_hidden_states`, the sum of the routed
    experts, in place and in fp32. All tensors are [T, hidden] except `gate_weight` [hidden]; its product with
    `hidden_states` is the gate before the sigmoid."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def operators_missing() -> bool:
    """Returns True if torch has none of the operators in `_OPERATORS` and they must therefore be added."""
    return not any(hasattr(torch.ops.sgl_kernel, name) for name in _OPERATORS)


def add_operators() -> None:
    """Defines the operators in `_OPERATORS` for the CPU. Must run before SGLang's delta-net backend and its Qwen3.5
    model are imported, because both look the operators up on import."""
    functions: tuple[Callable[..., object], ...] = (
        fused_gdn_gating,
        fused_sigmoid_gating_delta_rule_update,
        split_projections,
        norm_heads,
        norm_gated_heads,
        multiply_by_sigmoid,
    )
    for (name, signature), function in zip(_OPERATORS.items(), functions, strict=True):
        torch.library.define(f"sgl_kernel::{name}", signature)
        torch.library.impl(f"sgl_kernel::{name}", "cpu", function)


def functions_missing() -> bool:
    """Returns True if the package sgl_kernel, or its substitute, lacks working versions of the functions in
    `_FUNCTIONS`. CUDA builds may contain functions with these names, but not the CPU operators that they call."""
    installed = all(vars(_package()).get(name) is function for name, function in _FUNCTIONS.items())
    return not installed and not hasattr(torch.ops.sgl_kernel, "causal_conv1d_fwd_cpu")


def add_functions() -> None:
    """Adds `_FUNCTIONS` to the package sgl_kernel. Must run before SGLang's delta-net backend imports these functions
    by name."""
    vars(_package()).update(_FUNCTIONS)


def _package() -> ModuleType:
    return importlib.import_module("sgl_kernel.mamba")


_FUNCTIONS = {
    "causal_conv1d_fn_cpu": causal_conv1d,
    "causal_conv1d_update_cpu": causal_conv1d_update,
    "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule,
}


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: list[int],
    initial: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Computes silu of the causal convolution of x [T, channels], which contains sequences of `lengths` tokens. Each
    continues from the earlier inputs `initial` [sequences, channels, width - 1], and its last inputs are written to its
    slot (`slots`) of `states`."""
    out = causal_convolution(x, weight, lengths, initial)
    width = states.shape[-1]
    for slot, before, part in zip(slots.tolist(), initial, x.split(lengths), strict=True):
        states[slot] = torch.cat([before, part[-width:].T.to(states.dtype)], dim=-1)[:, -width:]
    return F.silu(out if bias is None else out + bias)


def _apply_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    lengths: list[int],
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Computes the gated delta rule and returns its outputs [T, value heads, dv]. Queries and keys are L2-normalized,
    and each query and key head is used for several consecutive value heads. Reads and updates the slots `slots` of
    `states`."""
    times = v.shape[1] // q.shape[1]
    q = l2norm(q.float()).repeat_interleave(times, dim=1)
    k = l2norm(k.float()).repeat_interleave(times, dim=1)
    out, after = gated_delta_rule(q, k, v, decay, rate, lengths, states[slots].transpose(-1, -2))
    states[slots] = after.transpose(-1, -2).to(states.dtype)
    return out.to(v.dtype)
