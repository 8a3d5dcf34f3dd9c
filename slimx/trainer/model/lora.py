"""Low-rank adapters (LoRA) beside frozen linear layers: output + alpha / rank * B (A input).

    column-parallel layer   A [rank, in] on every rank       B [out / TP, rank] split as the weight's rows
    row-parallel layer      A [rank, in / TP] split          B [out, rank] on every rank

Under sequence parallelism each product with the part that every rank has sees that rank's tokens only, and the
`rank` numbers per token in between are what crosses ranks. Gradients of the parts that every rank has are then partial
sums, which megatron-core adds up (`sequence_parallel`). No configuration builds adapters yet.
"""

from __future__ import annotations

from hashlib import sha256
from math import sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

Linear = ColumnParallelLinear | RowParallelLinear


class Adapter:
    """The adapter of `layer`, whose parameters `lora_a` and `lora_b` it adds."""

    def __init__(self, layer: Linear, rank: int, alpha: float, *, sources: str, seed: int):
        """`sources`: names of the checkpoint's tensors in the weight. With `seed` they determine A, whatever the
        layout; B is zero."""
        self.layer, self.scale = layer, alpha / rank
        self.column = isinstance(layer, ColumnParallelLinear)
        self.group = parallel_state.get_tensor_model_parallel_group()
        weight = layer.weight
        rows, columns = weight.shape
        split = 1 if self.column else self.group.size()
        digest = sha256(f"{seed} {sources}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / sqrt(columns * split)  # as kaiming_uniform_(a=sqrt(5)), with which LoRA's authors begin
        whole = torch.empty(rank, columns * split).uniform_(-bound, bound, generator=generator)
        own = whole if self.column else whole.chunk(split, dim=1)[self.group.rank()]
        layer.lora_a = torch.nn.Parameter(own.to(weight).contiguous())
        layer.lora_b = torch.nn.Parameter(weight.new_zeros(rows, rank))
        whole_part, split_part = (layer.lora_a, layer.lora_b) if self.column else (layer.lora_b, layer.lora_a)
        whole_part.sequence_parallel = layer.config.sequence_parallel
        set_tensor_model_parallel_attributes(split_part, is_parallel=True, dim=0 if self.column else 1, stride=1)
        layer.register_forward_hook(self._add)

    @torch.no_grad()
    def merge(self, into: torch.Tensor) -> None:
        """Write weight + scale * B A, computed in fp32 and rounded once, `into` a tensor like the weight."""
        layer = self.layer
        into.copy_(torch.addmm(layer.weight.float(), layer.lora_b.float(), layer.lora_a.float(), alpha=self.scale))

    def _add(self, layer: Linear, args: tuple[torch.Tensor, ...], output: Any) -> Any:
        x = args[0]
        if hasattr(layer, "layer_norm_weight"):
            x = layer.norm(x, layer.layer_norm_weight, layer.config.layernorm_epsilon)
        inner = x @ layer.lora_a.T
        if layer.config.sequence_parallel:
            if self.column:
                inner = gather_from_sequence_parallel_region(inner, group=self.group)
            else:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        out, bias = output
        return out + self.scale * (inner @ layer.lora_b.T), bias
