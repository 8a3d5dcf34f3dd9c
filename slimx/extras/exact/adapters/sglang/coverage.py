"""Checks that exact mode covers a served model: `numerics.py` must replace all of the model's operations that round.

Written for sglang 0.5.23. A model with any other module that has parameters is refused, because the module would round
differently from the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slimx.extras.exact.adapters.sglang.blocks import quantized_otherwise
from slimx.extras.exact.adapters.sglang.experts import BLOCKS
from slimx.extras.exact.adapters.sglang.rotary import KINDS

GATES = ("MoEGate", "Glm4MoeGate")
"""Class names of modules that only store a router's weight, with which the MoE layers in `BLOCKS` (`experts.py`)
compute logits."""


def uncovered(model: torch.nn.Module) -> Iterator[str]:
    """Yields a clause for each module of `model` that exact mode does not cover: its name, its class, and the
    unsupported property."""
    latent = {id(module.rotary_emb) for module in model.modules() if type(module).__name__ == "DeepseekV2AttentionMLA"}
    for name, module in model.named_modules():
        problem = _problem(module, in_latent=id(module) in latent)
        if problem is not None:
            yield f"{name or 'the model'} ({type(module).__name__}) {problem}"


def _problem(module: torch.nn.Module, *, in_latent: bool = False) -> str | None:
    """Returns the property that makes `module` unsupported in exact mode, worded as the end of a sentence ("has a
    bias") for an error message; None if exact mode supports it. Submodules are not considered.

    `in_latent`: True if the module is the rotary embedding of latent attention.
    """
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase, RowParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, LinearBase):
        if isinstance(module, RowParallelLinear) and module.bias is not None:
            return quantized_otherwise(module) or "has a bias"
        return quantized_otherwise(module)
    if isinstance(module, FusedMoE):
        # A subclass such as DeepEPMoE exchanges tokens with kernels of its own.
        return (
            _problem_of_experts(module)
            if type(module) is FusedMoE
            else "computes experts with other kernels than FusedMoE"
        )
    if isinstance(module, TopK):
        return _problem_of_choice(module.topk_config)
    name = type(module).__name__
    if isinstance(module, RMSNorm):
        if module.cast_x_before_out_mul or module.fp32_residual or module.variance_size_override:
            return "rounds or normalizes differently from a plain RMSNorm"
    elif isinstance(module, RadixAttention):
        if (module.sliding_window_size or -1) > -1 or module.logit_cap or module.is_cross_attention:
            return "attends to a window or caps its logits"
    elif isinstance(module, RotaryEmbedding):
        plain = name in KINDS and module.is_neox_style != in_latent
        if not plain or (hasattr(module, "mscale") and not in_latent):
            return "is a rotary embedding of an unsupported kind"
    elif name in BLOCKS:
        if module.num_fused_shared_experts:
            return "fuses shared experts with the routed ones"
    elif name == "DeepseekV2AttentionMLA":
        if module.use_dsa:
            return "uses sparse attention"
    elif getattr(module, "use_fused_qk_norm_rope", False) or getattr(module, "use_fused_qk_norm_rope_cpu", False):
        return "fuses the norm of queries and keys with the rotary embedding"
    elif not isinstance(module, VocabParallelEmbedding) and name not in GATES:
        unknown = next(module.parameters(recurse=False), None) is not None
        return "is unknown" if unknown else None
    return None


def _problem_of_experts(module: Any) -> str | None:
    """Returns the property that makes SGLang's FusedMoE `module` unsupported in exact mode, worded as the end of a
    sentence ("is not a plain SwiGLU"); None if exact mode supports it."""
    reason = quantized_otherwise(module)
    if reason is not None:
        return reason
    method = module.quant_method
    if not method.runner.runner_backend.is_triton() or getattr(method, "w13_swiglu_interleaved", False):
        return "stores expert weights in an unsupported order"
    plain = module.moe_runner_config.activation == "silu" and module.moe_runner_config.gemm1_alpha is None
    if not plain or getattr(module, "w13_weight_bias", None) is not None:
        return "is not a plain SwiGLU"
    return None


def _problem_of_choice(config: Any) -> str | None:
    """Returns the reason why exact mode does not support the expert selection that SGLang's TopKConfig `config`
    describes, worded as the end of a sentence ("selects ..."); None if exact mode supports it. With groups and a bias,
    SGLang uses sigmoid scores regardless of `scoring_func`."""
    if config.use_grouped_topk:
        plain = config.correction_bias is not None
    else:
        plain = config.correction_bias is None and config.scoring_func == "softmax"
    plain = plain and config.custom_routing_function is None and not config.num_shared_topk_slots
    return None if plain else "selects experts by an unsupported rule"
