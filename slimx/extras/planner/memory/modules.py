"""Bytes and FLOPs of a layer's modules, by the names that recomputation and offloading use in megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.activations import LayerBytes
from slimx.models.families import ModelSpec
from slimx.models.flops import layer_products

LEAST = 2**20
"""Minimum number of elements of a tensor that megatron-core offloads, unless `min_offloaded_tensor_size` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedBytes:
    """Bytes that are moved to the host by offloading one part of a layer."""

    freed: float
    """Bytes that the layer no longer keeps on the GPU because of offloading."""
    copied: float
    """Bytes copied to the host and back; more than `freed` if something else keeps the same tensor on the GPU."""


def recomputed(layer: LayerBytes) -> dict[str, float]:
    """Returns the number of bytes that selective recomputation saves in a layer, by module."""
    nbytes = {
        "core_attn": layer.core,
        "layernorm": 0.0,  # a norm before a linear layer is fused with it and cannot be recomputed separately
        "mla_up_proj": layer.up_projected,
        "moe_act": 0.0,
        "shared_experts": layer.shared,
        "moe": 0.0,
        "mlp": 0.0,
    }
    if layer.dispatched > 0:
        nbytes["layernorm"] = layer.mlp_input
        nbytes["moe_act"] = layer.activated
        nbytes["moe"] = layer.router + layer.dispatched + layer.inner + layer.activated + layer.shared
    else:
        nbytes["mlp"] = layer.inner + layer.activated
    return nbytes


def offloaded(layer: LayerBytes, trainer: Trainer) -> dict[str, OffloadedBytes]:
    """Returns the number of bytes that offloading moves to the host, by part of the layer; 0 for a part whose largest
    tensor is too small.

    All saved tensors of a part are offloaded, not just its inputs. With the attention's output and row statistics these
    include queries, keys and values (the values also stay on the GPU, as a view of the projections' output). With the
    experts' first linear layer they include the intermediate tensors of plain torch's activation function, but not its
    result."""
    act = 0.0
    if layer.dispatched > 0:
        act = layer.inner + layer.activated - layer.inner / 2
    attention = layer.operands + layer.core
    copied_attention = 0.0
    if attention:
        copied_attention = attention + layer.values + layer.context
    parts = {
        "core_attn": OffloadedBytes(freed=attention, copied=copied_attention),
        "attn_proj": OffloadedBytes(freed=layer.context, copied=layer.context),
        "expert_fc1": OffloadedBytes(freed=layer.dispatched, copied=layer.dispatched),
        "moe_act": OffloadedBytes(freed=act, copied=act),
    }
    largest = {
        "core_attn": layer.context,
        "attn_proj": layer.context,
        "expert_fc1": layer.dispatched,
        "moe_act": layer.inner,
    }
    least = trainer.megatron.get("min_offloaded_tensor_size", LEAST) * layer.itemsize
    for name, size in largest.items():
        if size < least:
            parts[name] = OffloadedBytes(freed=0.0, copied=0.0)
    return parts


def left_out(layer: LayerBytes, trainer: Trainer) -> float:
    """Returns the number of bytes of a layer's activations that do not stay on the GPU because they are recomputed or
    offloaded."""
    if trainer.offload_activations:
        moved = offloaded(layer, trainer)
        return sum(moved[module].freed for module in {*trainer.offload_activations})
    if trainer.recompute.granularity != "selective":
        return 0.0
    modules = {*trainer.recompute.modules}
    if "moe" in modules:
        modules -= {"moe_act", "shared_experts"}
    nbytes = recomputed(layer)
    return sum(nbytes[module] for module in modules)


def copied(layer: LayerBytes, trainer: Trainer) -> float:
    """Returns the number of bytes that one layer copies to the host per micro-batch."""
    moved = offloaded(layer, trainer)
    return sum(moved[module].copied for module in {*trainer.offload_activations})


def recomputed_share(spec: ModelSpec, length: int, trainer: Trainer) -> float:
    """Returns the FLOPs of recomputation as a fraction of the FLOPs of forward and backward pass without recomputation.
    `length`: sequence length in tokens."""
    recompute = trainer.recompute
    if recompute.granularity == "none":
        return 0.0
    products = layer_products(spec.transformer, spec.vocab_size, length, spec.layer_kind)
    forward = sum(products.values())
    if recompute.granularity == "full":
        covered = 1.0
        if recompute.method == "block":
            stages = trainer.pipeline * trainer.virtual_pipeline
            covered = min(1.0, recompute.layers * stages / spec.transformer["num_layers"])
        again = (forward - products["head"]) * covered
    else:
        modules = {*recompute.modules}
        if "moe" in modules:
            modules -= {"shared_experts"}
        again = sum(products.get(module, 0.0) for module in modules)
    return again / (3 * forward)
