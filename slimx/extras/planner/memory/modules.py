"""Parts of a layer by the names that recomputation and offloading know them by: bytes, and products done again."""

from __future__ import annotations

from dataclasses import dataclass

from slimx.config.sections.trainer import Trainer
from slimx.extras.planner.memory.activations import LayerBytes
from slimx.models.families import ModelSpec
from slimx.models.flops import layer_products

LEAST = 2**20
"""Elements of the smallest tensor that megatron-core moves, unless `min_offloaded_tensor_size` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of one part of a layer that wait on the host."""

    freed: float
    """Bytes that its layer no longer keeps on the device."""
    copied: float
    """Bytes copied out, and back in; more than `freed` where something else keeps the same tensor."""


def recomputed(layer: LayerBytes) -> dict[str, float]:
    """Bytes of a layer that selective recomputation of each module does not keep."""
    moe = layer.dispatched > 0
    return {
        "core_attn": layer.core,
        # A norm in front of a projection is one module with it and cannot be dropped alone.
        "layernorm": layer.mlp_input if moe else 0.0,
        "mla_up_proj": layer.up_projected,
        "moe_act": layer.activated if moe else 0.0,
        "shared_experts": layer.shared,
        "moe": layer.router + layer.dispatched + layer.inner + layer.activated + layer.shared if moe else 0.0,
        "mlp": 0.0 if moe else layer.inner + layer.activated,
    }


def offloaded(layer: LayerBytes, trainer: Trainer) -> dict[str, Moved]:
    """Bytes of a layer that offloading of each module moves: none of a part whose largest tensor is too small.

    A part's saved tensors go, not its inputs alone: the attention's output and row statistics with queries, keys and
    values, of which the values stay on the device as well, as a view of the projections' output; with the experts'
    first product what plain torch's activation keeps of its steps, though not its result."""
    moe = layer.dispatched > 0
    attention = layer.operands + layer.core
    act = layer.inner + layer.activated - layer.inner / 2 if moe else 0.0
    parts = {
        "core_attn": Moved(freed=attention, copied=attention + layer.values + layer.context if attention else 0.0),
        "attn_proj": Moved(freed=layer.context, copied=layer.context),
        "expert_fc1": Moved(freed=layer.dispatched, copied=layer.dispatched),
        "moe_act": Moved(freed=act, copied=act),
    }
    largest = {"core_attn": layer.context, "attn_proj": layer.context}
    largest |= {"expert_fc1": layer.dispatched, "moe_act": layer.inner}
    least = trainer.megatron.get("min_offloaded_tensor_size", LEAST) * layer.itemsize
    return {name: moved if largest[name] >= least else Moved(freed=0.0, copied=0.0) for name, moved in parts.items()}


def left_out(layer: LayerBytes, trainer: Trainer) -> float:
    """Bytes of a layer that are not kept on the device: they are computed again, or wait on the host."""
    if trainer.offload_activations:
        moved = offloaded(layer, trainer)
        return sum(moved[module].freed for module in {*trainer.offload_activations})
    again = {*trainer.recompute.modules} if trainer.recompute.granularity == "selective" else set()
    dropped = recomputed(layer)
    return sum(dropped[module] for module in (again - {"moe_act", "shared_experts"} if "moe" in again else again))


def copied(layer: LayerBytes, trainer: Trainer) -> float:
    """Bytes of a layer and micro-batch that are copied to the host."""
    moved = offloaded(layer, trainer)
    return sum(moved[module].copied for module in {*trainer.offload_activations})


def recomputed_share(spec: ModelSpec, length: int, trainer: Trainer) -> float:
    """FLOPs that are done again, as a share of those of forward and backward pass without recomputation."""
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
        within = {"shared_experts"} if "moe" in recompute.modules else set()
        again = sum(products.get(module, 0.0) for module in {*recompute.modules} - within)
    return again / (3 * forward)
