"""Arguments of TRL's GRPOConfig and of transformers' TrainingArguments."""

from __future__ import annotations

from slimx.extras.foreign.meaning import (
    EPOCHS,
    MEMORY,
    OF_ENGINES,
    RANKS,
    Meaning,
    Table,
    absent,
    chosen,
    needless,
    setting,
    switched,
    worked_out,
)

_LORA = worked_out("trainer.lora", "{rank: R, alpha: A, targets: [attention, mlp]}")
_LOGGED = needless("every step is logged")
_SERVER = worked_out("rollout.engines.*.urls", "a list of URLs of SGLang servers")

TRL: Table = {
    "model_name_or_path": "model.path",
    "dataset_name": Meaning("rollout.prompts", prefix="hf://"),
    "dataset_train_split": "rollout.sources.*.split",
    "output_dir": "run.dir",
    "learning_rate": "trainer.optimizer.lr",
    "max_grad_norm": "trainer.optimizer.clip_grad",
    "warmup_steps": "trainer.optimizer.warmup_steps",
    "warmup_ratio": worked_out("trainer.optimizer.warmup_steps", "this share of schedule.steps * updates_per_step"),
    "lr_scheduler_type": chosen(
        "trainer.optimizer.decay",
        {
            **{name: name for name in ("constant", "linear", "cosine")},
            "constant_with_warmup": "constant",
            "cosine_with_min_lr": "cosine",
            "polynomial": absent("trainer.optimizer.decay is constant, linear or cosine"),
        },
    ),
    "optim": worked_out("trainer.optimizer.kind", "adam (with decoupled decay) or muon"),
    "num_generations": "rollout.group_size",
    "num_generations_eval": "eval.samples",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_length": worked_out("rollout.sampling.max_new_tokens", "and rollout.max_prompt_tokens, which add up to it"),
    "max_seq_length": worked_out(
        "rollout.sampling.max_new_tokens", "and rollout.max_prompt_tokens, which add up to it"
    ),
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "top_k": "rollout.sampling.top_k",
    "min_p": absent("rollout.sampling has top_p and top_k, whose kept tokens the trainer knows"),
    "repetition_penalty": absent("the trainer could not compute with it"),
    "generation_kwargs": absent("rollout.sampling has all that the trainer can compute with"),
    "reward_funcs": worked_out("reward.function", "the dotted path of the function; several are reward.parts"),
    "reward_weights": worked_out("reward.parts.*.weight", "one for each entry"),
    "scale_rewards": chosen(
        "algorithm.advantages.normalize_std",
        {
            **{name: "true" for name in ("group", "true")},
            **{name: "false" for name in ("none", "false")},
            "batch": setting(algorithm__name="reinforce_pp_baseline"),
        },
    ),
    "delta": "algorithm.loss.dual",
    "beta": "algorithm.kl_coef",
    "epsilon": "algorithm.loss.low",
    "epsilon_high": "algorithm.loss.high",
    "num_iterations": "schedule.updates_per_step",
    "steps_per_generation": worked_out("schedule.updates_per_step", "this over gradient_accumulation_steps"),
    "generation_batch_size": worked_out("rollout.prompts_per_step", "this over rollout.group_size"),
    "per_device_train_batch_size": worked_out(
        "rollout.prompts_per_step", "devices * this * gradient_accumulation_steps over rollout.group_size"
    ),
    "per_device_eval_batch_size": needless("held-out prompts go to the engines all at once (rollout.concurrency)"),
    "gradient_accumulation_steps": needless("a rank sums over as many micro-batches as its tokens need"),
    "loss_type": chosen(
        "algorithm.aggregation",
        {
            "grpo": "sample",
            "dapo": "token",
            "bnpo": "token",
            "dr_grpo": "constant",
            "cispo": setting(algorithm__name="cispo"),
            "sapo": setting(algorithm__name="sapo"),
            "sigmoid": setting(algorithm__name="dpo"),
        },
    ),
    "importance_sampling_level": chosen(
        "algorithm.loss", {"token": "clip", "sequence": setting(algorithm__name="gspo")}
    ),
    "vllm_importance_sampling_correction": setting(
        algorithm__old_logprobs="recompute", algorithm__correction="{kind: icepop, level: sequence, high: 3.0}"
    ),
    "vllm_importance_sampling_cap": "algorithm.correction.high",
    "vllm_importance_sampling_clip_max": "algorithm.correction.high",
    "mask_truncated_completions": absent("overlong takes reward from answers near the limit"),
    "sync_ref_model": needless("algorithm.reference_refresh above 0 turns it on"),
    "ref_model_sync_steps": "algorithm.reference_refresh",
    "ref_model_mixup_alpha": absent("algorithm.reference_refresh takes the present weights as they are"),
    "gradient_checkpointing": switched("trainer.recompute.granularity", "full"),
    "use_vllm": OF_ENGINES,
    "vllm_mode": chosen(
        "schedule.colocate",
        {"colocate": "true", "server": "false"},
    ),
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_gpu_memory_utilization": MEMORY,
    "vllm_tensor_parallel_size": "rollout.engines.*.tensor",
    "vllm_*": OF_ENGINES,
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": absent("adapters have no dropout"),
    "lora_target_modules": worked_out("trainer.lora.targets", "of attention, mlp, shared_experts, experts, router"),
    "load_in_4bit": absent("the trained weights are bfloat16 or float32 (numerics.dtype)"),
    "torch_dtype": worked_out("numerics.dtype", "bfloat16 or float32"),
    "dtype": worked_out("numerics.dtype", "bfloat16 or float32"),
    "attn_implementation": worked_out("trainer.attention", "auto, flash, fused or unfused"),
    "trust_remote_code": needless("slimx runs no code of a checkpoint; model.family is for a module of your own"),
    "max_steps": "schedule.steps",
    "num_train_epochs": EPOCHS,
    "save_steps": "checkpoint.every",
    "save_strategy": worked_out("checkpoint.every", "steps between checkpoints"),
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": needless("the same command goes on from the newest checkpoint (run.resume)"),
    "eval_steps": "eval.every",
    "eval_strategy": worked_out("eval.every", "steps between evaluations; 0: none"),
    "run_name": "run.name",
    "report_to": chosen(
        "track.wandb",
        {
            "wandb": "true",
            "none": "false",
            "tensorboard": setting(track__tensorboard="true"),
            "swanlab": setting(track__swanlab="true"),
            "mlflow": worked_out("track.mlflow", "the URI of its server"),
        },
    ),
    "logging_steps": _LOGGED,
    "log_completions": needless("rollouts are kept (track.rollouts), and `slimx rollouts RUN` shows them"),
    "deepspeed": needless("trainers are megatron-core's: trainer.tensor, pipeline, expert, distributed_optimizer"),
    "fsdp": needless("trainers are megatron-core's: trainer.tensor, pipeline, expert, distributed_optimizer"),
    "num_processes": RANKS,
    "num_machines": RANKS,
}
