"""RMSNorm of queries and keys over all of their heads together, as in MiniMax-M2. megatron-core normalizes each head
separately."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.errors import SlimxError
from slimx.numerics.norm import rms_scale


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of a projection (queries or keys), which are split over the tensor-parallel ranks.

    The model's config must not set qk_layernorm. With it, megatron-core 0.19.2 sums the gradients of all parameters
    named q_layernorm or k_layernorm over the tensor-parallel ranks, but here each rank has a different part of the
    weight."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, heads: int):
        """Creates the norm with all weights set to 1. `hidden_size`: size of one head. `heads`: number of heads in the
        whole model."""
        super().__init__()
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.eps = eps
        self.width = heads * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.group.size(), dtype=config.params_dtype))
        # Marks the weight as split, so that the gradient norm counts the parts of all ranks.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes `x` [..., heads / TP, head size] and returns a tensor of the same shape."""
        flat = x.flatten(-2)
        squares = flat.float().square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            # The sum is used for the heads of every rank, so its gradient is also summed over the ranks.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        return rms_scale(flat, squares / self.width, self.weight, self.eps).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns the weight under the checkpoint key that megatron-core's norms have, as a tensor that is split over
        the tensor-parallel ranks."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ProjectionNormAttention(SelfAttention):
    """SelfAttention whose norms of queries and keys span all heads. In a layer's spec, megatron-core 0.19.2 accepts
    such norms only if the model's config has qk_layernorm."""

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object):
        super().__init__(config, *args, **kwargs)
        size = self.hidden_size_per_attention_head
        eps = config.layernorm_epsilon
        self.q_layernorm = ProjectionNorm(size, config, eps, config.num_attention_heads)
        self.k_layernorm = ProjectionNorm(size, config, eps, config.num_query_groups)


def install(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Changes the spec of a decoder so that its attention layers use ProjectionNorm. Raises SlimxError if `config` has
    qk_layernorm, with which megatron-core would compute wrong gradients."""
    if config.qk_layernorm:
        raise SlimxError(
            "trainer.megatron.qk_layernorm is true, but the query and key norms of this model span all heads, so "
            "megatron-core would add up gradients of different parts of the norms; remove "
            "trainer.megatron.qk_layernorm",
            code="trainer.qk_layernorm",
            about="trainer.megatron.qk_layernorm",
        )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is ProjectionNormAttention:
            continue  # its spec is shared with a layer that was changed already
        if attention.module is not SelfAttention or not isinstance(attention.submodules, SelfAttentionSubmodules):
            raise SlimxError(
                "the query and key norms of this model span all heads, which is supported only in megatron-core's "
                f"SelfAttention, but a layer has {attention.module}; use a model with SelfAttention in all layers",
                code="trainer.projection_norm",
                about=str(attention.module),
            )
        attention.module = ProjectionNormAttention
