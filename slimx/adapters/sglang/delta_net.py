"""Gated delta nets on SGLang's CPU path, in plain torch: operators and functions of sgl_kernel's CPU build, of which
PyPI has no wheel, and two Triton kernels. Written for sglang 0.5.23 (`sglang.srt.layers.attention.linear.gdn_backend`).

Requests keep two states in pools of slots: the convolution's last inputs [slots, channels, width - 1], and each value
head's state [slots, heads, dv, dk]. SGLang gives a new request a slot of zeros.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
import torch.nn.functional as F

from slimx.numerics.delta_rule import causal_convolution, gated_delta_rule, l2norm
from slimx.numerics.norm import rms_norm

GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated"
SHARED_EXPERT = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
"""The Triton kernels' functions."""
_OPERATORS = {
    "fused_gdn_gating_cpu": "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(state!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor"
    ),
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
    """Prompts, or parts of them: x [channels, T] -> the activation's output [channels, T]. Slots `cache_indices` of
    `conv_states` are read where `has_initial_state`, and hold each sequence's last inputs afterwards."""
    begun = conv_states[cache_indices] * has_initial_state[:, None, None]
    return _convolved(x.T, weight, bias, seq_lens_cpu, begun, conv_states, cache_indices).T


def causal_conv1d_update(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """One more token of each request: x [requests, channels] -> the activation's output, of the same shape."""
    begun = conv_states[conv_state_indices]
    return _convolved(x, weight, bias, [1] * len(x), begun, conv_states, conv_state_indices)


def fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the decays, and learning rates, fp32 [1, T, heads], of a and b [T, heads]."""
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
    """Outputs [1, T, value heads, dv] of prompts or parts of them, packed in one row. The states go on in slots
    `initial_state_indices` of the pool `initial_state`."""
    lengths = cu_seqlens.diff().tolist()
    out = _ruled(q[0], k[0], v[0], g[0], beta[0], lengths, initial_state, initial_state_indices)
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
    """One more token of each request: as `chunk_gated_delta_rule`, with the gates of `fused_gdn_gating`."""
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    lengths = [1] * q.shape[1]
    return _ruled(q[0], k[0], v[0], g[0], beta[0], lengths, initial_state_source, initial_state_indices)[None]


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
    """Root-mean-square norm times silu of the gate, x and g [T, n], computed in fp32, in x's dtype."""
    return (rms_norm(x.float(), weight.float(), eps) * F.silu(g.float())).to(x.dtype)


def add_gated_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add the shared expert's output, times the sigmoid of its gate, to the others' in place, [T, hidden] each;
    gate_weight [hidden]. Computed in fp32."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states.copy_(final_hidden_states.float() + gate * shared_output.float())


def operators_missing() -> bool:
    """Returns True while torch has no such operator."""
    return not any(hasattr(torch.ops.sgl_kernel, name) for name in _OPERATORS)


def add_operators() -> None:
    """Define the operators, before SGLang's backend looks them up at its import."""
    functions = fused_gdn_gating, fused_sigmoid_gating_delta_rule_update
    for (name, signature), function in zip(_OPERATORS.items(), functions, strict=True):
        torch.library.define(f"sgl_kernel::{name}", signature)
        torch.library.impl(f"sgl_kernel::{name}", "cpu", function)


def functions_missing() -> bool:
    """Returns True while the package, or what stands for it, has none of the functions. Builds for CUDA may have
    functions of their names, without the operators behind them."""
    own = all(vars(_package()).get(name) is function for name, function in _FUNCTIONS.items())
    return not own and not hasattr(torch.ops.sgl_kernel, "causal_conv1d_fwd_cpu")


def add_functions() -> None:
    """Put the functions into the package's place, before SGLang's backend imports them by name."""
    vars(_package()).update(_FUNCTIONS)


def _package() -> ModuleType:
    return importlib.import_module("sgl_kernel.mamba")


_FUNCTIONS = {
    "causal_conv1d_fn_cpu": causal_conv1d,
    "causal_conv1d_update_cpu": causal_conv1d_update,
    "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule,
}


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: list[int],
    begun: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """silu of the convolution of x [T, channels], whose sequences follow inputs `begun` [sequences, channels,
    width - 1]; their last inputs go to `slots` of `states`."""
    out = causal_convolution(x, weight, lengths, begun)
    behind = states.shape[-1]
    for slot, before, part in zip(slots.tolist(), begun, x.split(lengths), strict=True):
        states[slot] = torch.cat([before, part[-behind:].T.to(states.dtype)], dim=-1)[:, -behind:]
    return F.silu(out if bias is None else out + bias)


def _ruled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    lengths: list[int],
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Outputs [T, value heads, dv] of the rule for queries and keys that are normed here, each of which serves the
    value heads that follow each other."""
    times = v.shape[1] // q.shape[1]
    q, k = (l2norm(x.float()).repeat_interleave(times, dim=1) for x in (q, k))
    out, after = gated_delta_rule(q, k, v, decay, rate, lengths, states[slots].transpose(-1, -2))
    states[slots] = after.transpose(-1, -2).to(states.dtype)
    return out.to(v.dtype)
