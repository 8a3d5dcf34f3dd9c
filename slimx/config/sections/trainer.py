"""Section trainer: layout over ranks, memory, routing and optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slimx.config.section import (
    Amount,
    Count,
    Faults,
    Options,
    PathText,
    Positive,
    Seconds,
    Section,
    Share,
    Size,
    Weight,
)

CYCLE = 5
"""Period of the coefficients of Newton-Schulz iterations (`quintic` of emerging-optimizers)."""


class Muon(Section):
    """megatron-core's Muon: the momentum is orthogonalised before it is applied."""

    momentum: Share = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    steps: Size = CYCLE
    """Newton-Schulz iterations that orthogonalise a matrix: a multiple of 5, the number of iterations with different
    coefficients (`quintic`)."""
    scale: Positive = 0.2
    """Factor of an update, which is this times sqrt(max(rows, columns)) times the orthogonalised momentum. With 0.2
    updates are about as large as Adam's, and one learning rate suits both (arXiv:2502.16982)."""
    split_qkv: bool = True
    """Orthogonalise queries, keys and values separately."""

    def _faults(self) -> Faults:
        if self.steps % CYCLE:
            yield (
                "muon.steps",
                "trainer.optimizer.muon.steps",
                f"trainer.optimizer.muon.steps is {self.steps}, which is not a multiple of {CYCLE}: each of {CYCLE} "
                "iterations has different coefficients, and an incomplete cycle leaves singular values far from 1 "
                f"(below 0.2 after 6); set it to {CYCLE}",
            )


class Optimizer(Section):
    kind: Literal["adam", "muon"] = "adam"
    """adam: for all parameters; muon: for matrices, with Adam for embeddings, output layer, norms and biases."""
    muon: Muon = Muon()
    lr: Positive = 1e-6
    """Peak learning rate."""
    min_lr: Weight = 0.0
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr to min_lr."""
    warmup_steps: Count = 0
    """Optimizer updates of the linear warm-up from 0."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay, which norms and biases do not have."""
    no_weight_decay: tuple[str, ...] = ()
    """Globs over Megatron or Hugging Face names: further parameters without weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    clip_grad: Weight = 1.0
    """Global gradient norm above which gradients are scaled down; 0: never."""
    max_skipped: Count = 3
    """Limit on consecutive optimizer steps skipped for an infinite or NaN gradient; the run stops when it is reached;
    0: no limit."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of Adam's moments between steps, which compute in fp32. bfloat16 halves their memory, as in
    DeepSeek-V3's training (arXiv:2412.19437, 3.3.3). Needs CUDA, Transformer Engine's Adam and
    trainer.distributed_optimizer; never run on a GPU."""
    offload_fraction: Share = 0.0
    """Fraction of Adam's moments kept in (pinned) host memory. Each step copies them to the device and back in pieces
    of 512 MiB."""


OffloadedModule = Literal["core_attn", "attn_proj", "expert_fc1", "moe_act"]
"""megatron-core's names of the parts of a layer whose inputs can be moved to the host."""


class Recompute(Section):
    """Activation recomputation: parts of the forward pass that the backward pass computes again."""

    granularity: Literal["none", "selective", "full"] = "none"
    """none: keep all activations; selective: recompute `modules`; full: keep only the layers' inputs."""
    modules: tuple[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], ...] = (
        "core_attn",
    )
    """Parts of a layer covered by selective recomputation."""
    method: Literal["uniform", "block"] = "uniform"
    """Layers covered by full recomputation. uniform: all layers, in units of `layers`; block: only the first `layers`
    of a stage."""
    layers: Amount = 1
    """Full recomputation: layers per unit (uniform), or layers covered (block)."""


class Moe(Section):
    """Routing of tokens to experts (docs/trainer.md explains each term)."""

    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """alltoall: collectives of torch.distributed; flex: kernels of `flex_backend` (CUDA)."""
    flex_backend: Literal["deepep", "hybridep"] = "deepep"
    """Library of the flex dispatcher; hybridep spans NVLink domains of GB300."""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """Experts used in a training pass. none: the router's choice; R2: its choice under the weights before the step's
    first update (one more forward pass); R3: the engine's choice."""
    aux_loss_coef: Weight = 0.0
    """Weight of each MoE layer's load-balancing loss; 0: none."""
    aux_loss_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "seq_aux_loss"
    """Tokens over which load is balanced. aux_loss: a micro-batch; seq_aux_loss: each sequence; global_aux_loss: all
    micro-batches of the update so far."""
    z_loss_coef: Weight = 0.0
    """Weight of each MoE layer's z-loss, the mean squared logsumexp of the router's logits; 0: none."""
    bias_update_rate: Weight = 0.0
    """Amount by which each expert's selection bias moves towards equal load after every update; 0: none."""

    def _faults(self) -> Faults:
        if self.aux_loss_type != type(self).model_fields["aux_loss_type"].default and not self.aux_loss_coef:
            yield (
                "routing.aux_loss_type",
                "trainer.moe.aux_loss_type",
                f"trainer.moe.aux_loss_type is {self.aux_loss_type}, but trainer.moe.aux_loss_coef is 0 and nothing is "
                "balanced; set the coefficient, or leave the type out",
            )


class Lora(Section):
    """Low-rank adapters. The base weights are not trained, and engines compute with base + alpha / rank * B A, merged
    or not (publish.adapters)."""

    rank: Size
    """Rows of A and columns of B."""
    alpha: Positive
    """Numerator of the scale alpha / rank."""
    targets: tuple[Literal["attention", "mlp", "shared_experts", "experts", "router"], ...] | None = None
    """Layers with adapters: attention (all of its projections), mlp (of dense layers), shared_experts, experts (routed
    ones), router; null: all of these that the model has, except the router."""
    load: PathText | None = None
    """Directory of initial adapters in PEFT's format, with the same targets; null: new ones. Stacked projections need
    two or three times the directory's rank and alpha, which `slimx plan` prints."""


_FP8 = "set trainer.fp8, whose layers and blocks are checked against publications"
_PRECISION = "its log-probs and publications were never compared with an engine's; set trainer.fp8, or leave it out"
_SHARDS = "plans do not include these shards; set trainer.tensor, and trainer.distributed_optimizer for the state"
_OTHER_WEIGHTS = "it builds layers whose weights checkpoints and publications do not support; leave it out"
_INTERLEAVED = "it interleaves the rows of gate and up, which checkpoints and engines store in two blocks; leave it out"
_DROPPED = "it drops tokens that engines compute, and log-probs differ; lower trainer.max_tokens_per_microbatch instead"
_FIRST_PASS = "it takes effect from the second pass on, and each pass is a first one; list fewer parts in "
_FIRST_PASS += "trainer.offload_activations"
NOT_PASSED = {
    "tensor_model_parallel_size": "set trainer.tensor",
    "sequence_parallel": "it follows trainer.tensor",
    "pipeline_model_parallel_size": "set trainer.pipeline",
    "virtual_pipeline_model_parallel_size": "set trainer.virtual_pipeline",
    "pipeline_model_parallel_layout": "set trainer.layers_per_stage",
    "context_parallel_size": "set trainer.context",
    "expert_model_parallel_size": "set trainer.expert",
    "expert_tensor_parallel_size": "set trainer.expert_tensor",
    "params_dtype": "set numerics.dtype",
    "bf16": "set numerics.dtype",
    "fp16": "set numerics.dtype=bfloat16; gradients are not scaled",
    "attention_backend": "set trainer.attention",
    "recompute_granularity": "set trainer.recompute.granularity",
    "recompute_method": "set trainer.recompute.method",
    "recompute_num_layers": "set trainer.recompute.layers",
    "recompute_modules": "set trainer.recompute.modules",
    "moe_token_dispatcher_type": "set trainer.moe.dispatcher",
    "moe_flex_dispatcher_backend": "set trainer.moe.flex_backend",
    "moe_aux_loss_coeff": "set trainer.moe.aux_loss_coef",
    "moe_router_load_balancing_type": "set trainer.moe.aux_loss_type",
    "moe_z_loss_coeff": "set trainer.moe.z_loss_coef",
    "moe_router_bias_update_rate": "set trainer.moe.bias_update_rate",
    "moe_enable_routing_replay": "set trainer.moe.routing_replay",
    "moe_router_padding_for_fp8": "it routes tokens to experts that engines do not choose; leave it out",
    "moe_router_padding_for_quantization": "it routes tokens to experts that engines do not choose; leave it out",
    "fine_grained_activation_offloading": "set trainer.offload_activations",
    "offload_modules": "set trainer.offload_activations",
    "activation_offload_fraction": _FIRST_PASS,
    "delta_offload_bytes_across_pp_ranks": _FIRST_PASS,
    "cpu_offloading": "it moves whole layers and is not tested; set trainer.offload_activations",
    "moe_router_fusion": "a fused router can be neither recorded nor replayed; leave it out",
    "moe_router_force_biased": "it replaces the routers' choice with noise; leave it out",
    "overlap_moe_expert_parallel_comm": "it splits layers, and their routers would lose their batch; leave it out",
    "cuda_graph_impl": "a captured router would replay the first micro-batch for ever; leave it out",
    "enable_cuda_graph": "a captured router would replay the first micro-batch for ever; leave it out",
    "external_cuda_graph": "a captured router would replay the first micro-batch for ever; leave it out",
    "fp8": _FP8,
    "fp8_recipe": _FP8,
    "fp8_param": _PRECISION,
    "fp8_quantizer_factory": _PRECISION,
    "fp8_output_proj": _PRECISION,
    "fp8_dot_product_attention": _PRECISION,
    "fp8_multi_head_attention": _PRECISION,
    "fp4": _PRECISION,
    "fp4_param": _PRECISION,
    "fp4_quantizer_factory": _PRECISION,
    "quant_recipe": _PRECISION,
    "use_kitchen": _PRECISION,
    "use_mup": "it scales embeddings, attention and logits, and engines do not; leave it out",
    "tensor_parallel_num_weight_shards": _SHARDS,
    "gtp_weight_remat_size": _SHARDS,
    "expert_tensor_parallel_num_weight_shards": _SHARDS,
    "expert_gtp_weight_remat_size": _SHARDS,
    "mtp_use_repeated_layer": "each prediction layer has separate weights in checkpoints and engines; leave it out",
    "mla_down_proj_fusion": _OTHER_WEIGHTS,
    "moe_single_grouped_weight": _OTHER_WEIGHTS,
    "moe_single_grouped_bias": _OTHER_WEIGHTS,
    "use_transformer_engine_op_fuser": _OTHER_WEIGHTS,
    "use_grouped_gemm_for_shared_expert": _OTHER_WEIGHTS,
    "use_grouped_gemm_for_dense_mlp": _OTHER_WEIGHTS,
    "moe_mlp_glu_interleave_size": _INTERLEAVED,
    "moe_shared_expert_glu_interleave_size": _INTERLEAVED,
    "moe_expert_rank_capacity_factor": _DROPPED,
    "moe_paged_stash": _DROPPED,
}
"""Fields of megatron-core's TransformerConfig that `trainer.megatron` must not set, with the key to set instead or the
reason: fields that follow keys of slimx, fields of routing, and fields that would silently change what is computed,
published or saved, such as precision, names and shapes of weights."""


class RankLayout(Section):
    """Parallel sizes of a model that is trained on separate ranks."""

    world_size: Size = 1
    """Number of ranks: processes, with one GPU each on CUDA."""
    tensor: Size = 1
    """Tensor parallel size (TP). Sequence parallelism is on if it is above 1."""
    pipeline: Size = 1
    """Pipeline parallel size (PP)."""
    virtual_pipeline: Size = 1
    """Model chunks of each pipeline rank, interleaved (VPP): smaller bubbles, more messages."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Decoder layers of each stage: pipeline x virtual_pipeline numbers in the order of the forward pass; null: equal
    shares."""
    context: Size = 1
    """Context parallel size (CP): ranks that share each sequence, in zigzag halves."""
    data: Size | None = None
    """Data parallel size (DP); null: what remains of world_size."""
    expert: Size = 1
    """Expert parallel size (EP)."""
    expert_tensor: Size | None = None
    """Tensor parallel size inside an expert (ETP); null: TP, as in Megatron-LM."""


class Trainer(RankLayout):
    load: PathText | None = None
    """Initial weights: a Hugging Face directory, or a Megatron-LM checkpoint (torch_dist) such as those of slime, Miles
    and slimx; null: model.path."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over DP ranks."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over DP and CP ranks bucket by bucket, during the backward pass of the last micro-batch; null: on
    if Transformer Engine computes the layers and there are several such ranks."""
    overlap_param_gather: bool = False
    """Gather updated weights over DP and CP ranks bucket by bucket, during the forward pass that reads them. This hides
    updates_per_step - 1 gathers of a step; the last one precedes the publication."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients in fp32, as slime's scripts do; false: in the model's dtype, with half the memory
    and half the bytes between ranks, but rounded to 8 bits at every micro-batch and every sum."""
    grad_bucket_elements: Amount | None = None
    """Minimum number of gradients per bucket; null: megatron-core's choice, the larger of 40 million and 1 million per
    DP and CP rank."""
    max_tokens_per_microbatch: Amount = 8192
    """Maximum number of tokens packed into one forward pass."""
    balance: Literal["tokens", "flops"] = "flops"
    """Quantity balanced over DP ranks and micro-batches: tokens, or FLOPs computed from the model's sizes (a n + b n^2
    for a sequence of n tokens)."""
    logprob_chunk_tokens: Amount | None = None
    """Number of a rank's tokens whose logits are in memory at once, in forward and backward; null: as many as make 256
    MiB of fp32 logits, at least 128."""
    attention: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Attention kernel. flash: flash-attn (on Hopper FlashAttention 4, a beta, unless FlashAttention 3 is installed);
    fused: cuDNN; unfused: Transformer Engine's, or torch without it; auto: the fastest that is available."""
    moe: Moe = Moe()
    indexer_replay: Literal["none", "R2", "R3"] = "none"
    """Tokens that sparse attention (DSA) attends to in a training pass. none: the indexer's choice; R2: its choice
    under the weights before the step's first update (one more forward pass). R3, the engine's choice, is refused."""
    recompute: Recompute = Recompute()
    offload_activations: tuple[OffloadedModule, ...] = ()
    """Parts of a layer whose saved tensors wait in pinned host memory for the backward pass: core_attn, attn_proj,
    expert_fc1, moe_act. Needs CUDA and Transformer Engine; never run on a GPU (docs/trainer.md)."""
    threads: Size = 1
    """CPU threads per trainer rank."""
    deadline: Seconds = 1800
    """Seconds for one call to all trainer ranks."""
    watch_deadline: Seconds = 60
    """Seconds for which a rank may be silent between two calls, or stopped. Then the run ends and names the rank,
    unless `recovery.trainers` replaces it."""
    offload: bool = True
    """With schedule.colocate: move weights, gradients and optimizer state to (pinned) host memory while engines
    generate."""
    memory_margin_mib: Count = 1024
    """MiB of GPU memory that must be free before a training step. With less, caches are freed; if that is not enough,
    the run stops and names the largest users. 0: no check."""
    freeze: tuple[str, ...] = ()
    """Globs over Megatron or Hugging Face names of parameters that are not trained, such as '*.mlp.gate.weight'. They
    are still published and saved in checkpoints."""
    qat: Literal["int4"] | None = None
    """Quantization-aware training. int4: routed experts are rounded to INT4 in groups of 32 columns, in training and in
    the engines (docs/numerics.md). The optimizer's fp32 weights stay unrounded and get the unchanged gradients. null:
    none."""
    fp8: Literal["blockwise", "mxfp8"] | None = None
    """Compute the products of linear layers in fp8 (e4m3). blockwise: blocks of 128 x 128 and 1 x 128, fp32 scales
    (Hopper); mxfp8: 1 x 32, powers of two (Blackwell); null: the model's dtype."""
    lora: Lora | None = None
    """Train low-rank adapters (LoRA) instead of the weights; null: none."""
    optimizer: Optimizer = Optimizer()
    megatron: Options = Field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, which are checked and passed through."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Globs over names of the base model's parameters that are not trained."""
        return ("*",) if self.lora is not None else self.freeze

    @property
    def data_size(self) -> int:
        """Data parallel size, configured or derived."""
        return self.data or max(1, self.world_size // (self.tensor * self.context * self.pipeline))

    @property
    def expert_tensor_size(self) -> int:
        """Expert tensor parallel size, configured or Megatron-LM's default."""
        return self.expert_tensor or self.tensor

    def _faults(self) -> Faults:
        for key, instead in NOT_PASSED.items():
            if self.megatron.get(key) not in (None, False, 0, "none"):
                about = f"trainer.megatron.{key}"
                yield "trainer.megatron", about, f"{about} is not passed through; {instead}"
        yield from self._layout_faults()

    def _layout_faults(self) -> Faults:
        product = self.tensor * self.pipeline * self.context * self.data_size
        if product != self.world_size:
            yield (
                "trainer.world_size",
                "trainer.world_size",
                f"trainer.world_size is {self.world_size}, but tensor {self.tensor} x pipeline {self.pipeline} x "
                f"context {self.context} x data {self.data_size} = {product}; set trainer.world_size={product} or "
                "change one of the sizes",
            )
        experts = self.expert * self.expert_tensor_size
        stage = self.tensor * self.context * self.data_size
        if product == self.world_size and stage % experts:
            fitting = []
            for size in range(1, stage + 1):
                if stage % (size * self.expert_tensor_size) == 0:
                    fitting.append(size)
            nearest = min(fitting or [1], key=lambda n: (abs(n - self.expert), n))
            remedy = f"trainer.expert={nearest}"
            if not fitting:
                remedy += " with trainer.expert_tensor=1"
            yield (
                "trainer.expert",
                "trainer.expert",
                f"trainer.expert {self.expert} x trainer.expert_tensor {self.expert_tensor_size} = {experts} does not "
                f"divide the {stage} ranks of a pipeline stage (tensor x context x data); the nearest that does is "
                f"{remedy}",
            )
        if self.expert == 1 and self.expert_tensor_size != self.tensor:
            # megatron-core 0.19.2 then reduces experts over separate groups, but layout and memory plan treat experts
            # as dense layers if EP is 1.
            yield (
                "trainer.expert_tensor",
                "trainer.expert_tensor",
                f"trainer.expert is 1 but trainer.expert_tensor {self.expert_tensor_size} differs from trainer.tensor "
                f"{self.tensor}; experts that are sharded differently from dense layers need expert parallelism: "
                "set trainer.expert_tensor=null",
            )
