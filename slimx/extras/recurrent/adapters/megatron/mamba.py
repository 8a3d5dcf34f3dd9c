"""Builds decoders with Mamba-2 layers in megatron-core (HybridStack). Plain torch replaces mamba_ssm's fused function
and norm if that package or CUDA is not available. Written for megatron-core 0.19.2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.extras.recurrent.numerics.delta_rule import causal_convolution
from slimx.extras.recurrent.numerics.state_space import state_space_rule
from slimx.numerics.norm import rms_scale


class StackSpec(ModuleSpec):
    """Spec of a HybridStack that also has the attribute `layer_specs` of TransformerBlockSubmodules, so that trainers
    can replace modules in it. `layer_specs` contains only the MoE layer, because trainers replace no other modules."""

    @property
    def layer_specs(self) -> list[ModuleSpec]:
        """Spec of the MoE layer, as the only element; empty in a model without experts."""
        return [self.submodules.moe_layer] if isinstance(self.submodules.moe_layer, ModuleSpec) else []


def stack_spec(config: TransformerConfig) -> StackSpec:
    """Returns the spec of a HybridStack whose layers are Mamba-2, attention, MLPs or experts.

    megatron-core's own `hybrid_layer_specs` always uses Transformer Engine's layers. This spec uses the same layers as
    the spec of GPTModel, which may be plain torch.
    """
    kernels = mamba_mixer.HAVE_MAMBA_SSM and mamba_mixer.causal_conv1d_fn is not None
    if not (torch.cuda.is_available() and kernels):
        _install_torch()
    layers = gpt_layer_specs.TESpecProvider()
    hybrid_block.TENorm = gpt_layer_specs.TENorm  # class of the final norm
    joined = layers.column_parallel_layer_norm_linear()
    row = layers.row_parallel_linear()
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=joined, out_proj=row))
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=joined, core_attention=layers.core_attention(), linear_proj=row),
    )
    parts: dict[str, ModuleSpec] = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=get_bias_dropout_add)
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=joined, linear_fc2=row)),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    if config.num_moe_experts:
        experts = get_moe_module_spec_for_backend(layers, config.num_moe_experts, moe_grouped_gemm=True)
        parts["moe_layer"] = ModuleSpec(
            module=MoETransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=gpt_layer_specs.TENorm, mlp=experts, mlp_bda=get_bias_dropout_add
            ),
        )
    return StackSpec(module=HybridStack, submodules=HybridStackSubmodules(**parts))


def _install_torch() -> None:
    """Replaces the function and the norm that megatron-core's MambaMixer imports from mamba_ssm with torch versions.
    Also disables MambaMixer's checks for mamba_ssm (in the constructor) and for causal_conv1d (in the forward pass of
    packed sequences)."""
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)
    mamba_mixer.mamba_split_conv1d_scan_combined = split_conv1d_scan
    mamba_mixer.ExtendedRMSNorm = GroupedNorm


def split_conv1d_scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    *,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    seq_idx: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """Computes what mamba_ssm's `mamba_split_conv1d_scan_combined` does without norm and output projection: the
    convolution of x, B and C, the state-space rule, and the gate. Returns [batch, length, heads * headdim].

    `projected` [batch, length, z + x + B + C + dt]: output of the input projection; `weight` [channels, width] and
    `bias` [channels]: the convolution's; `step_bias` [heads]: added to dt; `decay` [heads]: A, below 0. `seq_idx` [1,
    length]: sequence index of each token if the only row of the batch contains packed sequences; None: each row is one
    sequence.
    """
    heads = len(decay)
    inner = heads * headdim
    flat = projected.flatten(0, 1)
    gate, mixed, step = flat.split([inner, len(weight), heads], dim=-1)
    if seq_idx is None:
        lengths = [projected.shape[1]] * projected.shape[0]
    else:
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    mixed = torch.nn.functional.silu(causal_convolution(mixed, weight, lengths) + bias)
    rows_per_kind = (len(weight) - inner) // 2
    x, key, query = mixed.split([inner, rows_per_kind, rows_per_kind], dim=-1)
    step = torch.nn.functional.softplus(step.float() + step_bias.float())
    groups = (ngroups, -1)
    out = state_space_rule(
        x.unflatten(-1, (heads, headdim)),
        step,
        decay,
        key.unflatten(-1, groups),
        query.unflatten(-1, groups),
        D,
        lengths,
    )
    gated = out.flatten(1).float() * torch.nn.functional.silu(gate.float())
    return gated.to(projected.dtype).view(*projected.shape[:2], inner)


class GroupedNorm(torch.nn.Module):
    """RMSNorm over each group of `group_size` channels. Its `weight` [channels] is split over tensor-parallel ranks."""

    def __init__(self, hidden_size: int, *, eps: float, group_size: int, device: Any, dtype: torch.dtype, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps
        self.group = group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, self.group))
        mean_square = parts.float().square().mean(-1, keepdim=True)
        return rms_scale(parts, mean_square, self.weight.view(-1, self.group), self.eps).flatten(-2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Returns the sharded weight, split over tensor-parallel ranks, under the checkpoint key that mamba_ssm's norm
        uses."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
