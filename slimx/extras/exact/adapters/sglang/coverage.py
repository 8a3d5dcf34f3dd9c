"""Modules of a served model that exact mode covers: those whose every rounding `numerics.py` replaces.

Written for sglang 0.5.23. Whatever else has parameters would round by a rule that no trainer follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slimx.extras.exact.adapters.sglang.blocks import quantised_otherwise
from slimx.extras.exact.adapters.sglang.experts import BLOCKS
from slimx.extras.exact.adapters.sglang.rotary import KINDS

GATES = ("MoEGate", "Glm4MoeGate")
"""Routers' weights, which the layers of BLOCKS multiply by."""


def uncovered(model: torch.nn.Module) -> Iterator[str]:
    """The parts of a model that these operations do not compute, a phrase each."""
    latent = {id(module.rotary_emb) for module in model.modules() if type(module).__name__ == "DeepseekV2AttentionMLA"}
    for name, module in model.named_modules():
        if why := _problem(module, in_latent=id(module) in latent):
            yield f"{name or 'the model'} ({type(module).__name__}) {why}"


def _problem(module: torch.nn.Module, *, in_latent: bool = False) -> str | None:
    """Why the rounding of a module's own arithmetic would not be the contract's; None if it is, or has none.

    `in_latent`: it is the rotary embedding of latent attention."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase, RowParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, LinearBase):
        if why := quantised_otherwise(module):
            return why
        return "has a bias" if isinstance(module, RowParallelLinear) and module.bias is not None else None
    if isinstance(module, FusedMoE):
        if type(module) is not FusedMoE:  # DeepEPMoE, for one, sends tokens by kernels of its own
            return "computes its experts in another way"
        if why := quantised_otherwise(module):
            return why
        method = module.quant_method
        if not method.runner.runner_backend.is_triton() or getattr(method, "w13_swiglu_interleaved", False):
            return "holds its weights in another order"
        plain = module.moe_runner_config.activation == "silu" and module.moe_runner_config.gemm1_alpha is None
        return None if plain and getattr(module, "w13_weight_bias", None) is None else "is no plain SwiGLU"
    if isinstance(module, RMSNorm):
        special = module.cast_x_before_out_mul or module.fp32_residual or module.variance_size_override
        return "normalises in another way" if special else None
    if isinstance(module, TopK):
        return _problem_of_choice(module.topk_config)
    if isinstance(module, RadixAttention):
        special = (module.sliding_window_size or -1) > -1 or module.logit_cap or module.is_cross_attention
        return "attends to a window or caps its logits" if special else None
    if isinstance(module, RotaryEmbedding):
        plain = type(module).__name__ in KINDS and module.is_neox_style != in_latent
        return None if plain and (in_latent or not hasattr(module, "mscale")) else "rotates in another way"
    if type(module).__name__ in BLOCKS:
        return "computes its shared experts with the others" if module.num_fused_shared_experts else None
    if type(module).__name__ == "DeepseekV2AttentionMLA":
        return "attends to chosen tokens only" if module.use_dsa else None
    if getattr(module, "use_fused_qk_norm_rope", False) or getattr(module, "use_fused_qk_norm_rope_cpu", False):
        return "normalises and rotates in a kernel of its own"
    known = isinstance(module, VocabParallelEmbedding) or type(module).__name__ in GATES
    return "is unknown" if not known and next(module.parameters(recurse=False), None) is not None else None


def _problem_of_choice(config: Any) -> str | None:
    """The problem with SGLang's TopKConfig, or None; with groups and a bias SGLang takes sigmoid scores, whatever
    `scoring_func` is."""
    if config.use_grouped_topk:
        plain = config.correction_bias is not None
    else:
        plain = config.correction_bias is None and config.scoring_func == "softmax"
    plain = plain and config.custom_routing_function is None and not config.num_shared_topk_slots
    return None if plain else "chooses experts by another rule"
