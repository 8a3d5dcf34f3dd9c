"""Attributes of SGLang's layers that the layout reads.

Written for sglang 0.5.23. torch types attributes of a module as `Tensor | Module`; a cast to one of these protocols
gives the real types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Group(Protocol):
    """A parallel group."""

    rank_in_group: int


class Linear(Protocol):
    """ColumnParallelLinear, MergedColumnParallelLinear and RowParallelLinear."""

    tp_group: Group | None
    input_size: int
    output_size: int
    output_sizes: Sequence[int]
    output_partition_sizes: Sequence[int]


class Attention(Protocol):
    """QKVParallelLinear."""

    tp_group: Group | None
    kv_tp_group: Group | None
    num_kv_head_replicas: int
    total_num_heads: int
    total_num_kv_heads: int
    head_size: int
    v_head_size: int
    q_proj_shard_size: int
    kv_proj_shard_size: int
    v_proj_shard_size: int


class VocabularyShard(Protocol):
    """Indices of a rank's part of the vocabulary."""

    org_vocab_start_index: int
    num_org_elements: int
    num_added_elements: int


class Vocabulary(Protocol):
    """VocabParallelEmbedding and ParallelLMHead."""

    shard_indices: VocabularyShard
    org_vocab_size: int


class LatentAttention(Protocol):
    """MLA's attention layer."""

    q_lora_rank: int


class HeadsNorm(Protocol):
    """MiniMaxM2RMSNormTP."""

    num_head_replicas: int
    attn_tp_size: int
    attn_tp_rank: int


class Experts(Protocol):
    """FusedMoE."""

    quant_method: object
    layer_id: int
    hidden_size: int
    intermediate_size_per_partition: int
    num_local_experts: int
    num_fused_shared_experts: int
    moe_tp_size: int
    moe_tp_rank: int
    moe_ep_size: int
    moe_ep_rank: int
