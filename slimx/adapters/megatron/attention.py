"""Attention of megatron-core 0.19.2: its core in plain torch with the shape of Transformer Engine's, where that is
absent and for attention sinks, of which its kernel for packed sequences was never tried here; and latent attention
(MLA), built of the parts that its spec names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from slimx.data.packing import zigzag
from slimx.numerics.attention import packed_attention, partial_attention

_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class PackedAttention(MegatronModule):
    """Core attention of packed sequences (qkv_format thd).

    With `softmax_type` learnable it has a `softmax_offset` [heads / TP], the logits of attention sinks; with
    `window_size` it is local in the layers that `window_attn_skip_freq` names."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__(config)
        self.context, self.tensor = pg_collection.cp, pg_collection.tp
        self.scale = softmax_scale or config.kv_channels**-0.5
        local = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # A window of (left, right) holds `left` tokens and the query's own.
        self.window = config.window_size[0] + 1 if local else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tensor.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
            # Of its own heads on each rank of TP: without the mark the gradient norm counts the first rank's only.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        elif config.softmax_type != "vanilla":
            raise NotImplementedError(f"softmax_type {config.softmax_type} has no plain-torch layer")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of query [T, heads, d] over key and value: [T, 1, heads * d], as megatron's packed path expects.

        Under context parallelism T is this rank's part of the tokens; every rank gathers all keys and values."""
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        bounds = packed_seq_params.cu_seqlens_q
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        size = self.context.size()
        if size == 1:
            return self.attend(query, key, value, lengths, None).unsqueeze(1)
        held = [torch.from_numpy(zigzag(lengths, size, each)).to(query.device) for each in range(size)]
        order = torch.cat(held).argsort()
        key, value = (
            gather_from_sequence_parallel_region(x.contiguous(), group=self.context)[order] for x in (key, value)
        )
        return self.attend(query, key, value, lengths, held[self.context.rank()]).unsqueeze(1)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Results [R, heads * dv] of the queries at places `rows` [R] of the pack, or of all of them (None)."""
        how = {"window": self.window, "sinks": self.softmax_offset}
        if rows is None:
            return packed_attention(query, key, value, lengths, self.scale, **how)
        return partial_attention(query, key, value, lengths, rows, self.scale, **how)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Checkpoint keys of the sinks, as Transformer Engine's layer writes them."""
        state = {} if self.softmax_offset is None else self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor,
            dp_cp_group=metadata["dp_cp_group"],
        )


def install_for_sinks(block: Any) -> None:
    """Have the layers of a decoder's spec (TransformerBlockSubmodules) built with this attention.

    Transformer Engine's DotProductAttention takes `softmax_type` for packed sequences from 2.12 on, with cuDNN 9.18
    (get_attention_backend; under context parallelism with cp_comm_type a2a alone). Whether it computes what this one
    does was never seen on a GPU. Its `softmax_offset` is fp32 and bears no mark of tensor parallelism (2.20.2), so that
    the gradient norm would count the first rank's heads only. This one gives torch's memory-efficient kernel a shape
    that it takes: no scores are kept, and windows cost what whole sequences do.
    """
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention


class LatentAttention(MLASelfAttention):
    """MLASelfAttention whose spec is the last word.

    Upstream resolves norms and projections anew from the configuration (`QKNormConfigResolver`): a projection that is
    not the backend's own class would silently become the backend's, and a query projection without a low rank would get
    a norm that no model here has."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _RESOLVED}

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Upstream pads values to the width of queries, which Transformer Engine needs and PackedAttention does not."""
        if isinstance(self.core_attention, PackedAttention):
            return self.core_attention(query, key, value, *args, **kwargs)
        return super()._run_core_attention(query, key, value, *args, **kwargs)


def install_latent(block: Any) -> None:
    """Have the latent attention of a decoder's spec (TransformerBlockSubmodules) built with this class."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention


class DownProjection(torch.nn.Module):
    """A projection to a latent, which all ranks of TP make whole, with the parameter and the checkpoint keys of
    megatron-core's layer `whole`."""

    def __init__(self, whole: Linear):
        super().__init__()
        self.weight, self.tp_group = whole.weight, whole.tp_group

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def exchange_down_projections(attention: LatentAttention, make: Callable[[Linear], DownProjection]) -> None:
    """Put what `make` makes of megatron-core's plain layers in the place of the down projections that `attention` has.

    Upstream looks at the very classes of the down projections in a spec, so they are exchanged afterwards."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        if isinstance(layer := getattr(attention, name, None), Linear):
            setattr(attention, name, make(layer))
