"""Rules about the trainers: their device, optimizer, data-parallel communication, activations and routing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.general import Cluster, Numerics, Schedule
from slimx.config.sections.trainer import Muon, Trainer
from slimx.models.files.torch_dist import TRACKER

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec


_FP8 = "set trainer.fp8, for which layers and blocks are checked against publications"
_PRECISION = "its log-probs and publications were never compared with an engine's; set trainer.fp8, or remove it"
_SHARDS = "memory plans do not include these shards; set trainer.tensor to shard weights, and "
_SHARDS += "trainer.distributed_optimizer to shard the state of the optimizer"
_OTHER_WEIGHTS = "it builds layers whose weights checkpoints and publications do not support; remove it"
_INTERLEAVED = "it interleaves the rows of gate and up, which checkpoints and engines store in two blocks; remove it"
_DROPPED = "it drops tokens that engines process, so log-probs differ; lower trainer.max_tokens_per_microbatch instead"
_FIRST_PASS = "it takes effect from the second pass on, but slimx treats each pass as the first; list fewer parts in "
_FIRST_PASS += "trainer.offload_activations"
NOT_PASSED = {
    "tensor_model_parallel_size": "set trainer.tensor",
    "sequence_parallel": "sequence parallelism is on if trainer.tensor is above 1; set trainer.tensor",
    "pipeline_model_parallel_size": "set trainer.pipeline",
    "virtual_pipeline_model_parallel_size": "set trainer.virtual_pipeline",
    "pipeline_model_parallel_layout": "set trainer.layers_per_stage",
    "context_parallel_size": "set trainer.context",
    "expert_model_parallel_size": "set trainer.expert",
    "expert_tensor_parallel_size": "set trainer.expert_tensor",
    "params_dtype": "set numerics.dtype",
    "bf16": "set numerics.dtype",
    "fp16": "fp16 needs gradient scaling, which slimx lacks; set numerics.dtype=bfloat16",
    "attention_backend": "set trainer.attention",
    "recompute_granularity": "set trainer.recompute.granularity",
    "recompute_method": "set trainer.recompute.method",
    "recompute_num_layers": "set trainer.recompute.layers",
    "recompute_modules": "set trainer.recompute.modules",
    "moe_token_dispatcher_type": "set trainer.moe.dispatcher",
    "moe_flex_dispatcher_backend": "set trainer.moe.flex_backend",
    "moe_aux_loss_coeff": "set trainer.moe.aux_loss_coef",
    "moe_router_load_balancing_type": "set trainer.moe.aux_loss_type",
    "moe_z_loss_coeff": "set trainer.moe.z_loss_coef",
    "moe_router_bias_update_rate": "set trainer.moe.bias_update_rate",
    "moe_enable_routing_replay": "set trainer.moe.routing_replay",
    "moe_router_padding_for_fp8": "it also routes tokens to experts that engines do not choose; remove it",
    "moe_router_padding_for_quantization": "it also routes tokens to experts that engines do not choose; remove it",
    "fine_grained_activation_offloading": "set trainer.offload_activations",
    "offload_modules": "set trainer.offload_activations",
    "activation_offload_fraction": _FIRST_PASS,
    "delta_offload_bytes_across_pp_ranks": _FIRST_PASS,
    "cpu_offloading": "it offloads whole layers, which is not tested; set trainer.offload_activations",
    "moe_router_fusion": "a fused router's choice can be neither recorded nor replayed; remove it",
    "moe_router_force_biased": "it replaces the routers' choice with noise; remove it",
    "overlap_moe_expert_parallel_comm": "it splits layers, whose routers then lose track of their batch; remove it",
    "cuda_graph_impl": "a captured router would replay the first micro-batch forever; remove it",
    "enable_cuda_graph": "a captured router would replay the first micro-batch forever; remove it",
    "external_cuda_graph": "a captured router would replay the first micro-batch forever; remove it",
    "fp8": _FP8,
    "fp8_recipe": _FP8,
    "fp8_param": _PRECISION,
    "fp8_quantizer_factory": _PRECISION,
    "fp8_output_proj": _PRECISION,
    "fp8_dot_product_attention": _PRECISION,
    "fp8_multi_head_attention": _PRECISION,
    "fp4": _PRECISION,
    "fp4_param": _PRECISION,
    "fp4_quantizer_factory": _PRECISION,
    "quant_recipe": _PRECISION,
    "use_kitchen": _PRECISION,
    "use_mup": "it scales embeddings, attention and logits, which engines do not; remove it",
    "tensor_parallel_num_weight_shards": _SHARDS,
    "gtp_weight_remat_size": _SHARDS,
    "expert_tensor_parallel_num_weight_shards": _SHARDS,
    "expert_gtp_weight_remat_size": _SHARDS,
    "mtp_use_repeated_layer": "checkpoints and engines have separate weights for each prediction layer; remove it",
    "mla_down_proj_fusion": _OTHER_WEIGHTS,
    "moe_single_grouped_weight": _OTHER_WEIGHTS,
    "moe_single_grouped_bias": _OTHER_WEIGHTS,
    "use_transformer_engine_op_fuser": _OTHER_WEIGHTS,
    "use_grouped_gemm_for_shared_expert": _OTHER_WEIGHTS,
    "use_grouped_gemm_for_dense_mlp": _OTHER_WEIGHTS,
    "moe_mlp_glu_interleave_size": _INTERLEAVED,
    "moe_shared_expert_glu_interleave_size": _INTERLEAVED,
    "moe_expert_rank_capacity_factor": _DROPPED,
    "moe_paged_stash": _DROPPED,
}
"""Fields of megatron-core's TransformerConfig that `trainer.megatron` must not set, each with the remedy or the reason.
They follow from keys of slimx, concern routing, or would silently change what is computed, published or saved, such as
precision or the names and shapes of weights."""


@rule("trainer.megatron", "trainer.megatron")
def passes_through(trainer: Trainer) -> Problems:
    for key, instead in NOT_PASSED.items():
        if trainer.megatron.get(key) not in (None, False, "none"):
            about = f"trainer.megatron.{key}"
            yield about, f"{about} cannot be set: {instead}"


@rule("cluster.no_gpu", "cluster.device")
def has_gpu(cluster: Cluster, local_device: str) -> Problems:
    if cluster.device == "cuda" and cluster.ray_address is None and not _has_gpu():
        yield "cluster.device is cuda, but this machine has no GPU; set cluster.device=cpu"


def _has_gpu() -> bool:
    import pynvml  # used instead of torch, whose import is slow

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except pynvml.NVMLError:
        return False


@rule("muon.unused", "trainer.optimizer.muon")
def has_effect(trainer: Trainer) -> Problems:
    if trainer.optimizer.kind == "adam" and trainer.optimizer.muon != Muon():
        yield (
            "trainer.optimizer.muon has no effect with trainer.optimizer.kind=adam; set trainer.optimizer.kind=muon, "
            "or remove trainer.optimizer.muon"
        )


@rule("muon.distributed", "trainer.distributed_optimizer")
def whole_matrices(trainer: Trainer) -> Problems:
    if trainer.optimizer.kind == "muon" and trainer.distributed_optimizer:
        yield (
            "trainer.distributed_optimizer shards matrices, but trainer.optimizer.kind=muon has to orthogonalize whole "
            "matrices; set trainer.distributed_optimizer=false"
        )


@rule("muon.package", "trainer.optimizer.kind")
def has_muon(trainer: Trainer, local_device: str) -> Problems:
    if trainer.optimizer.kind == "muon" and importlib.util.find_spec("emerging_optimizers") is None:
        yield (
            "trainer.optimizer.kind is muon, but the package emerging-optimizers, which megatron-core's Muon needs, "
            "is not installed; run `pip install slimx[muon]`, or set trainer.optimizer.kind=adam"
        )


@rule("param_gather.effect", "trainer.overlap_param_gather")
def gathered_during_a_pass(trainer: Trainer, schedule: Schedule, algorithm: Algorithm) -> Problems:
    if not trainer.overlap_param_gather:
        return
    if not trainer.distributed_optimizer:
        yield (
            "trainer.overlap_param_gather has no effect with trainer.distributed_optimizer=false, where every rank "
            "updates all weights; remove trainer.overlap_param_gather"
        )
    if schedule.updates_per_step == 1 or algorithm.scores:
        consumer = "evaluation of a reward model" if algorithm.scores else "publication (schedule.updates_per_step=1)"
        yield (
            f"trainer.overlap_param_gather has no effect, because the {consumer} after every update needs all weights "
            "at once; remove trainer.overlap_param_gather"
        )


@rule("grad_reduce.dtype", "trainer.grad_reduce_in_fp32")
def has_short_gradients(trainer: Trainer, numerics: Numerics) -> Problems:
    if not trainer.grad_reduce_in_fp32 and numerics.dtype == "float32":
        yield (
            "trainer.grad_reduce_in_fp32=false has no effect, because gradients are float32 with "
            "numerics.dtype=float32; remove trainer.grad_reduce_in_fp32"
        )


@rule("activations.recompute", "trainer.recompute.granularity")
def moves_or_recomputes(trainer: Trainer) -> Problems:
    if trainer.offload_activations and trainer.recompute.granularity != "none":
        yield (
            f"trainer.recompute.granularity={trainer.recompute.granularity} was never tested together with "
            "trainer.offload_activations; set trainer.recompute.granularity=none, or remove "
            "trainer.offload_activations"
        )


@rule("activations.attn_proj", "trainer.offload_activations")
def moves_the_output_with_the_attention(trainer: Trainer) -> Problems:
    if "attn_proj" in trainer.offload_activations and "core_attn" not in trainer.offload_activations:
        yield (
            "trainer.offload_activations contains attn_proj, which frees no memory without core_attn, because "
            "core_attn keeps the same tensor on the GPU; add core_attn to the list"
        )


@rule("activations.device", "trainer.offload_activations")
def has_a_device(trainer: Trainer, device: str) -> Problems:
    if trainer.offload_activations and device != "cuda":
        yield (
            "trainer.offload_activations moves activations from a GPU to the host, but this run is on CPUs "
            "(cluster.device); remove trainer.offload_activations"
        )


@rule("activations.model", "trainer.offload_activations")
def has_such_modules(trainer: Trainer, spec: ModelSpec) -> Problems:
    """Rejects offloading or recomputation of modules that the model does not have."""
    missing = set()
    if not spec.experts:
        missing |= {"expert_fc1", "moe", "moe_act"}
    if not spec.transformer.get("multi_latent_attention"):
        missing.add("mla_up_proj")
    if not spec.transformer.get("moe_shared_expert_intermediate_size"):
        missing.add("shared_experts")
    for offloaded in trainer.offload_activations:
        if offloaded in missing:
            yield (
                "trainer.offload_activations",
                f"trainer.offload_activations contains {offloaded}, which {spec.path} lacks; remove it",
            )
    if trainer.recompute.granularity == "selective":
        for recomputed in trainer.recompute.modules:
            if recomputed in missing:
                yield (
                    "trainer.recompute.modules",
                    f"trainer.recompute.modules contains {recomputed}, which {spec.path} lacks; remove it",
                )


@rule("routing.moe_layers", "trainer.moe")
def has_routers(trainer: Trainer, spec: ModelSpec) -> Problems:
    for key in ("routing_replay", "aux_loss_coef", "z_loss_coef", "bias_update_rate"):
        if getattr(trainer.moe, key) not in (0, "none") and not spec.moe_layers:
            yield f"trainer.moe.{key}", f"trainer.moe.{key} is set, but {spec.path} has no MoE layers; remove it"


@rule("routing.selection_bias", "trainer.moe.bias_update_rate")
def has_biases(trainer: Trainer, spec: ModelSpec) -> Problems:
    biases = spec.transformer.get("moe_router_enable_expert_bias")
    if trainer.moe.bias_update_rate and spec.moe_layers and not biases:
        yield (
            f"trainer.moe.bias_update_rate is {trainer.moe.bias_update_rate:g}, but routers of {spec.path} have no "
            "selection biases (e_score_correction_bias); set trainer.moe.bias_update_rate=0"
        )


@rule("weights.run", "trainer.load")
def starts_from_weights(trainer: Trainer, local_device: str) -> Problems:
    """Rejects the directory of a run, and names that of its checkpoints, whose newest one is loaded. `local_device` is
    unused, but excludes the rule from `slimx plan`, which needs no weights."""
    if trainer.load is not None and (Path(trainer.load) / "checkpoints" / TRACKER).is_file():
        yield f"trainer.load: {trainer.load} is the directory of a run; set trainer.load={trainer.load}/checkpoints"
