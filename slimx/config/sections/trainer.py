"""Section trainer: the layout over ranks, memory, routing and the optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slimx.config.section import Amount, Count, Faults, PathText, Positive, Seconds, Section, Share, Size, Weight

CYCLE = 5
"""Iterations after which the coefficients of Newton-Schulz begin anew (`quintic` of emerging-optimizers)."""


class Muon(Section):
    """Momentum that is orthogonalised before it is applied (megatron-core's Muon)."""

    momentum: Share = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    steps: Size = CYCLE
    """Newton-Schulz iterations that orthogonalise a matrix: a multiple of 5, since each of five in turn has its own
    coefficients (`quintic`)."""
    scale: Positive = 0.2
    """An update is this times sqrt(max(rows, columns)) times the orthogonalised momentum: 0.2 is about as large as
    Adam's, so that a learning rate holds for both (arXiv:2502.16982)."""
    split_qkv: bool = True
    """Orthogonalise queries, keys and values each by themselves."""

    def _faults(self) -> Faults:
        if self.steps % CYCLE:
            yield (
                "muon.steps",
                "trainer.optimizer.muon.steps",
                f"trainer.optimizer.muon.steps is {self.steps}, no multiple of {CYCLE}: its {CYCLE} iterations have "
                "coefficients of their own, and after a part of them singular values are far from 1 (after 6 below "
                f"0.2); set it to {CYCLE}",
            )


class Optimizer(Section):
    kind: Literal["adam", "muon"] = "adam"
    """adam: of all parameters; muon: of matrices, with Adam for embeddings, output layer, norms and biases."""
    muon: Muon = Muon()
    lr: Positive = 1e-6
    """Peak learning rate."""
    min_lr: Weight = 0.0
    """Learning rate at the end of the decay."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape from lr to min_lr."""
    warmup_steps: Count = 0
    """Optimizer updates of linear warm-up from 0."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay (not on norms and biases)."""
    no_weight_decay: tuple[str, ...] = ()
    """Globs over Megatron or Hugging Face names of further parameters without weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Adam's moment decay rates."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    clip_grad: Weight = 1.0
    """Global gradient norm above which gradients are scaled; 0: never."""
    max_skipped: Count = 3
    """Optimizer steps in a row that may be skipped because a gradient is infinite or not a number; the run stops at the
    last of them; 0: never."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of Adam's moments between steps, which compute in fp32. bfloat16: half their memory; DeepSeek-V3 was
    trained so, with fp32 main weights (arXiv:2412.19437, 3.3.3). Needs Transformer Engine's Adam (CUDA) and
    trainer.distributed_optimizer; never ran on a GPU here, hence not the default."""
    offload_fraction: Share = 0.0
    """Share of Adam's moments that lies in (pinned) host memory and visits the device in pieces of 512 MiB at each
    step."""


OffloadedModule = Literal["core_attn", "attn_proj", "expert_fc1", "moe_act"]
"""megatron-core's names of parts of a layer whose inputs can be moved to the host."""


class Recompute(Section):
    """Parts of the forward pass that the backward pass computes again instead of keeping them."""

    granularity: Literal["none", "selective", "full"] = "none"
    """none: keep all activations; selective: compute `modules` again; full: keep only layers' inputs."""
    modules: tuple[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], ...] = (
        "core_attn",
    )
    """Parts of a layer that selective recomputation covers."""
    method: Literal["uniform", "block"] = "uniform"
    """full: uniform covers all layers, in units of `layers`; block only the first `layers` of a stage."""
    layers: Amount = 1
    """full: layers of a unit (uniform) or layers covered (block)."""


class Moe(Section):
    """Routing: how tokens choose and reach their experts (docs/concepts.md explains each term)."""

    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """alltoall: collectives of torch.distributed; flex: kernels of `flex_backend` (CUDA)."""
    flex_backend: Literal["deepep", "hybridep"] = "deepep"
    """Library behind the flex dispatcher; hybridep spans NVLink domains of GB300."""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """Experts of a training pass. none: the router's own choice; R2: what it chose under the weights before the step's
    first update (one more forward pass); R3: what the engine chose."""
    aux_loss_coef: Weight = 0.0
    """Weight of each MoE layer's load-balancing loss; 0: none."""
    aux_loss_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "seq_aux_loss"
    """Tokens over which load is balanced: aux_loss a micro-batch, seq_aux_loss each sequence, global_aux_loss all
    micro-batches of the update so far."""
    z_loss_coef: Weight = 0.0
    """Weight of each MoE layer's mean squared logsumexp of the router's logits; 0: none."""
    bias_update_rate: Weight = 0.0
    """Step of each expert's selection bias towards equal load, after every update; 0: none."""

    def _faults(self) -> Faults:
        if self.aux_loss_type != type(self).model_fields["aux_loss_type"].default and not self.aux_loss_coef:
            yield (
                "routing.aux_loss_type",
                "trainer.moe.aux_loss_type",
                f"trainer.moe.aux_loss_type is {self.aux_loss_type}, but trainer.moe.aux_loss_coef is 0 and nothing is "
                "balanced; give the coefficient, or leave the type out",
            )


class Lora(Section):
    """Low-rank adapters: the base stays as it is, and engines compute with base + alpha / rank * B A, merged or not
    (publish.adapters)."""

    rank: Size
    """Rows of A and columns of B."""
    alpha: Positive
    """Numerator of the scale alpha / rank."""
    targets: tuple[Literal["attention", "mlp", "shared_experts", "experts", "router"], ...] | None = None
    """Layers with adapters: attention (all of its projections), mlp (of dense layers), shared_experts, experts (routed
    ones), router; null: all of these that the model has, but no router."""
    load: PathText | None = None
    """Directory of adapters in PEFT's format to begin with, of the same targets; null: new ones. Where its q, k and v,
    or gate and up, have an A each, rank and alpha are two or three times its own; `slimx plan` names them."""


_FP8 = "set trainer.fp8, whose layers and blocks are checked against publications"
_PRECISION = "its log-probs and publications were never compared with an engine's; set trainer.fp8, or leave it out"
_SHARDS = "ranks are planned without such shards; set trainer.tensor, and trainer.distributed_optimizer for the state"
_OTHER_WEIGHTS = "it builds layers whose weights checkpoints and publications do not know; leave it out"
_INTERLEAVED = "it mixes the rows of gate and up, which checkpoints and engines hold in two blocks; leave it out"
_DROPPED = "it drops tokens that engines compute, so that log-probs differ; bound trainer.max_tokens_per_microbatch"
_FIRST_PASS = "it holds from the second pass on, and each is a first one here; name fewer parts in "
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
    "moe_router_padding_for_fp8": "it sends tokens to experts that engines do not choose; leave it out",
    "moe_router_padding_for_quantization": "it sends tokens to experts that engines do not choose; leave it out",
    "fine_grained_activation_offloading": "set trainer.offload_activations",
    "offload_modules": "set trainer.offload_activations",
    "activation_offload_fraction": _FIRST_PASS,
    "delta_offload_bytes_across_pp_ranks": _FIRST_PASS,
    "cpu_offloading": "it moves whole layers and was never proven here; set trainer.offload_activations",
    "moe_router_fusion": "a fused router can be neither recorded nor replayed",
    "moe_router_force_biased": "it replaces the routers' choice by noise; leave it out",
    "overlap_moe_expert_parallel_comm": "its schedule takes layers apart, and their routers would lose their batch",
    "cuda_graph_impl": "a captured router would see the first micro-batch for ever",
    "enable_cuda_graph": "a captured router would see the first micro-batch for ever",
    "external_cuda_graph": "a captured router would see the first micro-batch for ever",
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
    "use_mup": "it scales embeddings, attention and logits, which engines do not; leave it out",
    "tensor_parallel_num_weight_shards": _SHARDS,
    "gtp_weight_remat_size": _SHARDS,
    "expert_tensor_parallel_num_weight_shards": _SHARDS,
    "expert_gtp_weight_remat_size": _SHARDS,
    "mtp_use_repeated_layer": "every prediction layer has weights of its own in checkpoints and engines; leave it out",
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
"""Fields of megatron-core's TransformerConfig that `trainer.megatron` must not set, with the reason or what to do
instead: those that follow keys of slimx, those that routing has to itself, and those that would change what is
computed, published or saved unnoticed, such as precision, names and shapes of weights."""


class RankLayout(Section):
    """Parallel sizes of a model that is trained on ranks of its own."""

    world_size: Size = 1
    """Number of ranks (processes; one GPU each on CUDA)."""
    tensor: Size = 1
    """Tensor parallel size (TP); sequence parallel follows it."""
    pipeline: Size = 1
    """Pipeline parallel size (PP)."""
    virtual_pipeline: Size = 1
    """Model chunks of each pipeline rank, interleaved (VPP): smaller bubbles, more messages."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Decoder layers of each stage, pipeline x virtual_pipeline numbers in the order of the forward pass; null:
    equal."""
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
    and slimx itself; null: model.path."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over DP ranks."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over DP and CP ranks bucket by bucket while the last micro-batch's backward pass goes on; null:
    where Transformer Engine computes the layers and there are several such ranks."""
    overlap_param_gather: bool = False
    """Between the updates of one step gather updated weights over DP and CP ranks bucket by bucket, beside the forward
    pass that reads them. Megatron-LM's guides turn it on, for there a forward pass follows every update; here the
    last update of a step is followed by a publication, so it hides (updates_per_step - 1) gathers of a step."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and sum gradients in fp32, as slime's scripts do; false: in the model's dtype, in half the memory and
    half the bytes between ranks, rounded to 8 bits at every micro-batch and every sum."""
    grad_bucket_elements: Amount | None = None
    """Gradients of a bucket, at least; null: megatron-core's choice, the larger of 40 million and 1 million for each of
    these ranks."""
    max_tokens_per_microbatch: Amount = 8192
    """Tokens packed into one forward pass, at most."""
    balance: Literal["tokens", "flops"] = "flops"
    """Measure by which DP ranks and micro-batches get equal amounts: tokens, or FLOPs by the model's sizes (a n + b n^2
    for a sequence of n tokens)."""
    logprob_chunk_tokens: Amount | None = None
    """Tokens of a rank whose logits exist at once, in forward and backward; null: as many as make 256 MiB of fp32
    logits, at least 128."""
    attention: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Kernel of the attention: flash (flash-attn; on Hopper FlashAttention 4, a beta, unless FlashAttention 3 is
    installed), fused (cuDNN), unfused (Transformer Engine's own, or torch without it); auto: the fastest that the
    machine has."""
    moe: Moe = Moe()
    indexer_replay: Literal["none", "R2", "R3"] = "none"
    """Tokens that sparse attention (DSA) sees in a training pass. none: the indexer's own choice; R2: what it chose
    under the weights before the step's first update (one more forward pass); R3, what the engine chose, is refused."""
    recompute: Recompute = Recompute()
    offload_activations: tuple[OffloadedModule, ...] = ()
    """Parts of a layer whose saved tensors wait in pinned host memory from the forward to the backward pass (those of
    2**20 elements and more): core_attn (queries, keys, values), attn_proj (the attention's output), expert_fc1 (tokens
    as experts get them), moe_act (experts' first product). Needs CUDA and Transformer Engine; never ran on a GPU."""
    threads: Size = 1
    """CPU threads of one trainer rank."""
    deadline: Seconds = 1800
    """Seconds that one call to all trainer ranks may take."""
    watch_deadline: Seconds = 60
    """Seconds that a rank may be silent between two calls, or stopped; then the run ends and names it, unless
    `recovery.trainers` replaces it."""
    offload: bool = True
    """With schedule.colocate: weights, gradients and optimizer state leave the device for (pinned) host memory while
    engines generate."""
    memory_margin_mib: Count = 1024
    """MiB of GPU memory that must be free before a training step; below it the caches are freed, then the run stops and
    names the biggest holders; 0: no check (nor on the CPU)."""
    freeze: tuple[str, ...] = ()
    """Globs over Megatron or Hugging Face names of parameters that are not trained, such as '*.mlp.gate.weight'; they
    still publish and stand in checkpoints."""
    qat: Literal["int4"] | None = None
    """int4: the model computes with routed experts rounded to INT4, in groups of 32 columns (docs/numerics.md), and the
    optimizer's fp32 weights, which stay unrounded, get the gradients as they are; engines get the rounded values;
    null: none."""
    fp8: Literal["blockwise", "mxfp8"] | None = None
    """Matrix products of the linear layers in fp8 (e4m3), weights and optimizer unchanged. blockwise: weights in blocks
    of 128 x 128, inputs and gradients of 1 x 128, fp32 scales (Hopper); mxfp8: 1 x 32 with scales of powers of two
    (Blackwell); null: in the model's dtype."""
    lora: Lora | None = None
    """Train low-rank adapters (LoRA) instead of the weights; null: none."""
    optimizer: Optimizer = Optimizer()
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, passed through after a check."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Globs over names of the base model's parameters that are not trained."""
        return ("*",) if self.lora is not None else self.freeze

    @property
    def data_size(self) -> int:
        """Data parallel size, given or derived."""
        return self.data or max(1, self.world_size // (self.tensor * self.context * self.pipeline))

    @property
    def expert_tensor_size(self) -> int:
        """Expert tensor parallel size, given or Megatron's default."""
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
            fitting = [n for n in range(1, stage + 1) if stage % (n * self.expert_tensor_size) == 0]
            nearest = min(fitting or [1], key=lambda n: (abs(n - self.expert), n))
            yield (
                "trainer.expert",
                "trainer.expert",
                f"trainer.expert {self.expert} x trainer.expert_tensor {self.expert_tensor_size} = {experts} does not "
                f"divide the {stage} ranks of a pipeline stage (tensor x context x data); the nearest that does is "
                f"trainer.expert={nearest}" + ("" if fitting else " with trainer.expert_tensor=1"),
            )
        if self.expert == 1 and self.expert_tensor_size != self.tensor:
            # megatron-core 0.19.2 then reduces experts over groups of their own; here they count as dense layers if EP
            # is 1 (layout, memory plan).
            yield (
                "trainer.expert_tensor",
                "trainer.expert_tensor",
                f"trainer.expert is 1 but trainer.expert_tensor {self.expert_tensor_size} differs from trainer.tensor "
                f"{self.tensor}; experts that are cut otherwise than the dense layers need expert parallelism here: "
                "set trainer.expert_tensor=null",
            )
