"""Flags of slime, and flags of Ray's commands that slime's scripts use."""

from __future__ import annotations

from slimx.extras.foreign.meaning import (
    ALGORITHMS,
    EPOCHS,
    KL_KINDS,
    KL_ON,
    OFFLOADED,
    PACKED,
    RANKS,
    Meaning,
    Table,
    choice,
    computed,
    flag,
    not_needed,
    settings,
    table,
    unsupported,
)

_HOOK = "slimx has no adapter for this hook of slime"
_NO_DEBUG = unsupported("slimx saves rollouts (track.rollouts), and rollout.replay trains on them again")
_RAY = not_needed("slimx starts Ray; for a running cluster set cluster.ray_address")

SLIME: Table = table(
    {
        # Model, files and checkpoints.
        "hf_checkpoint": "model.path",
        "ref_load": not_needed("the reference has the initial weights (algorithm.reference: true)"),
        "load": computed(
            "trainer.load", "a Megatron-LM directory of initial weights; a run resumes from its checkpoints in run.dir"
        ),
        "save": "run.dir",
        "save_interval": "checkpoint.every",
        "save_hf": flag("checkpoint.export_hf", "true"),
        "no_save_optim": unsupported(
            "checkpoints include the optimizer's state; checkpoint.load_optimizer: false ignores it"
        ),
        "no_load_optim": flag("checkpoint.load_optimizer", "false"),
        "reset_optimizer_states": unsupported("optimizer states are kept for the whole run"),
        "critic_load": "critic.load",
        "critic_lr": "critic.optimizer.lr",
        "critic_lr_warmup_iters": "critic.optimizer.warmup_steps",
        "model_name": not_needed("config.json in model.path names the architecture"),
        "spec": not_needed(
            "config.json in model.path names the architecture; model.family is for one that slimx does not support"
        ),
        "custom_model_provider_path": computed("model.family", "a module in slimx's format (docs/models.md)"),
        "lora_rank lora_alpha": computed("trainer.lora", "{rank: R, alpha: A}"),
        "target_modules": computed("trainer.lora.targets", "a list of attention, mlp, shared_experts, experts, router"),
        "lora_dropout": choice("", {"0 0.0": not_needed("adapters have no dropout")}),
        "only_train_params_name_list": unsupported("trainer.freeze lists the parameters that are not trained"),
        "freeze_params_name_list": computed("trainer.freeze", "a list of globs instead of regular expressions"),
        "megatron_to_hf_mode": not_needed("slimx converts with built-in tables"),
        "train_backend": not_needed("trainers use megatron-core"),
        # Prompts.
        "prompt_data": "rollout.prompts",
        "input_key": "rollout.fields.prompt",
        "label_key": "rollout.fields.answer",
        "metadata_key": computed("rollout.fields.metadata", "a list of columns"),
        "multimodal_keys": computed("rollout.fields.images", "the column; set trainer.vision"),
        "tool_key": "rollout.fields.tools",
        "apply_chat_template": not_needed("the chat template is always applied to messages, and never to token_ids"),
        "apply_chat_template_kwargs chat_template_kwargs": "rollout.template",
        "system_prompt": "rollout.system",
        "rollout_shuffle": not_needed("prompts are always shuffled with run.seed; rollout.source sets another order"),
        "disable_rollout_global_dataset": computed("rollout.source", "the dotted path of source(prompts, seed)"),
        "data_source_path": computed("rollout.source", f"source(prompts, seed); {_HOOK}"),
        "rollout_seed seed": "run.seed",
        # Rollouts.
        "rollout_batch_size": "rollout.prompts_per_step",
        "n_samples_per_prompt": "rollout.group_size",
        "num_rollout": "schedule.steps",
        "num_epoch": EPOCHS,
        "start_rollout_id": not_needed("a run resumes at the step of its newest checkpoint"),
        "num_steps_per_rollout": "schedule.updates_per_step",
        "rollout_max_response_len": "rollout.sampling.max_new_tokens",
        "rollout_max_prompt_len eval_max_prompt_len": "rollout.max_prompt_tokens",
        "rollout_max_context_len": unsupported(
            "rollout.max_prompt_tokens limits prompts, rollout.sampling.max_new_tokens turns"
        ),
        "rollout_temperature": "rollout.sampling.temperature",
        "rollout_top_p": "rollout.sampling.top_p",
        "rollout_top_k": "rollout.sampling.top_k",
        "rollout_stop": computed("rollout.sampling.stop_token_ids", "token ids; stop strings are not supported"),
        "rollout_stop_token_ids": computed("rollout.sampling.stop_token_ids", "a list, such as [1, 2]"),
        "rollout_skip_special_tokens": not_needed(
            "token ids are trained as sampled; texts for rewards have no special tokens"
        ),
        "over_sampling_batch_size": computed(
            "rollout.over_sampling", "this batch size divided by rollout.prompts_per_step"
        ),
        "partial_rollout": "rollout.partial",
        "mask_offpolicy_in_partial_rollout": "algorithm.mask_stale_tokens",
        "dynamic_sampling_filter_path": Meaning("rollout.filter", prefix="slime:"),
        "custom_generate_function_path": Meaning("rollout.generate", prefix="slime:"),
        "rollout_function_path": unsupported(
            "rollout.generate creates single rollouts; the loop that calls it is part of slimx"
        ),
        "eval_function_path": unsupported("evaluation uses rollout.generate"),
        (
            "rollout_sample_hook_path rollout_all_samples_process_path rollout_data_postprocess_path "
            "custom_convert_samples_to_train_data_path"
        ): unsupported(_HOOK),
        "rollout_sample_filter_path": unsupported(f"rollout.filter keeps or drops whole groups; {_HOOK}"),
        "buffer_filter_path": unsupported("groups are trained on in the order of their prompts (schedule.window)"),
        "use_fault_tolerance": not_needed("lost engines are always restarted (rollout.health)"),
        "rollout_health_check_interval": "rollout.health.interval",
        "rollout_health_check_timeout": "rollout.health.timeout",
        "rollout_external_engine_addrs": computed("rollout.engines.*.urls", "a list of URLs"),
        # Engines.
        "rollout_num_gpus": computed("rollout.engines.*.count", "the number of engines, each with `tensor` GPUs"),
        "rollout_num_gpus_per_engine": "rollout.engines.*.tensor",
        "sglang_server_concurrency": "rollout.concurrency",
        "sglang_ep_size": "rollout.engines.*.expert",
        "sglang_dp_size": "rollout.engines.*.dp_attention",
        "sglang_enable_dp_attention": not_needed("rollout.engines[].dp_attention above 1 turns DP-attention on"),
        "sglang_config": computed("rollout.engines", "a group for each of the file's engines"),
        "sglang_router_*": not_needed("slimx starts a router for each group of engines"),
        "use_slime_router": not_needed("slimx starts SGLang's router for each group of engines"),
        "sglang_*": Meaning("rollout.engines.*.sglang.{}"),
        # Rewards.
        "rm_type": settings(reward__function="slime:slime.rollout.rm_hub.async_rm", reward__options="{rm_type: VALUE}"),
        "rm_url": computed("reward.options", "for the reward `remote`: {url: VALUE}"),
        "reward_key eval_reward_key": unsupported(
            "if a reward is a dict, the sum of its entries is used, and each entry is logged"
        ),
        "group_rm": flag("reward.scope", "group"),
        "custom_rm_path": Meaning("reward.function", prefix="slime:"),
        "custom_reward_post_process_path custom_advantage_function_path": computed(
            "algorithm.advantages", f"advantages(groups); {_HOOK}"
        ),
        "loss_mask_type": not_needed("demonstrations train on the tokens of the answer"),
        "custom_config_path": unsupported("arguments of hooks are set in rollout.options and reward.options"),
        # Algorithm.
        "advantage_estimator": Meaning("algorithm.name", ALGORITHMS),
        "loss_type": choice(
            "algorithm.name",
            {
                "sft_loss": "sft",
                "policy_loss": not_needed("algorithm.name selects the loss of a policy"),
                "custom_loss": computed("algorithm.loss", "the dotted path of loss(inputs)"),
            },
        ),
        "custom_loss_function_path": computed("algorithm.loss", f"the dotted path of loss(inputs); {_HOOK}"),
        "custom_pg_loss_reducer_function_path": computed("algorithm.aggregation", f"one of its values; {_HOOK}"),
        "custom_tis_function_path": computed("algorithm.correction", f"one of its kinds; {_HOOK}"),
        "entropy_coef": "algorithm.entropy_coef",
        "disable_compute_advantages_and_returns": not_needed("algorithm.name: sft uses no advantages"),
        "calculate_per_token_loss": flag("algorithm.aggregation", "token"),
        "eps_clip": "algorithm.loss.low",
        "eps_clip_high": "algorithm.loss.high",
        "eps_clip_c": "algorithm.loss.dual",
        "kl_coef": "algorithm.kl_reward_coef",
        "use_kl_loss": KL_ON,
        "kl_loss_coef": "algorithm.kl_coef",
        "kl_loss_type": Meaning("algorithm.kl_estimator", KL_KINDS),
        "use_unbiased_kl": "algorithm.kl_unbiased",
        "ref_update_interval": "algorithm.reference_refresh",
        "lambd": "algorithm.advantages.lam",
        "normalize_advantages": "algorithm.advantages.whiten",
        "disable_grpo_std_normalization": flag("algorithm.advantages.normalize_std", "false"),
        "disable_rewards_normalization": computed("algorithm.advantages", "reinforce, which does not compare rewards"),
        "num_critic_only_steps": "critic.warmup_steps",
        "use_rollout_logprobs": flag("algorithm.old_logprobs", "rollout"),
        "use_tis": settings(algorithm__old_logprobs="recompute", algorithm__correction="{kind: truncate, high: 2.0}"),
        "tis_clip": "algorithm.correction.high",
        "tis_clip_low": "algorithm.correction.low",
        "use_opsm": flag("algorithm.opsm_delta", "1e-4"),
        "use_opd": not_needed("algorithm.teacher_coef above 0 turns distillation on"),
        "opd_type": computed("algorithm.teacher", "for megatron; for sglang, set algorithm.teacher_engine"),
        "opd_kl_coef": "algorithm.teacher_coef",
        "opd_teacher_load": "algorithm.teacher",
        "use_rollout_entropy": not_needed("the metric policy/entropy is always computed"),
        "get_mismatch_metrics": not_needed("the metrics mismatch/... are always computed"),
        "use_rollout_routing_replay": flag("trainer.moe.routing_replay", "R3"),
        "use_routing_replay": flag("trainer.moe.routing_replay", "R2"),
        "enable_mtp_training": computed("trainer.megatron", "{mtp_num_layers: 1}"),
        # Placement.
        "actor_num_nodes actor_num_gpus_per_node": RANKS,
        "num_gpus_per_node": "cluster.gpus_per_node",
        "colocate": "schedule.colocate",
        "offload offload_train offload_rollout": OFFLOADED,
        "no_offload_train": flag("trainer.offload", "false"),
        "no_offload_rollout": unsupported("with schedule.colocate engines always release their memory"),
        "prefill_num_servers": computed("rollout.engines", "a group with role: prefill and a group with role: decode"),
        "allgather_cp": not_needed("trainer.context divides sequences as each kind of attention needs"),
        "data_pad_size_multiplier log_probs_max_tokens_per_gpu use_dynamic_batch_size balance_data": PACKED,
        "max_tokens_per_gpu": "trainer.max_tokens_per_microbatch",
        "log_probs_chunk_size": "trainer.logprob_chunk_tokens",
        "balance_by_flops": flag("trainer.balance", "flops"),
        "update_weight_buffer_size": computed("publish.bucket_mib", "in MiB instead of bytes"),
        "update_weights_interval": unsupported("every step publishes weights"),
        "update_weight_mode": unsupported("publish.delta sends only changed elements"),
        "update_weight_transport": choice("publish.transport", {"nccl": "nixl", "disk": "disk"}),
        "update_weight_disk_dir": "publish.directory",
        "update_weight_local_checkpoint_dir": not_needed("engines read the files of publish.directory"),
        "update_weight_delta_*": not_needed(
            "publish.delta sends a mask and the changed elements, and compares digests"
        ),
        "check_weight_update_equal": not_needed("every publication is compared tensor by tensor"),
        # Evaluation.
        "eval_interval": "eval.every",
        "eval_prompt_data": computed("eval.prompts", "a file, or {NAME: FILE}"),
        "eval_config": computed("eval.prompts", "{NAME: {path: FILE, samples: N, ...}, ...}"),
        "eval_input_key": "eval.fields.prompt",
        "eval_label_key": "eval.fields.answer",
        "eval_tool_key": "eval.fields.tools",
        "eval_temperature": "eval.temperature",
        "eval_top_p": "eval.top_p",
        "eval_top_k": unsupported("evaluation supports only eval.top_p"),
        "eval_max_response_len": "eval.max_new_tokens",
        "n_samples_per_eval_prompt": "eval.samples",
        "skip_eval_before_train": unsupported("a run with eval.prompts always evaluates before the first step"),
        "log_passrate": not_needed("the metric eval/pass@k is always computed"),
        # Trackers and debugging.
        "use_wandb": "track.wandb",
        "wandb_project": "track.project",
        "wandb_group": unsupported("runs in Weights & Biases are named run.name and have no group"),
        "wandb_mode": not_needed("set WANDB_MODE=offline in the environment"),
        "wandb_key": not_needed("set WANDB_API_KEY in the environment"),
        "wandb_host": not_needed("set WANDB_BASE_URL in the environment"),
        "wandb_team": not_needed("set WANDB_ENTITY in the environment"),
        "wandb_dir tb_project_name": not_needed("the files are in run.dir"),
        "wandb_run_id": not_needed("a resumed run continues its run in Weights & Biases"),
        "disable_wandb_random_suffix": not_needed("run.name is the name in Weights & Biases"),
        "use_tensorboard": "track.tensorboard",
        "tb_experiment_name": "run.name",
        "debug_rollout_only": unsupported("`slimx generate FILE` generates without training"),
        "debug_train_only": computed("rollout.replay", "the directory of the run whose saved rollouts are trained on"),
        "save_debug_rollout_data save_debug_train_data dump_details": _NO_DEBUG,
        "load_debug_rollout_data": computed("rollout.replay", "the directory of a slimx run"),
        # Ray.
        "address head num_gpus node_ip_address disable_usage_stats dashboard_host dashboard_port force": _RAY,
        "runtime_env_json": not_needed("workers inherit the environment of `slimx train`"),
    }
)
