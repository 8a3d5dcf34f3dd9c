"""Attention layers for megatron-core 0.19.2: core attention in plain torch, and latent attention (MLA) built exactly
from the modules that its spec names.

Core attention has the interface of Transformer Engine's layer. It serves hosts without Transformer Engine, and models
with attention sinks, because Transformer Engine's kernel for sinks in packed sequences was never tested here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from slimx.data.packing import zigzag
from slimx.numerics.attention import packed_attention, partial_attention

_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class PackedAttention(MegatronModule):
    """Core attention over packed sequences (qkv_format thd) in plain torch.

    If the configuration's `softmax_type` is "learnable", the layer has a parameter `softmax_offset` [heads / TP], the
    logits of the attention sinks. If `window_size` is set, the layers that `window_attn_skip_freq` selects use
    sliding-window attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ):
        super().__init__(config)
        assert pg_collection is not None
        self.context = pg_collection.cp
        self.tensor = pg_collection.tp
        self.scale = softmax_scale or config.kv_channels**-0.5
        local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # A window of (left, right) contains `left` tokens and the query's own.
        self.window: int | None = config.window_size[0] + 1 if local else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tensor.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
            # Each TP rank has different heads. Without this mark, the gradient norm would count only the first rank's.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise NotImplementedError(
                f"no plain-torch attention supports softmax_type {config.softmax_type}; set it to vanilla or learnable"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Computes causal attention for packed sequences; returns [T, 1, heads * d], as megatron-core's packed path
        expects. `query`, `key`, `value`: [T, heads, d] or [T, 1, heads, d].

        Under context parallelism, T is the number of this rank's tokens only, and every rank gathers all keys and
        values."""
        assert packed_seq_params is not None
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        size = self.context.size()
        if size == 1:
            return self.attend(query, key, value, lengths, None).unsqueeze(1)
        rows = [torch.from_numpy(zigzag(lengths, size, rank)).to(query.device) for rank in range(size)]
        order = torch.cat(rows).argsort()
        key = gather_from_sequence_parallel_region(key.contiguous(), group=self.context)[order]
        value = gather_from_sequence_parallel_region(value.contiguous(), group=self.context)[order]
        return self.attend(query, key, value, lengths, rows[self.context.rank()]).unsqueeze(1)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes the attention outputs [R, heads * dv] of the queries at positions `rows` [R] of the packed tokens;
        `rows` is None for all positions. `lengths`: number of tokens of each packed sequence."""
        window = self.window
        sinks = self.softmax_offset
        if rows is None:
            return packed_attention(query, key, value, lengths, self.scale, window=window, sinks=sinks)
        return partial_attention(query, key, value, lengths, rows, self.scale, window=window, sinks=sinks)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns the sharded `softmax_offset` under the checkpoint key that Transformer Engine's layer uses; empty
        without sinks."""
        assert metadata is not None
        state = {} if self.softmax_offset is None else self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor,
            dp_cp_group=metadata["dp_cp_group"],
        )


def install_for_sinks(block: TransformerBlockSubmodules) -> None:
    """Changes a decoder's spec `block` so that its layers are built with `PackedAttention`, for models with attention
    sinks.

    Transformer Engine's DotProductAttention has supported `softmax_type` for packed sequences since 2.12, with cuDNN
    9.18 (get_attention_backend; under context parallelism only with cp_comm_type a2a), but has never been compared with
    this class on a GPU. Its `softmax_offset` is fp32 and not marked as tensor parallel (2.20.2), so the gradient norm
    would count only the first rank's heads. `PackedAttention` gives torch's memory-efficient kernel a shape that it
    supports: attention scores are not stored, and windowed attention costs as much as full attention.
    """
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention


class LatentAttention(MLASelfAttention):
    """MLASelfAttention that uses its spec unchanged.

    Upstream resolves norms and projections again from the configuration (`QKNormConfigResolver`). That would silently
    replace every projection that is not of the backend's class, and would add a norm to a query projection without
    low-rank compression, although none of slimx's models has such a norm."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        return {name: getattr(submodules, name) for name in _RESOLVED}

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """Runs core attention. If that is `PackedAttention`, omits upstream's padding of values to the head dimension
        of queries, which only Transformer Engine needs."""
        if isinstance(self.core_attention, PackedAttention):
            return self.core_attention(query, key, value, *args, **kwargs)
        return super()._run_core_attention(query, key, value, *args, **kwargs)


def install_latent(block: TransformerBlockSubmodules) -> None:
    """Changes a decoder's spec `block` so that each MLASelfAttention in it is built as `LatentAttention`."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention


class DownProjection(torch.nn.Module):
    """Base class of replacements for an MLA down projection (hidden states to latents), which every TP rank computes
    completely. The replacement takes over the weight and the checkpoint keys of megatron-core's layer `original`."""

    def __init__(self, original: Linear):
        super().__init__()
        self.weight = original.weight
        self.tp_group = original.tp_group

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def exchange_down_projections(attention: LatentAttention, make: Callable[[Linear], DownProjection]) -> None:
    """Replaces the down projections of `attention`, which are plain megatron-core layers, with the modules that `make`
    returns for them.

    Upstream checks the classes of the down projections in a spec, so they are replaced after the layer is built."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        layer = getattr(attention, name, None)
        if isinstance(layer, Linear):
            setattr(attention, name, make(layer))
