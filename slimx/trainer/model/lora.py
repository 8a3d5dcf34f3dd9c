"""Low-rank adapters (LoRA) beside frozen linear layers: output + alpha / rank * B (A input).

    column-parallel layer   A [rank, in] on every rank       B [out / TP, rank] split as the weight's rows
    row-parallel layer      A [rank, in / TP] split          B [out, rank] on every rank
    layer of an expert      A [rank, in], B [out, rank] on the ranks that hold the expert (no ETP)

Under sequence parallelism each product with the part that every rank has sees that rank's tokens only, and the
`rank` numbers per token in between are what crosses ranks. Gradients of the parts that every rank has are then partial
sums, which megatron-core adds up (`sequence_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
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
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.config.sections.trainer import Lora
from slimx.layout.adapters import adapts
from slimx.layout.parts import Part

Linear = ColumnParallelLinear | RowParallelLinear


class Adapter:
    """The adapter of `layer`, whose parameters `lora_a` and `lora_b` it adds."""

    def __init__(
        self,
        layer: Linear,
        rank: int,
        alpha: float,
        *,
        sources: str,
        seed: int,
        gated: bool = False,
        expert: bool = False,
    ):
        """`sources`: names of the checkpoint's tensors in the weight. With `seed` they determine A, whatever the
        layout; B is zero. `gated`: the layer's rows are those of a gate and those of an up projection. `expert`: of a
        routed expert, whose layers no rank shares."""
        self.layer, self.scale, self.gated = layer, alpha / rank, gated
        self.enabled = True
        """False: the layer computes what its weight alone says."""
        self.column = isinstance(layer, ColumnParallelLinear)
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.sequence = layer.config.sequence_parallel and not expert
        weight = layer.weight
        rows, columns = weight.shape
        split = 1 if self.column or expert else self.group.size()
        digest = sha256(f"{seed} {sources}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / sqrt(columns * split)  # as kaiming_uniform_(a=sqrt(5)), with which LoRA's authors begin
        whole = torch.empty(rank, columns * split).uniform_(-bound, bound, generator=generator)
        own = whole if split == 1 else whole.chunk(split, dim=1)[self.group.rank()]
        layer.lora_a = torch.nn.Parameter(own.to(weight).contiguous())
        layer.lora_b = torch.nn.Parameter(weight.new_zeros(rows, rank))
        self.parameters: tuple[torch.nn.Parameter, torch.nn.Parameter] = (layer.lora_a, layer.lora_b)
        """A and B of this rank."""
        if expert:
            for parameter in self.parameters:
                # Summed over the ranks that hold the expert, and counted once for each expert in the gradient norm.
                parameter.allreduce = weight.allreduce
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        else:
            whole_part, split_part = self.parameters if self.column else self.parameters[::-1]
            whole_part.sequence_parallel = self.sequence
            set_tensor_model_parallel_attributes(split_part, is_parallel=True, dim=0 if self.column else 1, stride=1)
            # The layer's own would write B of a column-parallel layer, and A of the other, as if every rank had it.
            layer.sharded_state_dict = partial(self._sharded, layer.sharded_state_dict)
        layer.register_forward_hook(self._add)

    @torch.no_grad()
    def merge(self, into: torch.Tensor) -> None:
        """Write weight + scale * B A, computed in fp32 and rounded once, `into` a tensor like the weight."""
        layer = self.layer
        into.copy_(torch.addmm(layer.weight.float(), layer.lora_b.float(), layer.lora_a.float(), alpha=self.scale))

    def _add(self, layer: Linear, args: tuple[torch.Tensor, ...], output: Any) -> Any:
        if not self.enabled:
            return output
        x = args[0]
        if hasattr(layer, "layer_norm_weight"):
            x = layer.norm(x, layer.layer_norm_weight, layer.config.layernorm_epsilon)
        inner = x @ layer.lora_a.T
        if self.sequence:
            if self.column:
                inner = gather_from_sequence_parallel_region(inner, group=self.group)
            else:
                inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        out, bias = output
        return out + self.scale * (inner @ layer.lora_b.T), bias

    def _sharded(self, of_layer: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """The layer's sharded state (`of_layer`) with the axes along which A and B are split."""
        state = of_layer(prefix, sharded_offsets, metadata)
        state |= make_sharded_tensors_for_checkpoint(
            {"lora_a": self.layer.lora_a, "lora_b": self.layer.lora_b},
            prefix,
            {"lora_b": 0} if self.column else {"lora_a": 1},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            key = f"{prefix}lora_b"
            state[key] = apply_swiglu_sharded_factory(
                state[key],
                sharded_offsets,
                metadata.get("singleton_local_shards", False),
                tp_group=self.group,
                dp_group=metadata["dp_cp_group"],
            )
        return state


def attach(module: torch.nn.Module, held: Iterable[Part], lora: Lora, *, seed: int) -> None:
    """Put adapters beside the weights of `held` in `module`, a rank's only chunk, that `lora` targets; before it is
    wrapped for data parallelism."""
    adapters: dict[str, Adapter] = {}
    for part in held:
        if not adapts(lora.targets, part.name):
            continue
        path, name = part.name.rsplit(".", 1)
        owner = module.get_submodule(path)
        number = name.removeprefix("weight")
        layer = owner.experts[int(number)] if number else owner
        adapter = Adapter(
            layer,
            lora.rank,
            lora.alpha,
            sources=" + ".join(part.sources),
            seed=seed,
            gated=path.endswith("mlp.linear_fc1") and layer.config.gated_linear_unit,
            expert=bool(number),
        )
        if number:  # an expert is no submodule
            for letter, parameter in zip("ab", adapter.parameters, strict=True):
                owner.register_parameter(f"lora_{letter}{number}", parameter)
        adapters[part.name] = adapter
    module.__dict__["adapters"] = adapters


def adapters_of(module: torch.nn.Module) -> dict[str, Adapter]:
    """Adapters that `attach` has put in a chunk, by the names of the weights that they stand beside."""
    return module.__dict__.get("adapters", {})
