"""Section `trainer`: parallel layout, memory, routing, adapters, images and optimizer."""

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
from slimx.errors import counted

CYCLE = 5
"""Number of Newton-Schulz iterations with different coefficients, after which the coefficients repeat (`quintic` of
emerging-optimizers)."""


class Muon(Section):
    """Parameters of megatron-core's Muon optimizer, which orthogonalizes the momentum before applying it."""

    momentum: Share = 0.95
    """Decay rate of the momentum, between 0 and 1."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    steps: Size = CYCLE
    """Number of Newton-Schulz iterations that orthogonalize a matrix. Must be a multiple of 5, because the coefficients
    (`quintic`) differ between iterations and repeat every 5 iterations."""
    scale: Positive = 0.2
    """Scale of an update, which is this factor times sqrt(max(rows, columns)) times the orthogonalized momentum. With
    0.2, updates are about as large as Adam's, so the same learning rate suits both (arXiv:2502.16982)."""
    split_qkv: bool = True
    """Orthogonalize the query, key and value projections separately."""

    def _faults(self) -> Faults:
        if self.steps % CYCLE:
            yield (
                "muon.steps",
                "trainer.optimizer.muon.steps",
                f"trainer.optimizer.muon.steps is {self.steps}, which is not a multiple of {CYCLE}, but each of "
                f"{CYCLE} iterations has different coefficients, and an incomplete cycle leaves singular values far "
                f"from 1 (below 0.2 after 6); set it to {CYCLE}",
            )


class Optimizer(Section):
    kind: Literal["adam", "muon"] = "adam"
    """Optimizer. adam: Adam for all parameters; muon: Muon for matrices, Adam for embeddings, output layer, norms and
    biases."""
    muon: Muon = Muon()
    lr: Positive = 1e-6
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: Weight = 0.0
    """Learning rate at the end of the decay (`decay`)."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay from lr to min_lr over the run; constant: no decay."""
    warmup_steps: Count = 0
    """Number of optimizer updates over which the learning rate increases linearly from 0; 0: no warm-up."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay; it is not applied to norms and biases."""
    no_weight_decay: tuple[str, ...] = ()
    """Globs over the Megatron or Hugging Face names of additional parameters to exclude from weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates (beta1, beta2) of Adam's first and second moments."""
    eps: Positive = 1e-8
    """Adam's epsilon, which is added to the denominator of an update."""
    clip_grad: Weight = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping."""
    max_skipped: Count = 3
    """Number of consecutive optimizer steps after which the run stops with an error if all of them were skipped because
    of infinite or NaN gradients; 0: it never stops for this reason."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which Adam's moments are stored between steps; a step always computes in fp32. bfloat16 halves their
    memory, as in DeepSeek-V3's training (arXiv:2412.19437, 3.3.3). Needs CUDA, Transformer Engine's Adam and
    trainer.distributed_optimizer. Not yet tested on a GPU."""
    offload_fraction: Share = 0.0
    """Fraction of Adam's moments that is kept in (pinned) host memory. Each step copies them to the GPU and back in
    pieces of 512 MiB."""


OffloadedModule = Literal["core_attn", "attn_proj", "expert_fc1", "moe_act"]
"""Part of a layer whose inputs can be offloaded to host memory, by its name in megatron-core."""


class Recompute(Section):
    """Activation recomputation (checkpointing): activations that are computed again in the backward pass instead of
    being kept in memory."""

    granularity: Literal["none", "selective", "full"] = "none"
    """Extent of recomputation. none: keep all activations; selective: recompute the parts of each layer in `modules`;
    full: keep only the layers' inputs."""
    modules: tuple[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], ...] = (
        "core_attn",
    )
    """Parts of a layer that selective recomputation covers."""
    method: Literal["uniform", "block"] = "uniform"
    """Layers that full recomputation covers. uniform: all layers, in units of `layers`; block: only the first `layers`
    of each pipeline stage."""
    layers: Amount = 1
    """Full recomputation: number of layers per recomputed unit (uniform), or of recomputed layers per pipeline stage
    (block)."""


class Moe(Section):
    """Routing of tokens to experts in mixture-of-experts (MoE) layers (docs/trainer.md explains each term)."""

    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """Exchange of tokens between expert-parallel ranks. alltoall: all-to-all collectives of torch.distributed; flex:
    the kernels of `flex_backend` (CUDA)."""
    flex_backend: Literal["deepep", "hybridep"] = "deepep"
    """Library of the flex dispatcher; hybridep can span the NVLink domains of GB300."""
    routing_replay: Literal["none", "R2", "R3"] = "none"
    """Experts that tokens are routed to in training. none: those that the trainer's router chooses; R2: those that it
    chose under the weights before the step's first update (one more forward pass); R3: those that the engine chose."""
    aux_loss_coef: Weight = 0.0
    """Weight of the load-balancing loss of each MoE layer; 0: none."""
    aux_loss_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "seq_aux_loss"
    """Tokens over which the load-balancing loss is computed. aux_loss: a micro-batch; seq_aux_loss: each sequence;
    global_aux_loss: all micro-batches of the update so far."""
    z_loss_coef: Weight = 0.0
    """Weight of the z-loss of each MoE layer, the mean squared logsumexp of the router's logits; 0: none."""
    bias_update_rate: Weight = 0.0
    """Amount by which each expert's selection bias is changed after every update, to balance the load without an
    auxiliary loss; 0: the bias is fixed."""

    def _faults(self) -> Faults:
        if self.aux_loss_type != type(self).model_fields["aux_loss_type"].default and not self.aux_loss_coef:
            yield (
                "routing.aux_loss_type",
                "trainer.moe.aux_loss_type",
                f"trainer.moe.aux_loss_type is {self.aux_loss_type}, but trainer.moe.aux_loss_coef is 0, so nothing is "
                "balanced; set trainer.moe.aux_loss_coef, or remove aux_loss_type",
            )


class Lora(Section):
    """Low-rank adapters (LoRA). The base weights are not trained. Engines compute with base + alpha / rank * B A and
    receive the adapters either merged into the base weights or separately (publish.adapters)."""

    rank: Size
    """Rank of the adapters: number of rows of A and of columns of B."""
    alpha: Positive
    """Numerator of the scale alpha / rank, by which the product B A is multiplied."""
    targets: tuple[Literal["attention", "mlp", "shared_experts", "experts", "router"], ...] | None = None
    """Layers with adapters: attention (all of its projections), mlp (dense layers), shared_experts, experts (routed
    experts), router; null: all of these that the model has, except the router."""
    load: PathText | None = None
    """Directory of initial adapters in PEFT format, with the same targets; null: newly initialized adapters.
    Projections that slimx stacks into one layer, such as query, key and value, need two or three times the directory's
    rank and alpha; `slimx plan` prints the values to set."""


class Vision(Section):
    """Images in prompts. The ranks of the first pipeline stage compute their embeddings with the vision tower."""

    train: Literal["none", "projector", "tower"] = "none"
    """Parts of the vision tower to train. none: the tower is frozen; projector: the layers that map its output to the
    language model's embeddings; tower: all of it."""
    lr_scale: Positive = 1.0
    """Factor by which the learning rate of the tower's trained parameters differs from trainer.optimizer.lr."""
    min_pixels: Amount | None = None
    """Number of pixels to which smaller images are enlarged; null: the processor's value in the model's directory."""
    max_pixels: Amount | None = None
    """Number of pixels to which larger images are reduced; null: the processor's value in the model's directory."""
    processes: Size = 2
    """Number of processes on the driver's machine that prepare images."""


class RankLayout(Section):
    """Parallel sizes of a model that is trained on a separate set of ranks."""

    world_size: Size = 1
    """Number of ranks (processes); on CUDA, each has one GPU."""
    tensor: Size = 1
    """Tensor parallel size (TP). Sequence parallelism is enabled if it is above 1."""
    pipeline: Size = 1
    """Pipeline parallel size (PP): number of stages into which the layers are divided."""
    virtual_pipeline: Size = 1
    """Number of model chunks per pipeline rank in the interleaved schedule (VPP). More chunks mean smaller bubbles and
    more messages."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Number of decoder layers in each stage: pipeline x virtual_pipeline numbers, in the order of the forward pass;
    null: layers are divided equally."""
    context: Size = 1
    """Context parallel size (CP): number of ranks that share each sequence, in zigzag order."""
    data: Size | None = None
    """Data parallel size (DP); null: world_size / (tensor x pipeline x context)."""
    expert: Size = 1
    """Expert parallel size (EP): number of ranks over which the routed experts are distributed."""
    expert_tensor: Size | None = None
    """Tensor parallel size of routed experts (ETP); null: that of the other layers (TP), as in Megatron-LM."""


class Trainer(RankLayout):
    load: PathText | None = None
    """Initial weights: a Hugging Face directory, or a Megatron-LM checkpoint (torch_dist) such as those written by
    slime, Miles and slimx; null: model.path."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel (DP) ranks."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over DP and CP ranks bucket by bucket, during the backward pass of the last micro-batch; null:
    true if Transformer Engine computes the layers and there are several such ranks."""
    overlap_param_gather: bool = False
    """Gather updated weights over DP and CP ranks bucket by bucket, during the forward pass that reads them. This hides
    updates_per_step - 1 gathers per step; the last gather must finish before weights are published."""
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32, as slime's scripts do. false: in the model's data type; with bf16, this
    halves gradient memory and communication, but rounds to 8 significant bits at every micro-batch and every
    reduction."""
    grad_bucket_elements: Amount | None = None
    """Minimum number of gradient elements per bucket; null: megatron-core's choice, the larger of 40 million and 1
    million times the number of DP x CP ranks."""
    max_tokens_per_microbatch: Amount = 8192
    """Maximum number of tokens that are packed into one micro-batch."""
    balance: Literal["tokens", "flops"] = "flops"
    """Quantity that is balanced over DP ranks and micro-batches. tokens: number of tokens; flops: FLOPs, estimated as a
    n + b n^2 for a sequence of n tokens, where a and b follow from the model's sizes."""
    logprob_chunk_tokens: Amount | None = None
    """Maximum number of tokens per rank whose logits are in memory at the same time, in the forward and backward
    passes; null: as many as fit into 256 MiB of fp32 logits, but at least 128."""
    attention: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Attention kernel. flash: flash-attn (on Hopper: FlashAttention 3 if it is installed, otherwise FlashAttention 4,
    a beta version); fused: cuDNN; unfused: Transformer Engine's unfused attention, or torch's without it; auto: the
    fastest that is available."""
    moe: Moe = Moe()
    vision: Vision | None = None
    indexer_replay: Literal["none", "R2", "R3"] = "none"
    """Tokens that sparse attention (DSA) attends to in training. none: those that the trainer's indexer chooses; R2:
    those that it chose under the weights before the step's first update (one more forward pass). R3, the engine's
    choice, is not supported."""
    recompute: Recompute = Recompute()
    offload_activations: tuple[OffloadedModule, ...] = ()
    """Parts of a layer whose saved tensors are moved to pinned host memory until the backward pass: core_attn,
    attn_proj, expert_fc1, moe_act. Needs CUDA and Transformer Engine. Not yet tested on a GPU (docs/trainer.md)."""
    threads: Size = 1
    """CPU threads per trainer rank, which Ray reserves."""
    deadline: Seconds = 1800
    """Seconds within which one call to all trainer ranks must return."""
    watch_deadline: Seconds = 60
    """Maximum time in seconds for which a rank may be stopped or, between two calls, silent. After that the run ends
    with an error that names the rank, unless `recovery.trainers` replaces the rank."""
    offload: bool = True
    """With schedule.colocate, move weights, gradients and optimizer state to (pinned) host memory while engines
    generate."""
    memory_margin_mib: Count = 1024
    """GPU memory in MiB that must be free before a training step. If less is free, caches are released; if that does
    not suffice, the run stops with an error that lists the largest users. 0: no check."""
    freeze: tuple[str, ...] = ()
    """Globs over Megatron or Hugging Face names of parameters that are not trained, such as '*.mlp.gate.weight'. They
    are still published and saved in checkpoints."""
    qat: Literal["int4"] | None = None
    """Quantization-aware training. int4: routed experts are rounded to INT4 in groups of 32 columns, in training and in
    the engines (docs/numerics.md); the optimizer's fp32 master weights are not rounded and receive the gradients
    unchanged. null: none."""
    fp8: Literal["blockwise", "mxfp8"] | None = None
    """Data type fp8 (e4m3) for the matrix products of linear layers. blockwise: weights in blocks of 128 x 128, inputs
    and gradients in blocks of 1 x 128, with fp32 scales (Hopper); mxfp8: blocks of 1 x 32, with power-of-two scales
    (Blackwell); null: the model's data type."""
    lora: Lora | None = None
    """Low-rank adapters (LoRA) to train instead of the weights; null: train the weights."""
    optimizer: Optimizer = Optimizer()
    megatron: Options = Field(default_factory=dict)
    """Additional fields of megatron-core's TransformerConfig, which are validated and passed through."""

    @property
    def frozen(self) -> tuple[str, ...]:
        """Globs over the names of base-model parameters that are not trained; with LoRA, a glob that matches all of
        them."""
        return ("*",) if self.lora is not None else self.freeze

    @property
    def data_size(self) -> int:
        """Data parallel size: the configured one, or the one that follows from world_size and the other sizes."""
        return self.data or max(1, self.world_size // (self.tensor * self.context * self.pipeline))

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of routed experts: the configured one, or Megatron-LM's default, `tensor`."""
        return self.expert_tensor or self.tensor

    def _faults(self) -> Faults:
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
            quotient, rest = divmod(stage, self.expert_tensor_size)
            remedy = f"trainer.expert={nearest_divisor(1 if rest else quotient, self.expert)}"
            if rest:
                remedy += " with trainer.expert_tensor=1"
            yield (
                "trainer.expert",
                "trainer.expert",
                f"trainer.expert {self.expert} x trainer.expert_tensor {self.expert_tensor_size} = {experts} does not "
                f"divide the {counted(stage, 'rank')} of a pipeline stage (tensor x context x data); change "
                f"trainer.world_size, or use the nearest valid setting, {remedy}",
            )
        if self.expert == 1 and self.expert_tensor_size != self.tensor:
            # megatron-core 0.19.2 reduces such experts over separate groups, but layout and memory plan treat experts
            # as dense layers if EP is 1.
            yield (
                "trainer.expert_tensor",
                "trainer.expert_tensor",
                f"trainer.expert is 1 but trainer.expert_tensor {self.expert_tensor_size} differs from trainer.tensor "
                f"{self.tensor}; experts that are sharded differently from dense layers need expert parallelism: "
                "set trainer.expert_tensor=null",
            )


def nearest_divisor(count: int, size: int) -> int:
    """Returns the divisor of `count` that is nearest to `size`."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return min(divisors, key=lambda n: (abs(n - size), n))
