"""Names of arguments of TRL's GRPOConfig and of transformers' TrainingArguments."""

from __future__ import annotations

from slimx.extras.foreign.meaning import (
    EPOCHS,
    MEMORY,
    OF_ENGINES,
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

_LORA = computed("trainer.lora", "{rank: R, alpha: A, targets: [attention, mlp]}")
_HOOK = computed("rollout.generate", "a hook that takes the turns (docs/guides/environment.md)")
_LOGGED = not_needed("every step is logged")
_SERVER = computed("rollout.engines.*.urls", "a list of URLs of SGLang servers")

TRL: Table = table(
    {
        "model_name_or_path": "model.path",
        "dataset_name": Meaning("rollout.prompts", prefix="hf://"),
        "dataset_train_split": "rollout.sources.*.split",
        "output_dir": "run.dir",
        "learning_rate": "trainer.optimizer.lr",
        "weight_decay": "trainer.optimizer.weight_decay",
        "seed data_seed": "run.seed",
        "chat_template_kwargs": "rollout.template",
        "max_grad_norm": "trainer.optimizer.clip_grad",
        "warmup_steps": "trainer.optimizer.warmup_steps",
        "warmup_ratio": computed(
            "trainer.optimizer.warmup_steps", "this fraction of schedule.steps * updates_per_step"
        ),
        "lr_scheduler_type": choice(
            "trainer.optimizer.decay",
            {
                **{name: name for name in ("constant", "linear", "cosine")},
                "constant_with_warmup": "constant",
                "cosine_with_min_lr": "cosine",
                "polynomial": unsupported("trainer.optimizer.decay must be constant, linear or cosine"),
            },
        ),
        "optim": computed("trainer.optimizer.kind", "adam (with decoupled decay) or muon"),
        "num_generations": "rollout.group_size",
        "num_generations_eval": computed("eval.samples", "with eval.prompts, and a positive eval.temperature"),
        "max_completion_length": "rollout.sampling.max_new_tokens",
        "max_prompt_length": "rollout.max_prompt_tokens",
        "max_length max_seq_length": computed(
            "rollout.sampling.max_new_tokens", "the difference between this limit and rollout.max_prompt_tokens"
        ),
        "temperature": "rollout.sampling.temperature",
        "top_p": "rollout.sampling.top_p",
        "top_k": Meaning("rollout.sampling.top_k", {"0": "-1"}),
        "min_p": unsupported("the trainer supports only top_p and top_k"),
        "repetition_penalty": unsupported("the trainer does not support repetition penalties"),
        "generation_kwargs": unsupported("rollout.sampling has everything that the trainer supports"),
        "reward_funcs": computed(
            "reward.function", "the dotted path of the function; set reward.parts for several functions"
        ),
        "environment_factory rollout_func tools": _HOOK,
        "eval_dataset": computed("eval.prompts", "a file of held-out prompts"),
        "processing_class": not_needed("the tokenizer comes from model.path"),
        "reward_weights": computed("reward.parts.*.weight", "a weight in each entry of reward.parts"),
        "scale_rewards": choice(
            "algorithm.advantages.normalize_std",
            {
                "group true": "true",
                "none false": "false",
                "batch": unsupported("advantages are divided by the standard deviation of their group, or not at all"),
            },
        ),
        "delta": "algorithm.loss.dual",
        "sapo_temperature_pos": "algorithm.loss.tau_positive",
        "sapo_temperature_neg": "algorithm.loss.tau_negative",
        "beta": "algorithm.kl_coef",
        "epsilon": "algorithm.loss.low",
        "epsilon_high": "algorithm.loss.high",
        "num_iterations": unsupported("every rollout is trained on once; schedule.updates_per_step splits a step"),
        "steps_per_generation": computed(
            "schedule.updates_per_step", "this value divided by gradient_accumulation_steps"
        ),
        "generation_batch_size": computed("rollout.prompts_per_step", "this value divided by rollout.group_size"),
        "per_device_train_batch_size": computed(
            "rollout.prompts_per_step", "devices * this value * gradient_accumulation_steps / rollout.group_size"
        ),
        "per_device_eval_batch_size": not_needed("evaluation sends all prompts at once (rollout.concurrency)"),
        "gradient_accumulation_steps": not_needed("the number of micro-batches follows from the number of tokens"),
        "loss_type": choice(
            "algorithm.aggregation",
            {
                "grpo": "sample",
                "dapo": "token",
                "bnpo": "token",
                "dr_grpo": "constant",
                "cispo": settings(algorithm__name="cispo"),
                "sapo": settings(algorithm__name="sapo"),
                "sigmoid": settings(algorithm__name="dpo"),
            },
        ),
        "importance_sampling_level": choice(
            "algorithm.loss", {"token": "clip", "sequence": settings(algorithm__name="gspo")}
        ),
        "vllm_importance_sampling_correction": settings(
            algorithm__old_logprobs="recompute", algorithm__correction="{kind: icepop, level: sequence, high: 3.0}"
        ),
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max": "algorithm.correction.high",
        "mask_truncated_completions": unsupported("the reward `overlong` penalizes answers near the limit"),
        "sync_ref_model": not_needed("algorithm.reference_refresh above 0 turns the refresh on"),
        "ref_model_sync_steps": "algorithm.reference_refresh",
        "ref_model_mixup_alpha": unsupported("algorithm.reference_refresh copies the current weights"),
        "gradient_checkpointing": flag("trainer.recompute.granularity", "full"),
        "use_vllm vllm_*": OF_ENGINES,
        "vllm_mode": choice(
            "schedule.colocate",
            {"colocate": "true", "server": "false"},
        ),
        "vllm_server_base_url vllm_server_host vllm_server_port": _SERVER,
        "vllm_gpu_memory_utilization": MEMORY,
        "vllm_tensor_parallel_size": "rollout.engines.*.tensor",
        "peft_config use_peft lora_r lora_rank lora_alpha": _LORA,
        "lora_dropout": unsupported("adapters have no dropout"),
        "lora_target_modules": computed(
            "trainer.lora.targets", "a list of attention, mlp, shared_experts, experts, router"
        ),
        "load_in_4bit": unsupported("trained weights are bfloat16 or float32 (numerics.dtype)"),
        "torch_dtype dtype": computed("numerics.dtype", "bfloat16 or float32"),
        "attn_implementation": computed("trainer.attention", "auto, flash, fused or unfused"),
        "trust_remote_code": not_needed("slimx never runs code from a checkpoint; model.family is for your own module"),
        "max_steps": "schedule.steps",
        "num_train_epochs": EPOCHS,
        "save_steps": "checkpoint.every",
        "save_strategy": computed("checkpoint.every", "steps between checkpoints"),
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": not_needed("the same command resumes from the newest checkpoint (run.resume)"),
        "eval_steps": "eval.every",
        "eval_strategy": computed("eval.every", "steps between evaluations; 0: none"),
        "run_name": "run.name",
        "report_to": choice(
            "track.wandb",
            {
                "wandb": "true",
                "none": "false",
                "tensorboard": settings(track__tensorboard="true"),
                "swanlab": settings(track__swanlab="true"),
                "mlflow": computed("track.mlflow", "the URI of its server"),
            },
        ),
        "logging_steps": _LOGGED,
        "log_completions": not_needed("rollouts are saved (track.rollouts), and `slimx rollouts RUN` shows them"),
        "deepspeed": not_needed(
            "trainers use megatron-core; set trainer.tensor, pipeline, expert and distributed_optimizer"
        ),
        "fsdp": not_needed(
            "trainers use megatron-core; set trainer.tensor, pipeline, expert and distributed_optimizer"
        ),
        "num_processes num_machines": RANKS,
    }
)
