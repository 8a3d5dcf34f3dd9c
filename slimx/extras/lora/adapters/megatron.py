"""Low-rank adapters (LoRA) beside frozen linear layers: output + alpha / rank * B (A input).

    column-parallel layer   A [rank, in] on every rank       B [out / size, rank] split as the weight's rows
    row-parallel layer      A [rank, in / size] split        B [out, rank] on every rank
    layer on every rank     A [rank, in], B [out, rank]      (latents' projections, routers)

`size` is that of tensor parallelism, for an expert's layer that of expert tensor parallelism. Under sequence
parallelism each product with the part that every rank has sees that rank's tokens only, and the `rank` numbers per
token in between are what crosses ranks. Gradients of the parts that every rank has are then partial sums, which
megatron-core adds up (`sequence_parallel`). The ranks that share an expert see the same tokens, and its dispatcher adds
their outputs, so nothing crosses there but these gradients.

A router multiplies by the merged weight instead, rounded as engines get it: both sides then choose the same experts.
The layers of some modes of numerics do so, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from math import sqrt
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.adapters.megatron.layers import serve
from slimx.config.sections.trainer import Lora
from slimx.extras.lora.merged import Merged, merged
from slimx.extras.lora.targets import adapts
from slimx.layout.parts import Part, matrix
from slimx.layout.table import Table
from slimx.numerics.norm import rms_norm, zero_centred_rms_norm


class Adapter:
    """A and B beside one weight of this rank."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        rank: int,
        alpha: float,
        *,
        sources: str,
        seed: int,
        axis: int | None,
        expert: bool = False,
    ):
        """`sources`: names of the checkpoint's tensors in the weight. With `seed` they determine A, whatever the
        layout; B is zero. `axis`: along which ranks share the weight; None: each has the whole. `expert`: the weight is
        a routed expert's."""
        self.weight, self.scale, self.axis, self.expert = weight, alpha / rank, axis, expert
        self.sources = sources
        self.enabled = True
        """False: the layer computes what its weight alone says."""
        tensor = parallel_state.get_tensor_model_parallel_group
        self.group = parallel_state.get_expert_tensor_parallel_group() if expert else tensor()
        self.sequence = not expert and self.group.size() > 1
        """The layer's input, or its output, is of this rank's tokens (with TP there is sequence parallelism)."""
        rows, columns = weight.shape
        split = self.group.size() if axis == 1 else 1
        digest = sha256(f"{seed} {sources}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / sqrt(columns * split)  # as kaiming_uniform_(a=sqrt(5)), with which LoRA's authors begin
        whole = torch.empty(rank, columns * split).uniform_(-bound, bound, generator=generator)
        own = whole if split == 1 else whole.chunk(split, dim=1)[self.group.rank()]
        a = torch.nn.Parameter(own.to(weight).contiguous())
        self.parameters: tuple[torch.nn.Parameter, torch.nn.Parameter] = (
            a,
            torch.nn.Parameter(weight.new_zeros(rows, rank)),
        )
        """A and B of this rank."""
        self._mark()

    def merged(self) -> torch.Tensor:
        """Weight + scale * B A in memory of its own (`slimx.extras.lora.merged`)."""
        return merged(self.weight, *self.parameters, self.scale)

    def served(self) -> torch.Tensor:
        """The same with gradients for A and B, or the weight alone."""
        return Merged.apply(self.weight, self._whole(0), self._whole(1), self.scale) if self.enabled else self.weight

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Scale * B A x for the input x of the layer's product, cut over ranks as the layer's output is."""
        inner = x @ self._whole(0).T
        if self.sequence and self.axis == 0:
            inner = gather_from_sequence_parallel_region(inner, group=self.group)
        elif self.sequence and self.axis == 1:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return self.scale * (inner @ self._whole(1).T)

    def sharded(self, prefix: str, offsets: tuple, metadata: Any, *, gated: bool) -> dict[str, Any]:
        """State of A and B for a checkpoint, keys `prefix` + lora_a and lora_b. `gated`: the rows are those of a gate
        and those of an up projection, each of which ranks share, if there are several: keys do not depend on that."""
        axis = 0 if gated else self.axis
        state = make_sharded_tensors_for_checkpoint(
            dict(zip(("lora_a", "lora_b"), self.parameters, strict=True)),
            prefix,
            {0: {"lora_b": 0}, 1: {"lora_a": 1}, None: {}}[axis],
            offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.expert:
            for shard in state.values():
                shard.replica_id = (*shard.replica_id[:2], parallel_state.get_expert_data_parallel_rank())
        if gated:
            key = f"{prefix}lora_b"
            singleton = metadata.get("singleton_local_shards", False)
            groups = {"tp_group": self.group, "dp_group": metadata["dp_cp_group"]}
            state[key] = apply_swiglu_sharded_factory(state[key], offsets, singleton, **groups)
        return state

    def _mark(self) -> None:
        """Tell megatron-core whose gradients to add up, and which ranks' parts count in the gradient norm."""
        for number, parameter in enumerate(self.parameters):
            shared = self.axis is None or self.axis == number  # A of a column-parallel layer, B of the other
            if self.expert:
                # Summed over the ranks that hold the expert; a part that several of them have counts on the first.
                parameter.allreduce = self.weight.allreduce
                split = not shared or self.group.size() == 1
                set_tensor_model_parallel_attributes(parameter, is_parallel=split, dim=1 - number, stride=1)
            elif shared:
                parameter.sequence_parallel = self.sequence
            else:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=1 - number, stride=1)

    def _whole(self, number: int) -> torch.Tensor:
        """A (0) or B (1); of an expert that ranks share, with a gradient that is summed over them."""
        parameter = self.parameters[number]
        if self.expert and self.axis == number:
            return copy_to_tensor_model_parallel_region(parameter, group=self.group)
        return parameter


def attach(
    module: torch.nn.Module, held: Iterable[Part], table: Table, lora: Lora, *, seed: int, merging: bool = False
) -> dict[str, Adapter]:
    """Put adapters beside the weights of `held` in `module`, a rank's only chunk, that `lora` targets, before it is
    wrapped for data parallelism; returns them by the names of these weights. `merging`: all of the layers multiply by
    merged weights."""
    shapes = table.checkpoint_shapes()
    adapters: dict[str, Adapter] = {}
    owners: dict[str, list[Adapter]] = {}
    for part in held:
        if not adapts(lora.targets, part.name):
            continue
        path, name = part.name.rsplit(".", 1)
        owner, number = module.get_submodule(path), name.removeprefix("weight")
        adapter = adapters[part.name] = Adapter(
            getattr(owner, name),
            lora.rank,
            lora.alpha,
            sources=" + ".join(part.sources),
            seed=seed,
            axis=_axis(part, [shapes[source] for source in part.sources]),
            expert=bool(number),
        )
        for letter, parameter in zip("ab", adapter.parameters, strict=True):
            owner.register_parameter(f"lora_{letter}{number}", parameter)
        owners.setdefault(path, []).append(adapter)
    for path, beside in owners.items():
        gated = path.endswith("linear_fc1") and module.config.gated_linear_unit
        _join(module.get_submodule(path), beside, gated=gated, merging=merging)
    return adapters


def _axis(part: Part, sources: list[tuple[int, ...]]) -> int | None:
    """The axis of which a rank with `part` has less than its `sources` together."""
    rows, columns = matrix(part.shape)
    if rows < sum(shape[0] for shape in sources):
        return 0
    return 1 if columns < sources[0][1] else None


def _join(owner: torch.nn.Module, beside: list[Adapter], *, gated: bool, merging: bool) -> None:
    """Have the layer `owner`, slimx's or Transformer Engine's, compute and save with the adapters of its
    weights, several if it is one of experts."""
    experts = beside[0].expert
    if merging or isinstance(owner, TopKRouter):
        for adapter in beside:
            serve(adapter.weight, adapter.served)
    elif experts:
        owner.register_forward_hook(partial(_add_to_experts, beside))
    else:
        owner.register_forward_hook(partial(_add, beside[0]))
    if experts:
        owner.sharded_state_dict = partial(_sharded_experts, owner.sharded_state_dict, beside, gated)
    elif gated or beside[0].axis is not None:
        # The layer's own would write parts of A or B as if every rank had them.
        owner.sharded_state_dict = partial(_sharded, owner.sharded_state_dict, beside[0], gated)


def _add(adapter: Adapter, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> Any:
    if not adapter.enabled:
        return output
    x, (out, bias) = args[0], output
    if hasattr(layer, "layer_norm_weight"):
        norm = zero_centred_rms_norm if layer.config.layernorm_zero_centered_gamma else rms_norm
        x = norm(x, layer.layer_norm_weight, layer.config.layernorm_epsilon)
    return out + adapter.of(x), bias


def _add_to_experts(adapters: list[Adapter], layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """`args`: tokens sorted by expert, and how many each expert has."""
    if not adapters[0].enabled:
        return output
    (x, counts), (out, bias) = args[:2], output
    parts = x.split([int(count) for count in counts])
    return out + torch.cat([adapter.of(part) for adapter, part in zip(adapters, parts, strict=True)]), bias


def _sharded(
    of_layer: Callable[..., dict[str, Any]],
    adapter: Adapter,
    gated: bool,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: Any = None,
) -> dict[str, Any]:
    state = of_layer(prefix, sharded_offsets, metadata)
    return state | adapter.sharded(prefix, sharded_offsets, metadata, gated=gated)


def _sharded_experts(
    of_layer: Callable[..., dict[str, Any]],
    adapters: list[Adapter],
    gated: bool,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: Any = None,
) -> dict[str, Any]:
    """Keys as the layer's own: one tensor with an expert axis, or (`singleton_local_shards`) one per expert."""
    state = of_layer(prefix, sharded_offsets, metadata)
    group = parallel_state.get_expert_model_parallel_group()
    for index, adapter in enumerate(adapters):
        number, of = group.rank() * len(adapters) + index, group.size() * len(adapters)
        offsets, key = (*sharded_offsets, (len(sharded_offsets), number, of)), prefix
        if metadata.get("singleton_local_shards"):
            offsets, key = sharded_offsets, f"{number}.{prefix}"
        shards = adapter.sharded(f"{index}.", offsets, metadata, gated=gated)
        replace_prefix_for_sharding(shards, f"{index}.", key)
        state |= {f"{prefix}{name.split('.')[1]}{index}": shard for name, shard in shards.items()}
    return state
