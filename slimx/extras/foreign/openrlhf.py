"""Flags of OpenRLHF (train_ppo_ray): the dotted ones, introduced in version 0.9, and their older names."""

from __future__ import annotations

from slimx.extras.foreign.meaning import (
    ALGORITHMS,
    EPOCHS,
    KL_KINDS,
    KL_ON,
    MEMORY,
    OF_ENGINES,
    OFFLOADED,
    PACKED,
    PER_UPDATE,
    RANKS,
    REFERENCE_LAYOUT,
    Meaning,
    Table,
    computed,
    flag,
    not_needed,
    settings,
    table,
    unsupported,
)

_ZERO = not_needed("trainers use megatron-core; set trainer.tensor, pipeline, expert and distributed_optimizer")
_CORRECTION = settings(algorithm__old_logprobs="recompute", algorithm__correction="{kind: truncate}")
OPENRLHF: Table = table(
    {
        "actor.model_name_or_path pretrain": "model.path",
        "critic.model_name_or_path critic_pretrain": "critic.load",
        "data.prompt_dataset prompt_data": "rollout.prompts",
        "data.input_key": "rollout.fields.prompt",
        "data.label_key": "rollout.fields.answer",
        "data.apply_chat_template": not_needed("the chat template is always applied to messages"),
        "data.max_samples": unsupported("all prompts of the file are used"),
        "data.max_len": computed(
            "rollout.sampling.max_new_tokens", "the difference between this limit and rollout.max_prompt_tokens"
        ),
        "prompt_max_len": "rollout.max_prompt_tokens",
        "rollout.max_new_tokens generate_max_len": "rollout.sampling.max_new_tokens",
        "rollout.batch_size": computed("rollout.prompts_per_step", "number of prompts, as in OpenRLHF"),
        "rollout.n_samples_per_prompt": "rollout.group_size",
        "rollout.micro_batch_size micro_rollout_batch_size train.micro_batch_size micro_train_batch_size": PACKED,
        "ds.packing_samples packing_samples train.dynamic_batch_enable": PACKED,
        "train.max_tokens_per_gpu train_max_tokens_per_gpu": "trainer.max_tokens_per_microbatch",
        "train.batch_size train_batch_size": PER_UPDATE,
        "train.max_epochs max_epochs": unsupported(
            "every rollout is trained on once; schedule.updates_per_step splits a step"
        ),
        "train.num_episodes num_episodes": EPOCHS,
        "train.colocate_all colocate_all_models": "schedule.colocate",
        "train.async_enable async_train": flag("schedule.max_staleness", "1"),
        "actor.adam.lr adam.lr actor_learning_rate": "trainer.optimizer.lr",
        "critic.adam.lr critic_learning_rate": "critic.optimizer.lr",
        "actor.gradient_checkpointing_enable": flag("trainer.recompute.granularity", "full"),
        "actor.num_nodes actor.num_gpus_per_node actor_num_gpus_per_node": RANKS,
        "ref.num_nodes ref.num_gpus_per_node ref_num_nodes ref_num_gpus_per_node": REFERENCE_LAYOUT,
        "critic.num_nodes critic.num_gpus_per_node": computed("critic.layout", "the parallel sizes of the critic"),
        "vllm.num_engines vllm_num_engines": "rollout.engines.*.count",
        "vllm.tensor_parallel_size": "rollout.engines.*.tensor",
        "vllm.gpu_memory_utilization": MEMORY,
        "vllm.enable_sleep ds.enable_sleep deepspeed_enable_sleep": OFFLOADED,
        "vllm.sync_backend vllm_sync_backend": computed("publish.transport", "auto selects a suitable transport"),
        "vllm.enforce_eager": flag("rollout.engines.*.sglang.disable_cuda_graph", "true"),
        "vllm.*": OF_ENGINES,
        "algo.kl.init_coef init_kl_coef": computed(
            "algorithm.kl_coef", "set algorithm.kl_reward_coef instead if use_kl_loss is not set"
        ),
        "algo.kl.use_loss": KL_ON,
        "algo.kl.estimator kl_estimator": Meaning("algorithm.kl_estimator", KL_KINDS),
        "algo.advantage.estimator": Meaning("algorithm.name", ALGORITHMS),
        "algo.advantage.gamma": "algorithm.advantages.gamma",
        "algo.advantage.is_correction_enable enable_vllm_is_correction": _CORRECTION,
        "algo.dynamic_filtering_enable dynamic_filtering": flag("rollout.filter", "examples.varied.keep"),
        "algo.dynamic_filtering_range dynamic_filtering_reward_range": computed(
            "rollout.filter", "the dotted path of keep(group)"
        ),
        "reward.model_name_or_path reward_pretrain": computed(
            "rollout.engines", "a frozen group with the reward model, which a reward hook calls by name"
        ),
        "reward.remote_url remote_rm_url": computed(
            "reward.options", "for the reward `remote`: {url: VALUE}; set reward.function for a Python file"
        ),
        "reward.normalize_enable normalize_reward": "algorithm.advantages.whiten",
        "ckpt.output_dir save_path ckpt.path ckpt_path": "run.dir",
        "ckpt.save_steps": "checkpoint.every",
        "ckpt.save_hf save_hf_ckpt": flag("checkpoint.export_hf", "true"),
        "ckpt.load_enable load_checkpoint": not_needed("the same command resumes from the newest checkpoint"),
        "logger.logging_steps": not_needed("every step is logged"),
        "eval.steps": "eval.every",
        "ds.param_dtype": computed("numerics.dtype", "bfloat16 or float32"),
        "ds.attn_implementation": computed("trainer.attention", "auto, flash, fused or unfused"),
        "ds.zero_stage zero_stage ds.*": _ZERO,
    }
)
