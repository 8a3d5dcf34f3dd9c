"""Names of Megatron-LM's flags, which slime's scripts use too."""

from __future__ import annotations

from slimx.extras.foreign.meaning import (
    OF_MODEL,
    PACKED,
    PER_UPDATE,
    Meaning,
    Table,
    choice,
    computed,
    flag,
    not_needed,
    table,
    unsupported,
)

_BETAS = computed("trainer.optimizer.betas", "a list of beta1 and beta2")
_STAGES = computed("trainer.layers_per_stage", "a list with the number of layers of every stage")
_NO_DROPOUT = not_needed("dropout is always 0")
_FUSED = not_needed("fused kernels are used if they are installed")
_PRECISION = computed("numerics.dtype", "bfloat16 or float32")
_SHAPES = """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention swiglu num_query_groups
    kv_channels vocab_size normalization norm_epsilon rotary_base rotary_percent rotary_scaling_factor
    use_rotary_position_embeddings position_embedding_type disable_bias_linear add_qkv_bias
    untie_embeddings_and_output_weights qk_layernorm make_vocab_size_divisible_by max_position_embeddings
    num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq moe_router_topk
    moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
    moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk multi_latent_attention q_lora_rank
    kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim tokenizer_type tokenizer_model rope_type
    apply_layernorm_1p attention_output_gate mtp_num_layers window_size mscale mscale_all_dim use_gated_attention
    no_position_embedding moe_shared_expert_gate post_self_attn_layernorm post_mlp_layernorm rotary_interleaved
    enable_experimental
"""

MEGATRON: Table = table(
    {
        _SHAPES: OF_MODEL,
        "tensor_model_parallel_size": "trainer.tensor",
        "pipeline_model_parallel_size": "trainer.pipeline",
        "virtual_pipeline_model_parallel_size": "trainer.virtual_pipeline",
        "num_layers_per_virtual_pipeline_stage": computed(
            "trainer.virtual_pipeline", "the number of chunks per pipeline rank"
        ),
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers": _STAGES,
        "context_parallel_size": "trainer.context",
        "expert_model_parallel_size": "trainer.expert",
        "expert_tensor_parallel_size": "trainer.expert_tensor",
        "sequence_parallel": not_needed("sequence parallelism is on if trainer.tensor is above 1"),
        "use_distributed_optimizer": "trainer.distributed_optimizer",
        "micro_batch_size seq_length": PACKED,
        "global_batch_size": PER_UPDATE,
        "recompute_granularity": "trainer.recompute.granularity",
        "recompute_method": "trainer.recompute.method",
        "recompute_num_layers": "trainer.recompute.layers",
        "recompute_modules": computed("trainer.recompute.modules", "a list"),
        "recompute_activations": flag("trainer.recompute.granularity", "selective"),
        "attention_backend": Meaning("trainer.attention", {"local": "unfused"}),
        "use_flash_attn": flag("trainer.attention", "flash"),
        "attention_dropout hidden_dropout": _NO_DROPOUT,
        "attention_softmax_in_fp32": not_needed("megatron-core computes this softmax in fp32 by default"),
        (
            "no_rope_fusion no_masked_softmax_fusion no_bias_swiglu_fusion no_gradient_accumulation_fusion "
            "moe_permute_fusion"
        ): _FUSED,
        "cross_entropy_loss_fusion": not_needed("log-probs are computed in chunks (trainer.logprob_chunk_tokens)"),
        "bf16": flag("numerics.dtype", "bfloat16"),
        "fp16": _PRECISION,
        "fp8_format fp8_recipe": computed("trainer.fp8", "blockwise or mxfp8"),
        "accumulate_allreduce_grads_in_fp32": "trainer.grad_reduce_in_fp32",
        "overlap_grad_reduce": "trainer.overlap_grad_reduce",
        "overlap_param_gather": "trainer.overlap_param_gather",
        "moe_token_dispatcher_type": choice(
            "trainer.moe.dispatcher",
            {
                "alltoall": "alltoall",
                "flex": "flex",
                "allgather": unsupported("trainer.moe.dispatcher must be alltoall or flex"),
            },
        ),
        "moe_enable_deepep": flag("trainer.moe.dispatcher", "flex"),
        "moe_flex_dispatcher_backend": "trainer.moe.flex_backend",
        "moe_aux_loss_coeff": "trainer.moe.aux_loss_coef",
        "moe_z_loss_coeff": "trainer.moe.z_loss_coef",
        "moe_router_load_balancing_type": Meaning(
            "trainer.moe.aux_loss_type",
            {"none": not_needed("trainer.moe.aux_loss_coef: 0, the default, turns balancing off")},
        ),
        "moe_router_bias_update_rate": "trainer.moe.bias_update_rate",
        "moe_router_dtype": not_needed("routers compute in fp32 (numerics.router_dtype)"),
        "moe_token_drop_policy": not_needed("no token is dropped"),
        "mtp_loss_scaling_factor": computed("trainer.megatron", "{mtp_loss_scaling_factor: VALUE}"),
        "transformer_impl": not_needed("layers are Transformer Engine's if it is installed"),
        "deterministic_mode": computed("trainer.megatron", "{deterministic_mode: true}"),
        "no_check_for_nan_in_loss_and_grad": not_needed(
            "an update with infinite or NaN gradients is skipped (trainer.optimizer.max_skipped)"
        ),
        "moe_grouped_gemm": not_needed("experts always use grouped matrix products"),
        "optimizer": choice(
            "trainer.optimizer.kind",
            {
                "adam adamw": "adam",
                "muon dist_muon": "muon",
                "sgd": unsupported("trainer.optimizer.kind must be adam or muon"),
            },
        ),
        "optimizer_cpu_offload": flag("trainer.optimizer.offload_fraction", "1.0"),
        "optimizer_offload_fraction": "trainer.optimizer.offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d": not_needed("trainer.optimizer.offload_fraction controls the offload"),
        "use_precision_aware_optimizer": not_needed(
            "trainer.optimizer.moments_dtype: bfloat16 turns this optimizer on"
        ),
        "exp_avg_dtype exp_avg_sq_dtype": Meaning(
            "trainer.optimizer.moments_dtype", {"fp32": "float32", "bf16": "bfloat16"}
        ),
        "min_lr": "trainer.optimizer.min_lr",
        "clip_grad": "trainer.optimizer.clip_grad",
        "lr_decay_style": choice(
            "trainer.optimizer.decay",
            {
                **{name: name for name in ("constant", "linear", "cosine")},
                "wsd": unsupported("trainer.optimizer.decay must be constant, linear or cosine"),
                "inverse_square_root": unsupported("trainer.optimizer.decay must be constant, linear or cosine"),
                "inverse-square-root": unsupported("trainer.optimizer.decay must be constant, linear or cosine"),
            },
        ),
        "lr_decay_iters": unsupported("the decay always ends with the run"),
        "lr_warmup_iters": "trainer.optimizer.warmup_steps",
        "lr_warmup_fraction": computed("trainer.optimizer.warmup_steps", "a number of updates instead of a fraction"),
        "adam_beta1 adam_beta2": _BETAS,
        "adam_eps": "trainer.optimizer.eps",
        "muon_momentum": "trainer.optimizer.muon.momentum",
        "muon_num_ns_steps": "trainer.optimizer.muon.steps",
        "muon_extra_scale_factor": "trainer.optimizer.muon.scale",
        "muon_coefficient_type": choice(
            "",
            {
                "quintic": not_needed("Muon always uses the quintic coefficients"),
                "simple": unsupported("Muon always uses the quintic coefficients"),
            },
        ),
        "train_iters": "schedule.steps",
        "tensorboard_dir": not_needed("the files are in run.dir/tensorboard"),
        "distributed_timeout_minutes": computed("trainer.deadline", "in seconds"),
    }
)
