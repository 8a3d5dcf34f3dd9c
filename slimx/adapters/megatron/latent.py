"""megatron-core's latent attention (MLA), built of the parts that its spec names. Written for megatron-core 0.19.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.adapters.megatron.attention import PackedAttention

_RESOLVED = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


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


def install(block: Any) -> None:
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
