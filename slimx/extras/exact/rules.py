"""Configuration rules of `numerics.mode: exact`: what exact mode requires of the other sections, the model and the
machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimx.config.rule import Problems, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.eval import Eval
from slimx.config.sections.general import Numerics, Schedule
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.extras.exact.mode import tensor_sizes, tree_leaves

if TYPE_CHECKING:
    from slimx.models.families import ModelSpec

SERVER_ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dtype",
    "model_impl",
    "kv_cache_dtype",
    "quantization",
    "speculative_algorithm",
    "enable_lora",
    "lora_paths",
    "enable_torch_compile",
    "enable_fp32_lm_head",
    "rl_on_policy_target",
    "json_model_override_args",
    "ep_num_redundant_experts",
    "enable_eplb",
    "enforce_shared_experts_fusion",
    "moe_a2a_backend",
)
"""Arguments of SGLang servers that exact mode refuses, because they would change an engine's results."""
MEGATRON_FIELDS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
    "overlap_p2p_comm",
    "overlap_p2p_comm_warmup_flush",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "use_ring_exchange_p2p",
    "pipeline_model_parallel_comm_backend",
    "deallocate_pipeline_outputs",
    "distribute_saved_activations",
    "gradient_accumulation_fusion",
    "perform_initialization",
    "init_method_std",
    "embedding_init_method_std",
    "moe_per_layer_logging",
    "deterministic_mode",
    "config_logger_dir",
)
"""megatron-core configuration fields that do not change the trainer's forward results: layer placement, communication
and saved tensors. The tuple contains allowed rather than refused fields, because each version of megatron-core adds
fields that change the results."""


FAMILIES = (
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures whose log-probs have been shown to be bitwise equal in trainer and engines (docs/support.md)."""
ON_GPUS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures with which exact mode may run on GPUs. A review of their code in SGLang found that exact mode disables
all special kernels that this code uses on GPUs."""
IN_BLOCKS = ("DeepseekV3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures in `FAMILIES` whose log-probs have been shown to be bitwise equal in trainer and engines even with
block-fp8 weights."""


MODE = "numerics.mode=exact"


@rule("exact.leaves", "numerics.leaves")
def leaves_divide(numerics: Numerics, trainer: Trainer, rollout: Rollout, eval: Eval) -> Problems:
    if not numerics.exact:
        if numerics.leaves is not None:
            yield (
                f"numerics.leaves={numerics.leaves} has an effect only with {MODE}, but numerics.mode is "
                f"{numerics.mode}; remove numerics.leaves"
            )
        return
    leaves = tree_leaves(numerics, trainer, rollout, eval)
    if leaves & (leaves - 1):
        yield (
            f"row-parallel sums would have {leaves} leaves, which is not a power of two; set numerics.leaves to a "
            "power of two"
        )
    for name, size in tensor_sizes(trainer, rollout, eval).items():
        if leaves % size:
            yield (
                f"{name} is {size}, which does not divide {leaves}, the number of leaves of row-parallel sums; set all "
                "tensor-parallel sizes to powers of two, and numerics.leaves to the largest of these sizes"
            )


@rule("exact.attention", "trainer.attention")
def exact_attention(numerics: Numerics, trainer: Trainer) -> Problems:
    if numerics.exact and trainer.attention in ("flash", "fused"):
        yield (
            f"{MODE} requires slimx's exact attention, but trainer.attention is {trainer.attention}; set "
            "trainer.attention=auto"
        )


@rule("exact.replay", "trainer.moe.routing_replay")
def same_experts(numerics: Numerics, trainer: Trainer) -> Problems:
    if numerics.exact and trainer.moe.routing_replay != "none":
        yield (
            f"with {MODE}, trainer and engines choose the same experts, so "
            f"trainer.moe.routing_replay={trainer.moe.routing_replay} is unnecessary; set "
            "trainer.moe.routing_replay=none"
        )


@rule("exact.dispatcher", "trainer.moe.dispatcher")
def dispatched(numerics: Numerics, trainer: Trainer) -> Problems:
    if numerics.exact and trainer.moe.dispatcher != "alltoall":
        yield (
            f"{MODE} does not support trainer.moe.dispatcher={trainer.moe.dispatcher}; set "
            "trainer.moe.dispatcher=alltoall"
        )


@rule("exact.megatron", "trainer.megatron")
def computes_the_same(numerics: Numerics, trainer: Trainer) -> Problems:
    if not numerics.exact:
        return
    field = next((name for name in trainer.megatron if name not in MEGATRON_FIELDS), None)
    if field is not None:
        about = f"trainer.megatron.{field}"
        yield about, f"{about} may change the trainer's results, so {MODE} does not support the field; remove {about}"


@rule("exact.recompute", "trainer.recompute.modules")
def kept_activations(numerics: Numerics, trainer: Trainer) -> Problems:
    recompute = trainer.recompute
    if numerics.exact and recompute.granularity == "selective" and "moe_act" in recompute.modules:
        yield (
            f"{MODE} does not support recomputation of the experts' activations, but trainer.recompute.modules "
            "contains moe_act; remove moe_act from trainer.recompute.modules"
        )


@rule("exact.sampling", "rollout.sampling")
def whole_vocabulary(numerics: Numerics, rollout: Rollout) -> Problems:
    sampling = rollout.sampling
    if numerics.exact and (sampling.top_p < 1 or sampling.top_k != -1):
        yield (
            f"{MODE} requires sampling from the full vocabulary, but rollout.sampling.top_p is {sampling.top_p:g} and "
            f"rollout.sampling.top_k is {sampling.top_k}; set rollout.sampling.top_p=1 and rollout.sampling.top_k=-1"
        )


@rule("exact.gap_probe", "rollout.gap_probe")
def probed(numerics: Numerics, rollout: Rollout, served: ServedEngines, schedule: Schedule) -> Problems:
    if numerics.exact and schedule.max_staleness and rollout.gap_probe == 0 and served.policy:
        yield (
            f"with {MODE} and schedule.max_staleness={schedule.max_staleness}, only the gap probe can detect that "
            "log-probs of trainer and engines differ, but rollout.gap_probe is 0; set rollout.gap_probe to at least 1"
        )


@rule("exact.quantize", "publish.quantize")
def same_blocks(numerics: Numerics, served: ServedEngines, algorithm: Algorithm, publish: Publish) -> Problems:
    if not numerics.exact or publish.quantize is None:
        return
    problem = f"numerics.mode is exact and publish.quantize is {publish.quantize}"
    if not publish.in_fp8:
        yield "publish.quantize", f"{problem}, but exact mode supports only block fp8; set numerics.mode=fast"
        return
    if numerics.dtype != "bfloat16":
        yield (
            "numerics.dtype",
            f"{problem}, but numerics.dtype is {numerics.dtype}, which SGLang cannot combine with fp8 weights; set "
            "numerics.dtype=bfloat16",
        )
    if publish.encoding == "hf":
        yield (
            "publish.encoding",
            f"{problem}, but engines on the CPU load codes and scales only in their own layout; set "
            "publish.encoding=local",
        )
    if algorithm.teacher is not None:
        yield (
            "algorithm.teacher",
            f"{problem}, but the trainer would round the weights of algorithm.teacher, too; serve the teacher in a "
            "frozen group of rollout.engines and set algorithm.teacher_engine to the group's name instead",
        )
    for group in served.policy:
        if group.model is None and not group.urls:
            yield (
                f"{group.key}.model",
                f"{problem}, but {group.where} serves model.path, which is not quantized; set the group's model to "
                "the output directory of `slimx convert hf-to-fp8`",
            )


@rule("exact.critic", "critic")
def no_critic(numerics: Numerics, critic: Critic | None) -> Problems:
    if numerics.exact and critic is not None:
        yield f"{MODE} does not support a critic, because no engine computes a critic's values; set numerics.mode=fast"


@rule("exact.engines", "rollout.engines")
def serve_the_same(numerics: Numerics, served: ServedEngines) -> Problems:
    if not numerics.exact:
        return
    for group in served.policy:
        for key in ("pipeline", "dp_attention"):
            if getattr(group, key) > 1:
                yield (
                    f"{group.key}.{key}",
                    f"{MODE} supports only tensor and expert parallelism in engines, but {group.where} has "
                    f"{key}={getattr(group, key)}; set {key}=1",
                )
        if group.role != "regular":
            yield (
                f"{group.key}.role",
                f"{MODE} supports only role=regular, but {group.where} has role={group.role}; set role=regular",
            )
        argument = next((name for name in SERVER_ARGUMENTS if group.sglang.get(name)), None)
        if argument is not None:
            yield (
                f"{group.key}.sglang.{argument}",
                f"{group.where} sets sglang.{argument}, which {MODE} does not support, because the argument would "
                "change the engine's results; remove the argument",
            )


@rule("exact.quantize_device", "publish.quantize")
def rounds_here(numerics: Numerics, publish: Publish, local_device: str) -> Problems:
    if numerics.exact and publish.quantize is not None and local_device != "cpu":
        yield (
            f"{MODE} supports publish.quantize={publish.quantize} only on the CPU, but the device is {local_device}; "
            "set publish.quantize=null or numerics.mode=fast"
        )


@rule("exact.kernels", "numerics.mode")
def has_kernels(numerics: Numerics, local_device: str) -> Problems:
    if numerics.exact and local_device == "cuda":
        # Not at module level: it imports torch, which planning does not need.
        from slimx.extras.exact.operations.forward import kernel_cuda

        # Raises SlimxError without the library, because plain torch operations would take minutes per token.
        kernel_cuda.load(kernel_cuda.ordered.LIBRARY)
    yield from ()


@rule("exact.architecture", "model.path")
def covers_model(numerics: Numerics, spec: ModelSpec) -> Problems:
    if numerics.exact and spec.family.ARCHITECTURE not in FAMILIES:
        yield _uncovered(spec, FAMILIES, "cpu")


@rule("exact.architecture_cuda", "model.path")
def covers_model_here(numerics: Numerics, spec: ModelSpec, local_device: str) -> Problems:
    if numerics.exact and local_device == "cuda" and spec.family.ARCHITECTURE in {*FAMILIES} - {*ON_GPUS}:
        yield _uncovered(spec, ON_GPUS, "cuda")


def _uncovered(spec: ModelSpec, covered: tuple[str, ...], device: str) -> str:
    return (
        f"on {device}, {MODE} supports only {', '.join(covered)}, but {spec.path} is a {spec.family.ARCHITECTURE}; set "
        "numerics.mode=fast"
    )


@rule("exact.leaves_width", "numerics.leaves")
def cuts_evenly(numerics: Numerics, trainer: Trainer, rollout: Rollout, eval: Eval, spec: ModelSpec) -> Problems:
    if not numerics.exact:
        return
    leaves = tree_leaves(numerics, trainer, rollout, eval)
    for name, width in _row_parallel_widths(spec.transformer).items():
        if width % leaves:
            yield (
                f"the {width} inputs of {name} in {spec.path} cannot be divided into {leaves} leaves of equal size; "
                f"set numerics.leaves and all tensor-parallel sizes to powers of two that divide {width}"
            )


@rule("exact.quantize_architecture", "publish.quantize")
def rounds_model(numerics: Numerics, publish: Publish, spec: ModelSpec) -> Problems:
    if numerics.exact and publish.quantize is not None and spec.family.ARCHITECTURE not in IN_BLOCKS:
        yield (
            f"{MODE} supports publish.quantize only for {', '.join(IN_BLOCKS)}, but {spec.path} is a "
            f"{spec.family.ARCHITECTURE}; set publish.quantize=null"
        )


@rule("exact.blocks", "publish.quantize")
def serves_blocks(numerics: Numerics, publish: Publish, served: ServedEngines, spec: ModelSpec) -> Problems:
    if not numerics.exact or publish.quantize is None:
        return
    # Not at module level, because they import torch, which planning does not need.
    from slimx.extras.low_precision.block_fp8 import block_of
    from slimx.layout.number_formats import published_format
    from slimx.reshard.kernels import cpu as kernel

    quantization = published_format(publish.quantize).quantization(publish.quantize)
    if quantization is None:  # refused by the rule exact.quantize
        return
    if quantization.rule == "triton":
        kernel.triton_scales(kernel.TRITON_SCALES)  # raises SlimxError without the table, which only a GPU can compute
    for group in served.policy:
        if group.model is None:  # an external server; its tensors are compared before a publication
            continue
        try:
            block = block_of(Path(group.model))
        except SlimxError:
            block = None
        if block != quantization.block:
            height, width = quantization.block
            present = "no fp8 blocks" if block is None else f"blocks of {block[0]} x {block[1]}"
            yield (
                f"publish.quantize={publish.quantize} uses fp8 blocks of {height} x {width}, but {group.model}, the "
                f"model of {group.where}, has {present}; convert the unquantized model with `slimx convert hf-to-fp8`, "
                "and set the group's model to the output directory"
            )


def _row_parallel_widths(fields: dict[str, Any]) -> dict[str, int]:
    """Returns the number of elements over which each row-parallel linear layer of a model sums, keyed by a description
    of the layer. `fields`: fields of megatron-core's TransformerConfig."""
    experts = fields.get("moe_ffn_hidden_size")
    # In latent attention, the heads of values have a width of their own.
    head_width = fields.get("v_head_dim") or fields["kv_channels"]
    widths = {"attention's output projection": fields["num_attention_heads"] * head_width}
    if not experts or 0 in fields.get("moe_layer_freq", ()):
        widths["the down projection"] = fields["ffn_hidden_size"]
    widths["the experts' down projection"] = experts
    widths["the shared experts' down projection"] = fields.get("moe_shared_expert_intermediate_size")
    return {name: width for name, width in widths.items() if width}
