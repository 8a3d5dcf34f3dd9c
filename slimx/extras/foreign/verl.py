"""Names of dotted keys in verl's configuration (main_ppo)."""

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
    RANKS,
    REFERENCE_LAYOUT,
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
from slimx.extras.foreign.megatron import MEGATRON

_FSDP = not_needed("trainers use megatron-core; set trainer.tensor, pipeline, expert and distributed_optimizer")
_CHECKPOINTS = not_needed("slimx reads Hugging Face and Megatron-LM directories with built-in tables")
_OVERLONG = computed("reward.parts", "a part with the function `overlong` and its options limit and buffer")
_HOOK = computed("reward.function", "the dotted path of reward(ctx, trajectory)")
_REWARD_MODEL = computed("rollout.engines", "a frozen group with the reward model, which a reward hook calls by name")
_ENGINE = not_needed("trainers use megatron-core with the options of section trainer")
_SPECULATIVE = computed("rollout.engines.*.sglang", "speculative_algorithm and its options, as in SGLang")
_PROFILED = unsupported("RUN/timeline.jsonl and report.html show how long every phase takes")
_TEACHER = computed(
    "algorithm.teacher_engine", "a frozen group of rollout.engines; algorithm.teacher_kl_coef weights it"
)
_STAGES = MEGATRON["decoder_first_pipeline_num_layers"]
_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
SHORT = dict(zip(("tp", "pp", "vpp", "cp", "ep", "etp"), _SIZES, strict=True))
"""Names of these sizes by those in verl's engine Megatron Lite."""


def _below(section: str, keys: Table) -> Table:
    """Returns the table `keys` with the names prefixed by `section` and a dot."""
    return {section + "." + key: meaning for key, meaning in table(keys).items()}


VERL: Table = table(
    {
        # Data.
        "data.train_files": "rollout.prompts",
        "data.val_files": "eval.prompts",
        "data.prompt_key data.messages_key": "rollout.fields.prompt",
        "data.reward_fn_key": "rollout.fields.dataset",
        "data.image_key": "rollout.fields.images",
        "data.apply_chat_template_kwargs": "rollout.template",
        "data.train_batch_size": "rollout.prompts_per_step",
        "data.gen_batch_size": computed("rollout.over_sampling", "this batch size divided by rollout.prompts_per_step"),
        "data.val_batch_size": not_needed("evaluation sends all prompts at once (rollout.concurrency)"),
        "data.max_prompt_length data.max_length": "rollout.max_prompt_tokens",
        "data.max_response_length": "rollout.sampling.max_new_tokens",
        "data.truncation": not_needed(
            "prompts longer than rollout.max_prompt_tokens are refused before the run starts"
        ),
        "data.filter_overlong_prompts": unsupported(
            "prompts longer than rollout.max_prompt_tokens are refused before the run starts"
        ),
        "data.return_raw_chat": not_needed("hooks get the prompt's messages"),
        "data.shuffle": not_needed("prompts are always shuffled with run.seed; rollout.source sets another order"),
        "data.seed": "run.seed",
        "data.filter_overlong_prompts_workers data.dataloader_num_workers data.num_workers": not_needed(
            "prompts are read once, before the run starts"
        ),
        "data.apply_chat_template_kwargs.*": Meaning("rollout.template.{}"),
        (
            "data.pad_mode data.use_dynamic_bsz data.micro_batch_size_per_gpu "
            "actor_rollout_ref.model.use_remove_padding critic.ppo_* critic.use_dynamic_bsz trainer.balance_batch"
        ): PACKED,
        "data.max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
        "data.ignore_input_ids_mismatch": not_needed("a conversation is tokenized as a whole"),
        "data.trust_remote_code actor_rollout_ref.model.trust_remote_code": not_needed(
            "slimx never runs code from a checkpoint"
        ),
        "data.custom_cls.path": computed("rollout.map", "the dotted path of to_prompt(row)"),
        # Model and actor.
        "model_engine engine optim model actor@actor_rollout_ref.actor": _ENGINE,
        "hydra.*": not_needed("a run has one YAML file"),
        "actor_rollout_ref.nccl_timeout": computed(
            "trainer.deadline", "seconds within which a call to all ranks returns"
        ),
        "actor_rollout_ref.model.mtp.enable": not_needed("trainer.megatron.mtp_num_layers above 0 trains these layers"),
        "actor_rollout_ref.model.mtp.enable_train": computed("trainer.megatron", "{mtp_num_layers: 1}"),
        "actor_rollout_ref.model.mtp.mtp_loss_scaling_factor": MEGATRON["mtp_loss_scaling_factor"],
        "actor_rollout_ref.model.mtp.detach_encoder": unsupported(
            "the loss of multi-token prediction reaches all layers"
        ),
        "actor_rollout_ref.model.mtp.*": _SPECULATIVE,
        "actor_rollout_ref.model.lora.rank actor_rollout_ref.model.lora_rank": "trainer.lora.rank",
        "actor_rollout_ref.model.lora.alpha actor_rollout_ref.model.lora_alpha": "trainer.lora.alpha",
        "actor_rollout_ref.model.lora.lora_a_init_method": not_needed("adapters start as in PEFT"),
        "actor_rollout_ref.model.lora.*": computed("trainer.lora", "{rank: R, alpha: A, targets: [attention, mlp]}"),
        "actor_rollout_ref.hybrid_engine": not_needed("schedule.colocate lets trainers and engines share devices"),
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.use_fused_kernels": not_needed("log-probs are computed in chunks"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": flag("trainer.recompute.granularity", "full"),
        "actor_rollout_ref.model.target_modules": computed(
            "trainer.lora.targets", "a list of attention, mlp, shared_experts, experts, router"
        ),
        "actor_rollout_ref.model.use_shm": not_needed("ranks read the weights together, once"),
        "actor_rollout_ref.model.override_config.*": not_needed(
            "the model's shapes come from config.json in model.path"
        ),
        **_below(
            "actor_rollout_ref.actor",
            {
                "strategy": not_needed("trainers use megatron-core"),
                "model_engine engine.* megatron.*": _ENGINE,
                "optim.optimizer": MEGATRON["optimizer"],
                "entropy_from_logits_with_chunking entropy_checkpointing": not_needed(
                    "entropies need no copy of logits"
                ),
                "optim.lr_warmup_init": not_needed("the learning rate starts at 0"),
                "optim.lr_decay_steps": MEGATRON["lr_decay_iters"],
                "router_replay.mode megatron.router_replay.mode": Meaning(
                    "trainer.moe.routing_replay", {"disabled": "none"}
                ),
                "optim.lr": "trainer.optimizer.lr",
                "optim.min_lr": "trainer.optimizer.min_lr",
                "optim.weight_decay": "trainer.optimizer.weight_decay",
                "optim.betas": "trainer.optimizer.betas",
                "optim.min_lr_ratio": computed("trainer.optimizer.min_lr", "this ratio times trainer.optimizer.lr"),
                "optim.clip_grad grad_clip": "trainer.optimizer.clip_grad",
                "optim.lr_warmup_steps": "trainer.optimizer.warmup_steps",
                "optim.lr_warmup_steps_ratio": computed(
                    "trainer.optimizer.warmup_steps", "this fraction of schedule.steps * updates_per_step"
                ),
                "optim.lr_decay_style optim.lr_scheduler_type optim.warmup_style": MEGATRON["lr_decay_style"],
                "optim.override_optimizer_config.* megatron.override_transformer_config.*": Meaning("{}"),
                "ppo_epochs": unsupported("every rollout is trained on once; schedule.updates_per_step splits a step"),
                "ppo_mini_batch_size": computed(
                    "schedule.updates_per_step", "rollout.prompts_per_step divided by this size"
                ),
                "ppo_micro_batch_size* use_dynamic_bsz megatron.use_remove_padding": PACKED,
                "ppo_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
                "use_torch_compile": not_needed(
                    "layers are those of megatron-core, with fused kernels if they are installed"
                ),
                "use_kl_loss": KL_ON,
                "kl_loss_coef": "algorithm.kl_coef",
                "kl_loss_type": Meaning("algorithm.kl_estimator", KL_KINDS),
                "entropy_coeff": "algorithm.entropy_coef",
                "clip_ratio": computed("algorithm.loss.low", "set algorithm.loss.high too; the two bounds may differ"),
                "clip_ratio_low": "algorithm.loss.low",
                "clip_ratio_high": "algorithm.loss.high",
                "clip_ratio_c": "algorithm.loss.dual",
                "loss_agg_mode": choice(
                    "algorithm.aggregation",
                    {
                        "token-mean": "token",
                        "seq-mean-token-mean": "sample",
                        "seq-mean-token-sum": computed(
                            "algorithm.aggregation", "constant, which divides by max_new_tokens"
                        ),
                        "seq-mean-token-sum-norm": "constant",
                    },
                ),
                "tau_pos policy_loss.tau_pos": "algorithm.loss.tau_positive",
                "tau_neg policy_loss.tau_neg": "algorithm.loss.tau_negative",
                "policy_loss.clip_cov_ratio policy_loss.kl_cov_ratio": "algorithm.loss.share",
                "policy_loss.clip_cov_lb": "algorithm.loss.covariance_low",
                "policy_loss.clip_cov_ub": "algorithm.loss.covariance_high",
                "policy_loss.ppo_kl_coef": "algorithm.loss.coef",
                "policy_loss.loss_mode": choice(
                    "algorithm.name",
                    {
                        "vanilla": "grpo",
                        **{name: name for name in ("gspo", "cispo", "sapo", "gpg", "clip_cov", "kl_cov")},
                        **{name + "-cov": name + "_cov" for name in ("clip", "kl")},
                    },
                ),
                "ulysses_sequence_parallel_size": "trainer.context",
                (
                    "fsdp_config.param_offload engine.param_offload engine.grad_offload engine.optimizer_offload "
                    "megatron.param_offload megatron.grad_offload megatron.optimizer_offload"
                ): OFFLOADED,
                "fsdp_config.optimizer_offload": MEGATRON["optimizer_cpu_offload"],
                "fsdp_config.* veomni.* torchtitan.* megatron.use_megatron_fsdp": _FSDP,
                **{"megatron." + theirs: "trainer." + ours for theirs, ours in _SIZES.items()},
                **{"engine." + short: "trainer." + _SIZES[theirs] for short, theirs in SHORT.items()},
                "megatron.sequence_parallel": MEGATRON["sequence_parallel"],
                "megatron.use_mbridge megatron.use_dist_checkpointing megatron.vanilla_mbridge": _CHECKPOINTS,
                "megatron.dist_checkpointing_path": "trainer.load",
                (
                    "megatron.override_transformer_config.num_layers_in_first_pipeline_stage "
                    "megatron.override_transformer_config.num_layers_in_last_pipeline_stage "
                    "megatron.override_transformer_config.pipeline_model_parallel_layout"
                ): _STAGES,
                "megatron.dtype": choice(
                    "numerics.dtype", {"bfloat16": "bfloat16", "float32": "float32", "float16": MEGATRON["fp16"]}
                ),
                "use_rollout_log_probs": flag("algorithm.old_logprobs", "rollout"),
                "checkpoint.*": not_needed("checkpoints always include weights, optimizer and the state of the run"),
                "profiler.*": _PROFILED,
            },
        ),
        # Rollouts and engines.
        **_below(
            "actor_rollout_ref.rollout",
            {
                "name": not_needed("engines run SGLang"),
                "mode": not_needed(
                    "rollouts are always asynchronous; schedule.max_staleness bounds how far ahead they run"
                ),
                "n": "rollout.group_size",
                "temperature": "rollout.sampling.temperature",
                "top_p": "rollout.sampling.top_p",
                "top_k": "rollout.sampling.top_k",
                "prompt_length": "rollout.max_prompt_tokens",
                "response_length": "rollout.sampling.max_new_tokens",
                "dtype": not_needed("engines compute in numerics.dtype"),
                "ignore_eos": not_needed("an end-of-sequence token always ends a turn"),
                "tensor_model_parallel_size": "rollout.engines.*.tensor",
                "expert_parallel_size": "rollout.engines.*.expert",
                "pipeline_model_parallel_size": "rollout.engines.*.pipeline",
                "data_parallel_size": "rollout.engines.*.count",
                "gpu_memory_utilization": MEMORY,
                "max_num_seqs": Meaning("rollout.engines.*.sglang.max_running_requests"),
                "max_num_batched_tokens": Meaning("rollout.engines.*.sglang.chunked_prefill_size"),
                "max_model_len": Meaning("rollout.engines.*.sglang.context_length"),
                "enable_chunked_prefill": not_needed("SGLang always splits long prompts (chunked_prefill_size)"),
                "enforce_eager": flag("rollout.engines.*.sglang.disable_cuda_graph", "true"),
                "free_cache_engine": not_needed("with schedule.colocate engines always release their memory"),
                "enable_prefix_caching": not_needed("SGLang reuses common prefixes (disable_radix_cache)"),
                "skip_tokenizer_init": not_needed("engines receive and return token ids"),
                "moe_tensor_parallel_size": not_needed("SGLang divides experts over tensor / expert ranks"),
                "enable_rollout_routing_replay": not_needed("trainer.moe.routing_replay: R3 turns it on"),
                "checkpoint_engine.update_weights_bucket_megabytes": "publish.bucket_mib",
                "checkpoint_engine.*": computed("publish.transport", "auto selects a suitable transport"),
                "profiler.*": _PROFILED,
                "quantization": choice(
                    "publish.quantize",
                    {"fp8": computed("publish.quantize", "a rule, and engines with an fp8 copy as `model`")},
                ),
                "load_format": not_needed("engines receive the weights from the trainers"),
                "layered_summon": _FSDP,
                "calculate_log_probs": not_needed(
                    "engines always return log-probs, and every step measures their gap to the trainers"
                ),
                "log_prob_*": PACKED,
                "engine_kwargs.sglang.*": Meaning("rollout.engines.*.sglang.{}"),
                "engine_kwargs.*": OF_ENGINES,
                "val_kwargs.n": "eval.samples",
                "val_kwargs.temperature": "eval.temperature",
                "val_kwargs.top_p": "eval.top_p",
                "val_kwargs.top_k": unsupported("evaluation supports only eval.top_p"),
                "val_kwargs.do_sample": not_needed("eval.temperature above 0 turns on sampling"),
                "multi_turn.*": computed("rollout.generate", "the hook tools, or your own"),
                "agent.*": computed("rollout.generate", "a hook with your own loop"),
                "layer_name_map.*": not_needed("slimx maps names of weights with built-in tables"),
            },
        ),
        # Reference, critic, rewards.
        "actor_rollout_ref.ref.*": REFERENCE_LAYOUT,
        **_below(
            "critic",
            {
                **{"optim." + name: "critic.optimizer." + name for name in ("lr", "min_lr", "weight_decay", "betas")},
                "optim.clip_grad grad_clip": "critic.optimizer.clip_grad",
                "optim.lr_warmup_steps": "critic.optimizer.warmup_steps",
            },
        ),
        "critic.model.path": "critic.load",
        "critic.cliprange_value": "critic.value_clip",
        **{"critic.megatron." + theirs: "critic.layout." + ours for theirs, ours in _SIZES.items()},
        "critic.model.*": not_needed(
            "the critic has the architecture of model.path and the trainer's packing and recomputation"
        ),
        "critic.fsdp.*": _FSDP,
        "critic.enable": not_needed("algorithm.name: ppo has a critic"),
        "critic.strategy": not_needed("trainers use megatron-core"),
        "reward_model.enable reward_model.model.* reward_model.rollout.* reward.reward_model.*": _REWARD_MODEL,
        "reward_model.reward_manager reward.reward_manager.name": computed(
            "reward.function", "the name of a reward hook, such as math"
        ),
        "reward_model.reward_kwargs.* reward_model.overlong_buffer.* reward.reward_kwargs.*": _OVERLONG,
        "reward_model.num_workers reward.num_workers": "reward.workers",
        "reward_model.launch_reward_fn_async reward_model.use_reward_loop": not_needed(
            "rewards are computed while other rollouts continue"
        ),
        "reward.custom_reward_function.*": _HOOK,
        "custom_reward_function.path custom_reward_function.name": _HOOK,
        "custom_reward_function.reward_kwargs.*": Meaning("reward.options.{}"),
        # Algorithm.
        "algorithm.adv_estimator": Meaning("algorithm.name", ALGORITHMS),
        "algorithm.gamma": "algorithm.advantages.gamma",
        "algorithm.lam": "algorithm.advantages.lam",
        "algorithm.use_kl_in_reward": not_needed("algorithm.kl_reward_coef above 0 turns the KL penalty on"),
        "algorithm.kl_penalty": Meaning("algorithm.kl_reward_estimator", KL_KINDS),
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
        "algorithm.kl_ctrl.type": choice(
            "",
            {
                "fixed": not_needed("algorithm.kl_reward_coef is constant"),
                "adaptive": unsupported("algorithm.kl_reward_coef is constant"),
            },
        ),
        "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantages.normalize_std",
        "algorithm.filter_groups.enable": flag("rollout.filter", "examples.varied.keep"),
        "algorithm.filter_groups.*": not_needed(
            "slimx generates new groups in place of those that rollout.filter drops"
        ),
        "algorithm.rollout_is": settings(algorithm__old_logprobs="recompute", algorithm__correction="{kind: truncate}"),
        "algorithm.rollout_is_threshold": "algorithm.correction.high",
        "algorithm.rollout_correction.bypass_mode": flag("algorithm.old_logprobs", "rollout"),
        "algorithm.rollout_correction.rollout_is": settings(
            algorithm__old_logprobs="recompute", algorithm__correction="{kind: truncate}"
        ),
        "algorithm.rollout_correction.rollout_is_threshold": computed(
            "algorithm.correction", "a number is `high` of kind truncate; LOW_HIGH are the bounds of kind icepop"
        ),
        "algorithm.rollout_correction.rollout_rs*": computed("algorithm.rejection", "its level and bounds"),
        "algorithm.rollout_correction.*": unsupported(
            "algorithm.correction and algorithm.rejection have no such option"
        ),
        "distillation.*": _TEACHER,
        # Asynchronous training.
        "async_training.staleness_threshold": computed("schedule.max_staleness", "this share, rounded up to versions"),
        "async_training.trigger_parameter_sync_step": "schedule.updates_per_step",
        "async_training.require_batches": computed("rollout.prompts_per_step", "mini-batches of all updates of a step"),
        "async_training.partial_rollout": "rollout.partial",
        "async_training.* trainer.v1.*": not_needed("schedule.max_staleness alone controls how far rollouts run ahead"),
        "rollout.total_rollout_steps": computed("schedule.steps", "this number of prompts / rollout.prompts_per_step"),
        "rollout.nnodes rollout.n_gpus_per_node": computed(
            "rollout.engines.*.count", "the number of engines on these nodes"
        ),
        # Trainer.
        "trainer.v1.trainer_mode": choice(
            "schedule.max_staleness",
            {
                "sync": "0",
                "separate_async": "1",
                "colocate_async": unsupported("with schedule.colocate, rollouts never run ahead of the trainers"),
            },
        ),
        "trainer.use_v1": not_needed("slimx has one trainer"),
        "trainer.n_gpus_per_node trainer.nnodes": RANKS,
        "trainer.total_training_steps": "schedule.steps",
        "trainer.total_epochs": EPOCHS,
        "trainer.save_freq": Meaning(
            "checkpoint.every",
            {"-1": not_needed("checkpoint.every=0 saves only by checkpoint.every_seconds and at the end")},
        ),
        "trainer.test_freq": Meaning("eval.every", {"-1": "0"}),
        "trainer.val_before_train": unsupported("a run with eval.prompts always evaluates before the first step"),
        "trainer.val_only": unsupported("`slimx eval FILE` evaluates without training"),
        "trainer.log_val_generations": "track.samples",
        "trainer.rollout_data_dir": not_needed("rollouts are saved in run.dir (track.rollouts)"),
        "trainer.validation_data_dir": not_needed("samples of evaluations are in run.dir/samples.jsonl"),
        "trainer.project_name": "track.project",
        "trainer.experiment_name": "run.name",
        "trainer.default_local_dir": "run.dir",
        "trainer.default_hdfs_dir": unsupported("checkpoints are written to run.dir"),
        "trainer.resume_mode": Meaning(
            "run.resume", {"disable": "never", "resume_path": computed("run.fork", "the path of the checkpoint")}
        ),
        "trainer.resume_from_path": "run.fork",
        "trainer.critic_warmup": "critic.warmup_steps",
        "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep trainer.max_ckpt_to_keep": "checkpoint.keep",
        "checkpoint.*": not_needed("checkpoints always include weights, optimizer and the state of the run"),
        "trainer.device": Meaning(
            "cluster.device", {"gpu": "cuda", "npu": unsupported("slimx supports only CUDA GPUs")}
        ),
        "trainer.logger": computed("track.wandb", "true or false; track also has tensorboard, mlflow and swanlab"),
        "ray_kwargs.*": not_needed("slimx starts Ray; for a running cluster set cluster.ray_address"),
        "global_profiler.*": _PROFILED,
    }
)
