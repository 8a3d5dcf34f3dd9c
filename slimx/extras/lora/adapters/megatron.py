"""Low-rank adapters (LoRA) for frozen linear layers: output + alpha / rank * B (A input).

    column-parallel layer   A [rank, in] on every rank       B [out / size, rank] split like the weight's rows
    row-parallel layer      A [rank, in / size] split        B [out, rank] on every rank
    replicated layer        A [rank, in], B [out, rank]      (latents' projections, routers)

`size` is the tensor-parallel size, for layers of experts the expert-tensor-parallel size. Under sequence parallelism
each product with a replicated matrix reads only that rank's tokens, and the intermediate `rank` values per token are
communicated. Gradients of replicated matrices are then partial sums, which megatron-core adds (`sequence_parallel`).
Ranks that share an expert have the same tokens, and megatron-core's dispatcher adds their outputs, so for experts only
the gradients of replicated matrices are communicated.

A router multiplies by the merged weight instead, rounded as in engines, so that trainers and engines choose the same
experts. In some numerics modes all layers multiply by the merged weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from math import sqrt
from typing import Any, Protocol, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slimx.adapters.megatron.layers import serve
from slimx.config.sections.trainer import Lora
from slimx.extras.lora.merged import Merged, merged
from slimx.extras.lora.targets import adapts
from slimx.layout.parts import Part, matrix
from slimx.layout.table import Table
from slimx.numerics.norm import rms_norm, zero_centered_rms_norm


class _Marks(Protocol):
    """Protocol for type checking: attributes of parameters that megatron-core reads."""

    allreduce: bool
    sequence_parallel: bool


class _ShardedLayer(Protocol):
    """Protocol for type checking: a layer with megatron-core's method for sharded checkpoint state."""

    sharded_state_dict: Callable[..., dict[str, Any]]


class _NormLinear(Protocol):
    """Protocol for type checking: a linear layer into which the preceding norm is fused."""

    config: TransformerConfig
    layer_norm_weight: torch.Tensor


class Adapter:
    """Low-rank matrices A and B for one weight on this rank."""

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
        """Initializes B with zeros, and A with random values that depend only on `sources` and `seed` and are therefore
        the same in every layout.

        `sources`: names of the checkpoint tensors in the weight. `axis`: axis along which ranks split the weight; None
        if it is replicated. `expert`: True if the weight belongs to a routed expert."""
        self.weight = weight
        self.scale = alpha / rank
        self.axis = axis
        self.expert = expert
        self.sources = sources
        self.enabled = True
        """True if the layer adds the adapter's output; False if it computes with its weight alone."""
        if expert:
            self.group = parallel_state.get_expert_tensor_parallel_group()
        else:
            self.group = parallel_state.get_tensor_model_parallel_group()
        self.sequence = not expert and self.group.size() > 1
        """True if the layer's input or output contains only this rank's share of the tokens, because slimx uses
        sequence parallelism whenever it uses tensor parallelism."""
        rows, columns = weight.shape
        split = self.group.size() if axis == 1 else 1
        digest = sha256(f"{seed} {sources}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / sqrt(columns * split)  # kaiming_uniform_(a=sqrt(5)), as in LoRA's original implementation
        unsplit = torch.empty(rank, columns * split).uniform_(-bound, bound, generator=generator)
        local = unsplit if split == 1 else unsplit.chunk(split, dim=1)[self.group.rank()]
        a = torch.nn.Parameter(local.to(weight).contiguous())
        b = torch.nn.Parameter(weight.new_zeros(rows, rank))
        self.parameters = a, b
        """Matrices A and B of this rank."""
        self._mark()

    def merged(self) -> torch.Tensor:
        """Returns weight + scale * B A in new memory, without gradients (`slimx.extras.lora.merged`)."""
        return merged(self.weight, *self.parameters, self.scale)

    def served(self) -> torch.Tensor:
        """Returns the merged weight, differentiable with respect to A and B, or the weight alone if the adapter is
        disabled."""
        if not self.enabled:
            return self.weight
        return Merged.apply(self.weight, self._reduced(0), self._reduced(1), self.scale)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns scale * B A x for the layer's input x, split over ranks like the layer's output."""
        inner = x @ self._reduced(0).T
        if self.sequence and self.axis == 0:
            inner = gather_from_sequence_parallel_region(inner, group=self.group)
        elif self.sequence and self.axis == 1:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return self.scale * (inner @ self._reduced(1).T)

    def sharded(self, prefix: str, offsets: tuple, metadata: Any, *, gated: bool) -> dict[str, Any]:
        """Returns the sharded checkpoint state of A and B, with the keys `prefix` + lora_a and `prefix` + lora_b.

        `gated`: True if the weight's rows are those of a gate and an up projection, each split over ranks; the state's
        keys then do not depend on the number of ranks. `offsets`, `metadata`: as in megatron-core's
        `sharded_state_dict`."""
        axis = 0 if gated else self.axis
        a, b = self.parameters
        split_axes = {0: {"lora_b": 0}, 1: {"lora_a": 1}, None: {}}
        state = make_sharded_tensors_for_checkpoint(
            {"lora_a": a, "lora_b": b},
            prefix,
            split_axes[axis],
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
        """Sets the attributes of A and B that tell megatron-core over which ranks to sum their gradients, and which
        ranks' parts to count in the gradient norm."""
        for index, parameter in enumerate(self.parameters):
            replicated = (
                self.axis is None or self.axis == index
            )  # A of a column-parallel layer, B of a row-parallel one
            marks = cast(_Marks, parameter)
            if self.expert:
                # Summed over the ranks that have the expert; a matrix that several have counts once in the norm.
                marks.allreduce = cast(_Marks, self.weight).allreduce
                split = not replicated or self.group.size() == 1
                set_tensor_model_parallel_attributes(parameter, is_parallel=split, dim=1 - index, stride=1)
            elif replicated:
                marks.sequence_parallel = self.sequence
            else:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=1 - index, stride=1)

    def _reduced(self, index: int) -> torch.Tensor:
        """Returns A (`index` 0) or B (1), with its gradient summed over the ranks that share an expert if each of them
        computes only a part of the gradient."""
        parameter = self.parameters[index]
        if self.expert and self.axis == index:
            return copy_to_tensor_model_parallel_region(parameter, group=self.group)
        return parameter


def attach(
    module: torch.nn.Module, parts: Iterable[Part], table: Table, lora: Lora, *, seed: int, merging: bool = False
) -> dict[str, Adapter]:
    """Attaches adapters to those weights of `module` that `lora` targets. Returns {weight name: adapter}.

    `module`: the only model chunk of a rank, not yet wrapped for data parallelism. `parts`: the rank's weights, each
    described by the checkpoint elements that it contains. `merging`: True if all layers multiply by merged weights
    instead of adding the adapter's output."""
    shapes = table.sources()
    adapters: dict[str, Adapter] = {}
    owners: dict[str, list[Adapter]] = {}
    for part in parts:
        if not adapts(lora.targets, part.name):
            continue
        path, name = part.name.rsplit(".", 1)
        owner = module.get_submodule(path)
        expert_index = name.removeprefix("weight")
        adapter = Adapter(
            getattr(owner, name),
            lora.rank,
            lora.alpha,
            sources=" + ".join(part.sources),
            seed=seed,
            axis=_axis(part, [shapes[source] for source in part.sources]),
            expert=bool(expert_index),
        )
        adapters[part.name] = adapter
        for letter, parameter in zip("ab", adapter.parameters, strict=True):
            owner.register_parameter(f"lora_{letter}{expert_index}", parameter)
        owners.setdefault(path, []).append(adapter)
    config = cast(TransformerConfig, module.config)
    for path, layer_adapters in owners.items():
        gated = path.endswith("linear_fc1") and config.gated_linear_unit
        _join(module.get_submodule(path), layer_adapters, gated=gated, merging=merging)
    return adapters


def _axis(part: Part, sources: list[tuple[int, ...]]) -> int | None:
    """Returns the axis along which ranks split the weight that `part` describes: 0 for rows, 1 for columns; None if a
    rank has the complete weight. `sources`: shapes of the checkpoint tensors that are concatenated in the weight."""
    rows, columns = matrix(part.shape)
    if rows < sum(shape[0] for shape in sources):
        return 0
    return 1 if columns < sources[0][1] else None


def _join(owner: torch.nn.Module, adapters: list[Adapter], *, gated: bool, merging: bool) -> None:
    """Makes the layer `owner` compute with the adapters of its weights and include these adapters in its checkpoint
    state.

    `owner`: a layer of slimx or of Transformer Engine. `adapters`: one adapter, or several if the layer has experts."""
    experts = adapters[0].expert
    if merging or isinstance(owner, TopKRouter):
        for adapter in adapters:
            serve(adapter.weight, adapter.served)
    elif experts:
        owner.register_forward_hook(partial(_add_to_experts, adapters))
    else:
        owner.register_forward_hook(partial(_add, adapters[0]))
    layer = cast(_ShardedLayer, owner)
    if experts:
        layer.sharded_state_dict = partial(_sharded_experts, layer.sharded_state_dict, adapters, gated)
    elif gated or adapters[0].axis is not None:
        # The layer's own sharded_state_dict would save split matrices as if they were replicated.
        layer.sharded_state_dict = partial(_sharded, layer.sharded_state_dict, adapters[0], gated)


def _add(adapter: Adapter, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> Any:
    if not adapter.enabled:
        return output
    x = args[0]
    out, bias = output
    if hasattr(layer, "layer_norm_weight"):
        fused = cast(_NormLinear, layer)
        norm = zero_centered_rms_norm if fused.config.layernorm_zero_centered_gamma else rms_norm
        x = norm(x, fused.layer_norm_weight, fused.config.layernorm_epsilon)
    return out + adapter.apply(x), bias


def _add_to_experts(adapters: list[Adapter], layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Adds the adapters' outputs to the output of a layer of experts, as a forward hook.

    `args`: tokens sorted by expert, and the number of tokens of each expert."""
    if not adapters[0].enabled:
        return output
    x, counts = args[:2]
    out, bias = output
    parts = x.split([int(count) for count in counts])
    return out + torch.cat([adapter.apply(part) for adapter, part in zip(adapters, parts, strict=True)]), bias


def _sharded(
    layer_state: Callable[..., dict[str, Any]],
    adapter: Adapter,
    gated: bool,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: Any = None,
) -> dict[str, Any]:
    state = layer_state(prefix, sharded_offsets, metadata)
    return state | adapter.sharded(prefix, sharded_offsets, metadata, gated=gated)


def _sharded_experts(
    layer_state: Callable[..., dict[str, Any]],
    adapters: list[Adapter],
    gated: bool,
    prefix: str = "",
    sharded_offsets: tuple = (),
    metadata: Any = None,
) -> dict[str, Any]:
    """Returns the checkpoint state of a layer of experts, with its adapters.

    The adapters are stored in the same way as the layer: as one tensor with an expert axis, or as one tensor per expert
    if the metadata sets `singleton_local_shards`."""
    state = layer_state(prefix, sharded_offsets, metadata)
    group = parallel_state.get_expert_model_parallel_group()
    for index, adapter in enumerate(adapters):
        expert = group.rank() * len(adapters) + index
        experts = group.size() * len(adapters)
        if metadata.get("singleton_local_shards"):
            offsets: tuple = sharded_offsets
            key = f"{expert}.{prefix}"
        else:
            offsets = *sharded_offsets, (len(sharded_offsets), expert, experts)
            key = prefix

        shards = adapter.sharded(f"{index}.", offsets, metadata, gated=gated)
        replace_prefix_for_sharding(shards, f"{index}.", key)
        state |= {f"{prefix}{name.split('.')[1]}{index}": shard for name, shard in shards.items()}
    return state
