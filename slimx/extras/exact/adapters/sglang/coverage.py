"""Check that exact mode covers a served model: `numerics.py` replaces all of its rounding operations.

Written for sglang 0.5.23. Any other module with parameters would round differently from the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slimx.extras.exact.adapters.sglang.blocks import quantized_otherwise
from slimx.extras.exact.adapters.sglang.experts import BLOCKS
from slimx.extras.exact.adapters.sglang.rotary import KINDS

GATES = ("MoEGate", "Glm4MoeGate")
"""Modules with routers' weights, which the layers of BLOCKS multiply by."""


def uncovered(model: torch.nn.Module) -> Iterator[str]:
    """Yields a phrase for each part of a model that these operations do not compute."""
    latent = {id(module.rotary_emb) for module in model.modules() if type(module).__name__ == "DeepseekV2AttentionMLA"}
    for name, module in model.named_modules():
        problem = _problem(module, in_latent=id(module) in latent)
        if problem is not None:
            yield f"{name or 'the model'} ({type(module).__name__}) {problem}"


def _problem(module: torch.nn.Module, *, in_latent: bool = False) -> str | None:
    """Returns the reason why a module's own arithmetic does not follow the contract, or None.

    `in_latent`: the module is the rotary embedding of latent attention.
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
        # A subclass such as DeepEPMoE sends tokens by its own kernels.
        return _problem_of_experts(module) if type(module) is FusedMoE else "computes its experts in another way"
    if isinstance(module, TopK):
        return _problem_of_choice(module.topk_config)
    name = type(module).__name__
    if isinstance(module, RMSNorm):
        if module.cast_x_before_out_mul or module.fp32_residual or module.variance_size_override:
            return "normalizes in another way"
    elif isinstance(module, RadixAttention):
        if (module.sliding_window_size or -1) > -1 or module.logit_cap or module.is_cross_attention:
            return "attends to a window or caps its logits"
    elif isinstance(module, RotaryEmbedding):
        plain = name in KINDS and module.is_neox_style != in_latent
        if not plain or (hasattr(module, "mscale") and not in_latent):
            return "rotates in another way"
    elif name in BLOCKS:
        if module.num_fused_shared_experts:
            return "computes its shared experts with the others"
    elif name == "DeepseekV2AttentionMLA":
        if module.use_dsa:
            return "attends to chosen tokens only"
    elif getattr(module, "use_fused_qk_norm_rope", False) or getattr(module, "use_fused_qk_norm_rope_cpu", False):
        return "normalizes and rotates in a special kernel"
    elif not isinstance(module, VocabParallelEmbedding) and name not in GATES:
        unknown = next(module.parameters(recurse=False), None) is not None
        return "is unknown" if unknown else None
    return None


def _problem_of_experts(module: Any) -> str | None:
    """Returns the reason why SGLang's FusedMoE does not follow the contract, or None."""
    reason = quantized_otherwise(module)
    if reason is not None:
        return reason
    method = module.quant_method
    if not method.runner.runner_backend.is_triton() or getattr(method, "w13_swiglu_interleaved", False):
        return "stores its weights in another order"
    plain = module.moe_runner_config.activation == "silu" and module.moe_runner_config.gemm1_alpha is None
    if not plain or getattr(module, "w13_weight_bias", None) is not None:
        return "is not a plain SwiGLU"
    return None


def _problem_of_choice(config: Any) -> str | None:
    """Returns the problem with SGLang's TopKConfig, or None. With groups and a bias, SGLang uses sigmoid scores
    whatever `scoring_func` is."""
    if config.use_grouped_topk:
        plain = config.correction_bias is not None
    else:
        plain = config.correction_bias is None and config.scoring_func == "softmax"
    plain = plain and config.custom_routing_function is None and not config.num_shared_topk_slots
    return None if plain else "chooses experts by another rule"
