"""Rules about what `numerics.mode: exact` asks of the other sections, as far as the configuration alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.rule import Told, rule
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.run import Numerics
from slimx.config.sections.schedule import Schedule
from slimx.config.sections.trainer import Trainer

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
"""SGLang's arguments that would change what an engine computes."""
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
"""Megatron-core's fields that leave what the trainer computes forward as it is: where layers are, how they
talk, what is kept. Named are these and not the others, of which every version of megatron-core has more."""


MODE = "numerics.mode is exact"


def tree_leaves(numerics: Numerics, trainer: Trainer, rollout: Rollout) -> int:
    """Leaves of the binary tree of row-parallel sums: as given, or the largest tensor parallel size that takes part."""
    return numerics.leaves or max(_tensor_sizes(trainer, rollout).values())


def _tensor_sizes(trainer: Trainer, rollout: Rollout) -> dict[str, int]:
    sizes = {"trainer.tensor": trainer.tensor, "trainer.expert_tensor": trainer.expert_tensor_size}
    # Of a replay too, which starts no engines: its sums are those of the run that sampled.
    engines = (group for group in rollout.engines if not group.frozen)
    return sizes | {f"tensor of {group.where}": group.tensor for group in engines}


@rule("exact.leaves", about="numerics.leaves")
def leaves_divide(numerics: Numerics, trainer: Trainer, rollout: Rollout) -> Iterator[str]:
    if not numerics.exact:
        if numerics.leaves is not None:
            yield "numerics.leaves cuts sums in numerics.mode exact, and the mode is fast; leave it out"
        return
    leaves = tree_leaves(numerics, trainer, rollout)
    if leaves & (leaves - 1):
        yield f"numerics.leaves is {leaves}, which makes no binary tree; set a power of two"
    for name, size in _tensor_sizes(trainer, rollout).items():
        if leaves % size:
            yield f"{name} {size} does not divide the {leaves} leaves of numerics.leaves; set it to a common multiple"


@rule("exact.attention", about="trainer.attention")
def own_attention(numerics: Numerics, trainer: Trainer) -> Iterator[str]:
    if numerics.exact and trainer.attention in ("flash", "fused"):
        yield f"{MODE}, which has an attention of its own: set trainer.attention=auto"


@rule("exact.replay", about="trainer.moe.routing_replay")
def same_experts(numerics: Numerics, trainer: Trainer) -> Iterator[str]:
    if numerics.exact and trainer.moe.routing_replay != "none":
        yield f"{MODE}, where both sides choose the same experts: set trainer.moe.routing_replay=none"


@rule("exact.dispatcher", about="trainer.moe.dispatcher")
def dispatched(numerics: Numerics, trainer: Trainer) -> Iterator[str]:
    if numerics.exact and trainer.moe.dispatcher != "alltoall":
        yield f"{MODE}, whose experts meet their tokens by trainer.moe.dispatcher=alltoall; set it"


@rule("exact.megatron", about="trainer.megatron")
def computes_the_same(numerics: Numerics, trainer: Trainer) -> Iterator[Told]:
    field = next((name for name in trainer.megatron if name not in MEGATRON_FIELDS), None)
    if numerics.exact and field is not None:
        about = f"trainer.megatron.{field}"
        yield about, f"{MODE}, and {about} may change what the trainer computes; leave it out"


@rule("exact.recompute", about="trainer.recompute.modules")
def kept_activations(numerics: Numerics, trainer: Trainer) -> Iterator[str]:
    recompute = trainer.recompute
    if numerics.exact and recompute.granularity == "selective" and "moe_act" in recompute.modules:
        yield f"{MODE}, whose experts keep their activations: leave moe_act out of trainer.recompute.modules"


@rule("exact.sampling", about="rollout.sampling")
def whole_vocabulary(numerics: Numerics, rollout: Rollout) -> Iterator[str]:
    if numerics.exact and (rollout.sampling.top_p < 1 or rollout.sampling.top_k != -1):
        yield (
            f"{MODE}, whose log-probs are over the whole vocabulary: set rollout.sampling.top_p=1 and "
            "rollout.sampling.top_k=-1"
        )


@rule("exact.gap_probe", about="rollout.gap_probe")
def probed(numerics: Numerics, rollout: Rollout, schedule: Schedule) -> Iterator[str]:
    if numerics.exact and schedule.max_staleness and rollout.gap_probe == 0 and rollout.policy_engines:
        yield (
            f"{MODE} and schedule.max_staleness is {schedule.max_staleness}, where only the probe can see a gap, and "
            "rollout.gap_probe is 0; set it to 1 at least"
        )


@rule("exact.quantise", about="publish.quantise")
def same_blocks(numerics: Numerics, rollout: Rollout, algorithm: Algorithm, publish: Publish) -> Iterator[Told]:
    if not numerics.exact or publish.quantise is None:
        return
    given = f"{MODE}, publish.quantise is {publish.quantise}"
    if not publish.in_fp8:
        yield "publish.quantise", f"{given}, and both sides compute with fp8 blocks alone: set numerics.mode=fast"
        return
    if numerics.dtype != "bfloat16":
        yield "numerics.dtype", f"{given}, and SGLang has fp8 weights beside bfloat16 only: set numerics.dtype=bfloat16"
    if publish.encoding == "hf":
        told = "and the CPU's engines take codes and scales as they hold them: set publish.encoding=local"
        yield "publish.encoding", f"{given}, {told}"
    if algorithm.teacher is not None:
        yield (
            "algorithm.teacher",
            f"{given}, and the trainer would round the weights of algorithm.teacher as well; "
            "serve it in a frozen group of rollout.engines and set algorithm.teacher_engine to the group's name "
            "instead",
        )
    for group in rollout.policy_engines:
        if group.model is None and not group.urls:
            yield (
                "rollout.engines.model",
                f"{given}, and {group.where} serves model.path itself: set its model to the directory that `slimx "
                "convert hf-to-fp8` makes of it",
            )


@rule("exact.critic", about="critic")
def no_critic(numerics: Numerics, critic: Critic | None) -> Iterator[str]:
    if numerics.exact and critic is not None:
        yield f"{MODE}, and a critic has no engine to agree with; set numerics.mode=fast"


@rule("exact.engines", about="rollout.engines")
def serve_the_same(numerics: Numerics, rollout: Rollout) -> Iterator[Told]:
    for group in rollout.policy_engines if numerics.exact else ():
        for key in ("pipeline", "dp_attention"):
            if getattr(group, key) > 1:
                told = f"which engines have for tensor and expert parallelism only: set {key}=1 in {group.where}"
                yield f"rollout.engines.{key}", f"{MODE}, {told}"
        if group.role != "regular":
            yield "rollout.engines.role", f"{MODE}, and {group.where} has the role {group.role}; set role=regular"
        if argument := next((name for name in SERVER_ARGUMENTS if group.sglang.get(name)), None):
            yield (
                f"rollout.engines.sglang.{argument}",
                f"{MODE}, and {group.where} sets sglang.{argument}, which would change what the engine computes; leave "
                "it out",
            )
