"""What `numerics.mode: exact` asks of the other sections, as far as the configuration alone can tell."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.algorithm import Algorithm
from slimx.config.engines import Engines
from slimx.config.rollout import Rollout
from slimx.config.run import Numerics
from slimx.config.schedule import Publish, Schedule
from slimx.config.trainer import Trainer

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
"""Of SGLang's arguments, those that would change what an engine computes."""
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
"""Of megatron-core's fields, those that leave what the trainer computes forward as it is: where layers are, how they
talk, what is kept. Named are these and not the others, of which every version of megatron-core has more."""


def tree_leaves(numerics: Numerics, trainer: Trainer, rollout: Rollout) -> int:
    """Leaves of the binary tree of row-parallel sums: as given, or the largest tensor parallel size that takes part."""
    return numerics.leaves or max(_tensor_sizes(trainer, rollout).values())


def _tensor_sizes(trainer: Trainer, rollout: Rollout) -> dict[str, int]:
    sizes = {"trainer.tensor": trainer.tensor, "trainer.expert_tensor": trainer.expert_tensor_size}
    # Of a replay too, which starts no engines: its sums are those of the run that sampled.
    engines = (group for group in rollout.engines if not group.frozen)
    return sizes | {f"tensor of rollout.engines group {group.name}": group.tensor for group in engines}


def exact_problems(
    numerics: Numerics, trainer: Trainer, rollout: Rollout, algorithm: Algorithm, schedule: Schedule, publish: Publish
) -> Iterator[str]:
    """What exact mode cannot do, a sentence each."""
    mode, leaves = "numerics.mode is exact", tree_leaves(numerics, trainer, rollout)
    if leaves & (leaves - 1):
        yield f"numerics.leaves is {leaves}, which makes no binary tree; set a power of two"
    for name, size in _tensor_sizes(trainer, rollout).items():
        if leaves % size:
            yield f"{name} {size} does not divide the {leaves} leaves of numerics.leaves; set it to a common multiple"
    if trainer.attention in ("flash", "fused"):
        yield f"{mode}, which has an attention of its own: set trainer.attention=auto"
    if trainer.moe.replay != "none":
        yield f"{mode}, where both sides choose the same experts: set trainer.moe.replay=none"
    if trainer.moe.dispatcher != "alltoall":
        yield f"{mode}, whose experts meet their tokens by trainer.moe.dispatcher=alltoall; set it"
    if field := next((name for name in trainer.megatron if name not in MEGATRON_FIELDS), None):
        yield f"{mode}, and trainer.megatron.{field} may change what the trainer computes; leave it out"
    if trainer.recompute.granularity == "selective" and "moe_act" in trainer.recompute.modules:
        yield f"{mode}, whose experts keep their activations: leave moe_act out of trainer.recompute.modules"
    sampling = rollout.sampling
    if sampling.top_p < 1 or sampling.top_k != -1:
        yield (
            f"{mode}, whose log-probs are over the whole vocabulary: set rollout.sampling.top_p=1 and "
            "rollout.sampling.top_k=-1"
        )
    if schedule.max_staleness and rollout.gap_probe == 0 and rollout.policy_engines:
        yield (
            f"{mode} and schedule.max_staleness is {schedule.max_staleness}, where only the probe can see a gap, and "
            "rollout.gap_probe is 0; set it to 1 at least"
        )
    if publish.quantise is not None:
        yield from _block_problems(numerics, rollout, algorithm, publish, mode)
    for group in rollout.policy_engines:
        yield from _engine_problems(group, mode)


def _block_problems(
    numerics: Numerics, rollout: Rollout, algorithm: Algorithm, publish: Publish, mode: str
) -> Iterator[str]:
    """What exact mode cannot do with weights in blocks of fp8."""
    given = f"{mode}, publish.quantise is {publish.quantise}"
    if numerics.dtype != "bfloat16":
        yield f"{given}, and SGLang has fp8 weights beside bfloat16 only: set numerics.dtype=bfloat16"
    if publish.encoding == "hf":
        yield f"{given}, and the CPU's engines take codes and scales as they hold them: set publish.encoding=local"
    if algorithm.teacher is not None:
        yield (
            f"{given}, and the trainer would round the weights of algorithm.teacher as well; "
            "serve it in a frozen group of rollout.engines and set algorithm.teacher_engine to the group's name instead"
        )
    for group in rollout.policy_engines:
        if group.model is None and not group.urls:
            yield (
                f"{given}, and rollout.engines group {group.name} serves model.path itself: set its model to the "
                "directory that `slimx convert hf-to-fp8` makes of it"
            )


def _engine_problems(group: Engines, mode: str) -> Iterator[str]:
    where = f"rollout.engines group {group.name}"
    for key in ("pipeline", "dp_attention"):
        if getattr(group, key) > 1:
            yield f"{mode}, which engines have for tensor and expert parallelism only: set {key}=1 in {where}"
    if group.role != "regular":
        yield f"{mode}, and {where} has the role {group.role}; set role=regular"
    if argument := next((name for name in SERVER_ARGUMENTS if group.sglang.get(name)), None):
        yield f"{mode}, and {where} sets sglang.{argument}, which would change what the engine computes; leave it out"
