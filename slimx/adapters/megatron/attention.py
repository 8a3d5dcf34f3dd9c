"""Attention of megatron-core 0.19.2: its core in plain torch, shaped like Transformer Engine's, for hosts without it
and for attention sinks, whose kernel for packed sequences was never tested; and latent attention (MLA), built exactly
from the parts that its spec names."""

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
    """Core attention of packed sequences (qkv_format thd).

    With `softmax_type` learnable it has a `softmax_offset` [heads / TP], the logits of attention sinks; with
    `window_size` it is local in the layers selected by `window_attn_skip_freq`."""

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
            # Each TP rank has different heads: without the mark the gradient norm counts the first rank's only.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise NotImplementedError(f"softmax_type {config.softmax_type} has no plain-torch layer")

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
        """Computes attention of query [T, heads, d] over key and value: [T, 1, heads * d], as megatron-core's packed
        path expects.

        Under context parallelism T is this rank's part of the tokens; every rank gathers all keys and values."""
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
        """Computes outputs [R, heads * dv] of the queries at positions `rows` [R] of the pack, or of all (None)."""
        window = self.window
        sinks = self.softmax_offset
        if rows is None:
            return packed_attention(query, key, value, lengths, self.scale, window=window, sinks=sinks)
        return partial_attention(query, key, value, lengths, rows, self.scale, window=window, sinks=sinks)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Returns checkpoint keys of the sinks, as Transformer Engine's layer writes them."""
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
    """Has a decoder's spec build its layers with this attention.

    Transformer Engine's DotProductAttention supports `softmax_type` for packed sequences since 2.12, with cuDNN 9.18
    (get_attention_backend; under context parallelism with cp_comm_type a2a only). It was never compared with this class
    on a GPU. Its `softmax_offset` is fp32 and not marked as tensor parallel (2.20.2), so the gradient norm would count
    the first rank's heads only. This class gives torch's memory-efficient kernel a shape that it supports: no scores
    are stored, and windows cost as much as full sequences.
    """
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention


class LatentAttention(MLASelfAttention):
    """MLASelfAttention that uses its spec unchanged.

    Upstream resolves norms and projections again from the configuration (`QKNormConfigResolver`): a projection that is
    not exactly the backend's class would silently become the backend's, and a query projection without a low rank would
    get a norm that no model here has."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        return {name: getattr(submodules, name) for name in _RESOLVED}

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> torch.Tensor:
        """Skips upstream's padding of values to the width of queries, which only Transformer Engine needs."""
        if isinstance(self.core_attention, PackedAttention):
            return self.core_attention(query, key, value, *args, **kwargs)
        return super()._run_core_attention(query, key, value, *args, **kwargs)


def install_latent(block: TransformerBlockSubmodules) -> None:
    """Has a decoder's spec build its latent attention with this class."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention


class DownProjection(torch.nn.Module):
    """A projection to a latent, computed completely on all TP ranks, with the parameter and the checkpoint keys of
    megatron-core's layer `original`."""

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
    """Replaces the down projections of `attention`, megatron-core's plain layers, by the results of `make`.

    Upstream compares the classes of down projections in a spec, so they are replaced after the build."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        layer = getattr(attention, name, None)
        if isinstance(layer, Linear):
            setattr(attention, name, make(layer))
