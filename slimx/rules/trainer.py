"""Rules about the trainers: device, optimizer, data-parallel communication, activations and routing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.run import Cluster, Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Muon, Trainer

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec


@rule("cluster.no_gpu", "cluster.device")
def has_gpu(cluster: Cluster, local_device: str) -> Problems:
    if cluster.device == "cuda" and cluster.ray_address is None and not _has_gpu():
        yield "this machine has no GPU; set it to cpu"


def _has_gpu() -> bool:
    import pynvml  # torch, which takes longer, may not have been imported yet

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False


@rule("muon.unused", "trainer.optimizer.muon")
def has_effect(trainer: Trainer) -> Problems:
    if trainer.optimizer.kind == "adam" and trainer.optimizer.muon != Muon():
        yield "trainer.optimizer.kind is adam; set that to muon, or leave it out"


@rule("muon.distributed", "trainer.distributed_optimizer")
def whole_matrices(trainer: Trainer) -> Problems:
    if trainer.optimizer.kind == "muon" and trainer.distributed_optimizer:
        yield "it shards matrices, which Muon (trainer.optimizer.kind) has to orthogonalise as a whole; set it to false"


@rule("muon.package", "trainer.optimizer.kind")
def has_muon(trainer: Trainer, local_device: str) -> Problems:
    if trainer.optimizer.kind == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        yield (
            "the package emerging-optimizers, which has megatron-core's Muon, is not installed; pip install "
            "slimx[muon], or set it to adam"
        )


@rule("param_gather.effect", "trainer.overlap_param_gather")
def gathered_during_a_pass(trainer: Trainer, schedule: Schedule, algorithm: Algorithm) -> Problems:
    if not trainer.overlap_param_gather:
        return
    if not trainer.distributed_optimizer:
        yield "without trainer.distributed_optimizer every rank updates all weights; leave it out"
    if schedule.updates_per_step == 1 or algorithm.scores:
        consumer = "a reward model scores pairs" if algorithm.scores else "with schedule.updates_per_step=1 a step ends"
        yield f"{consumer} after every update and needs all weights at once; leave it out"


@rule("grad_reduce.dtype", "trainer.grad_reduce_in_fp32")
def has_short_gradients(trainer: Trainer, numerics: Numerics) -> Problems:
    if not trainer.grad_reduce_in_fp32 and numerics.dtype == "float32":
        yield "gradients are float32 like numerics.dtype; leave it out"


@rule("activations.recompute", "trainer.recompute.granularity")
def moves_or_recomputes(trainer: Trainer) -> Problems:
    if trainer.offload_activations and trainer.recompute.granularity != "none":
        yield "it was never proven with trainer.offload_activations; set it to none, or leave the other one out"


@rule("activations.attn_proj", "trainer.offload_activations")
def moves_the_output_with_the_attention(trainer: Trainer) -> Problems:
    if "attn_proj" in trainer.offload_activations and "core_attn" not in trainer.offload_activations:
        yield "attn_proj frees no memory without core_attn, which keeps the same tensor on the device; list both"


@rule("activations.device", "trainer.offload_activations")
def has_a_device(trainer: Trainer, device: str) -> Problems:
    if trainer.offload_activations and device != "cuda":
        yield "it moves activations from a GPU to the host, but the run is on the CPU (cluster.device); leave it out"


@rule("activations.model", "trainer.offload_activations")
def has_such_modules(trainer: Trainer, spec: ModelSpec) -> Problems:
    """Refuses modules that the model does not have."""
    missing = set()
    if not spec.experts:
        missing |= {"expert_fc1", "moe", "moe_act"}
    if not spec.transformer.get("multi_latent_attention"):
        missing.add("mla_up_proj")
    if not spec.transformer.get("moe_shared_expert_intermediate_size"):
        missing.add("shared_experts")
    for offloaded in trainer.offload_activations:
        if offloaded in missing:
            yield "trainer.offload_activations", f"{spec.path} has no {offloaded}; take it out"
    if trainer.recompute.granularity == "selective":
        for recomputed in trainer.recompute.modules:
            if recomputed in missing:
                yield "trainer.recompute.modules", f"{spec.path} has no {recomputed}; take it out"


@rule("routing.moe_layers", "trainer.moe")
def has_routers(trainer: Trainer, spec: ModelSpec) -> Problems:
    for key in ("routing_replay", "aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        if getattr(trainer.moe, key) not in (0, "none") and not spec.moe_layers:
            yield f"trainer.moe.{key}", f"{spec.path} has no MoE layers; leave it at its default"


@rule("routing.selection_bias", "trainer.moe.bias_update_rate")
def has_biases(trainer: Trainer, spec: ModelSpec) -> Problems:
    biases = spec.transformer.get("moe_router_enable_expert_bias")
    if trainer.moe.bias_update_rate and spec.moe_layers and not biases:
        yield f"routers of {spec.path} have no selection biases (e_score_correction_bias); set it to 0"
