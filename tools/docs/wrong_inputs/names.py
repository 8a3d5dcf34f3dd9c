"""Names of other programs, and slips, that a new user types after `slimx train run.yaml`: one on each line."""

from __future__ import annotations

import shlex

from tools.docs.wrong_inputs.mistake import Mistake

SLIME = """\
--tensor-model-parallel-size 4
--pipeline-model-parallel-size 2
--context-parallel-size 2
--expert-model-parallel-size 8
--expert-tensor-parallel-size 1
--sequence-parallel
--rollout-batch-size 32
--n-samples-per-prompt 8
--num-rollout 3000
--num-steps-per-rollout 2
--global-batch-size 256
--prompt-data data/dapo.jsonl
--input-key prompt
--label-key label
--apply-chat-template
--rollout-shuffle
--rm-type deepscaler
--balance-data
--hf-checkpoint models/Qwen3-30B-A3B
--ref-load models/Qwen3-30B-A3B_torch_dist
--load runs/moe
--save runs/moe
--save-interval 20
--optimizer adam
--lr 1e-6
--lr-decay-style constant
--weight-decay 0.1
--adam-beta1 0.9
--adam-beta2 0.98
--attention-dropout 0.0
--hidden-dropout 0.0
--attention-softmax-in-fp32
--attention-backend flash
--accumulate-allreduce-grads-in-fp32
--use-dynamic-batch-size
--max-tokens-per-gpu 20480
--actor-num-nodes 4
--actor-num-gpus-per-node 8
--rollout-num-gpus 16
--rollout-num-gpus-per-engine 8
--colocate
--rollout-max-response-len 8192
--rollout-temperature 1
--recompute-granularity full
--recompute-method uniform
--recompute-num-layers 1
--advantage-estimator grpo
--advantage-estimator reinforce_plus_plus
--use-kl-loss
--kl-loss-coef 0.001
--kl-loss-type low_var_kl
--kl-coef 0.01
--entropy-coef 0.001
--eps-clip 0.2
--eps-clip-high 0.28
--use-tis
--loss-type sft_loss
--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
--custom-generate-function-path generate_with_search.generate
--over-sampling-batch-size 64
--eval-interval 20
--eval-prompt-data data/aime.jsonl
--eval-max-response-len 16384
--eval-top-p 0.7
--n-samples-per-eval-prompt 16
--sglang-mem-fraction-static 0.7
--sglang-ep-size 8
--sglang-dp-size 8
--sglang-enable-dp-attention
--sglang-cuda-graph-bs 256
--sglang-speculative-algorithm EAGLE
--optimizer-cpu-offload
--overlap-cpu-optimizer-d2h-h2d
--use-precision-aware-optimizer
--moe-token-dispatcher-type flex
--moe-enable-deepep
--moe-aux-loss-coeff 0
--moe-router-load-balancing-type seq_aux_loss
--moe-router-dtype fp32
--moe-permute-fusion
--moe-grouped-gemm
--num-layers 48
--num-experts 128
--decoder-last-pipeline-num-layers 6
--spec slime_plugins.models.glm5
--use-wandb
--wandb-project moe
--wandb-group qwen3
--runtime-env-json {}
--address http://127.0.0.1:8265
"""
VERL = """\
data.train_files=dapo.parquet
data.val_files=aime.parquet
data.truncation=left
data.max_prompt_length=2048
data.max_response_length=8192
data.train_batch_size=512
actor_rollout_ref.rollout.n=16
algorithm.adv_estimator=gae
algorithm.use_kl_in_reward=False
algorithm.kl_ctrl.kl_coef=0.0
actor_rollout_ref.model.path=Qwen3-30B-A3B
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.use_fused_kernels=False
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.optim.lr_decay_style=constant
+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.0
actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.actor.megatron.param_offload=True
actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
actor_rollout_ref.actor.fsdp_config.param_offload=True
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.7
actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.enable_chunked_prefill=True
actor_rollout_ref.rollout.val_kwargs.do_sample=True
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.ref.megatron.param_offload=True
reward_model.reward_manager=dapo
trainer.logger=console
trainer.val_before_train=False
trainer.save_freq=100
trainer.test_freq=-1
trainer.resume_mode=disable
"""
TRL = """\
--model_name_or_path Qwen2.5-0.5B
--output_dir runs/grpo
--max_steps 500
--num_train_epochs 3
--per_device_train_batch_size 8
--gradient_accumulation_steps 4
--max_completion_length 256
--learning_rate 1e-6
--warmup_ratio 0.1
--lr_scheduler_type cosine
--beta 0.04
--epsilon_high 0.28
--loss_type dr_grpo
--scale_rewards none
--importance_sampling_level sequence
--use_vllm
--vllm_gpu_memory_utilization 0.5
--gradient_checkpointing
--use_peft
--bf16
--report_to wandb
--logging_steps 1
--save_total_limit 2
--actor.adam.lr 1e-6
--vllm.num_engines 4
--ds.zero_stage 3
--algo.advantage.estimator reinforce
"""
SLIPS = """\
--steps 3
--Max-Steps 3
--LR 3
steps=3
lr=3
LR=3
every=5
schedule.steps 3
schedule.steps: 3
Trainer.World-Size=2
optimizer.lr=1e-5
sampling.temperature=0.5
engines.0.tensor=2
engines[0].tensor=2
engines.tensor=2
rollout.engines.tensor=2
rollout.engines.3.tensor=2
rollout.sampling.stop=END
cluster.device=gpu
cluster.gpu=a100
numerics.dtype=fp16
numerics.dtype=bf16
algorithm.name=GRPO
algorithm.name=reinforce++
algorithm.aggregation=token-mean
checkpoint.every=
cluster=[1]
rollout.sources=5
rollout.sampling.temperature=0
rollout.sampling.top_k=1
trainer.optimizer.kind=adamw
trainer.attention=sdpa
run.dir=${oc.env:SLIMX_NOBODY_SETS_THIS}
"""
NAMES = tuple(
    Mistake(
        f"{program}: {line}", f"train run.yaml {shlex.join(line.split(' ')) if '[' in line or '$' in line else line}"
    )
    for program, lines in (("slime", SLIME), ("verl", VERL), ("TRL and OpenRLHF", TRL), ("a slip", SLIPS))
    for line in lines.splitlines()
)
