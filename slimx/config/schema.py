"""The configuration of one run: one typed model per section, every field described with its unit.

`slimx train FILE section.key=value` fills these models; an unknown key is refused with the nearest known one
(`slimx.config.load`). Checks that need only the configuration itself live here as validators; checks that need
files, checkpoints or hooks live in `slimx.preflight`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]

MAX_SUPPORT = 4096
"""Candidates that an engine reports for a token sampled under top-k or top-p (SGLang's sampling_mask_max_tokens)."""


class Section(BaseModel):
    """A section refuses keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field("run", description="name of the run in trackers and the report")
    dir: str = Field(description="directory that holds everything the run writes")
    seed: int = Field(1, ge=0, description="seed of prompt order, sampling and initialisation")
    resume: Literal["auto", "never", "must"] = Field(
        "auto", description="auto: continue from the newest complete checkpoint in `run.dir` if there is one"
    )


class Model(Section):
    path: str = Field(description="Hugging Face directory: config.json, tokenizer and safetensors")


class Numerics(Section):
    mode: Literal["fast"] = Field("fast", description="fast: stock kernels on both sides, the gap is measured")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of parameters and activations")
    router_dtype: Literal["float32"] = Field("float32", description="dtype of the router's logits and softmax")


class Cluster(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU, else cpu")
    ray_address: str | None = Field(None, description="address of a running Ray cluster; null starts a local one")
    start_deadline: PositiveFloat = Field(300, description="seconds until Ray, trainers and engines must be up")
    affinity: Literal["auto", "none"] = Field(
        "auto", description="auto: each trainer rank runs on the CPUs next to its GPU (NVML); none: anywhere"
    )


class Optimizer(Section):
    lr: PositiveFloat = Field(1e-6, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the decay")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="shape from lr to min_lr")
    warmup_steps: Count = Field(0, description="optimizer updates of linear warm-up from 0")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay (not on norms and biases)")
    no_weight_decay: tuple[str, ...] = Field(
        (), description="globs over Megatron or Hugging Face names of further parameters without weight decay"
    )
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="Adam's moment decay rates")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    clip_grad: float = Field(1.0, ge=0, description="global gradient norm above which gradients are scaled; 0: never")
    max_skipped: Count = Field(
        3,
        description="optimizer steps in a row that may be skipped because a gradient is infinite or not a number; the "
        "run stops at the last of them; 0: never",
    )
    offload: Share = Field(
        0.0,
        description="share of Adam's moments that lies in (pinned) host memory and visits the device in pieces of 512 "
        "MiB at each step",
    )


class Recompute(Section):
    """What the backward pass computes again instead of keeping it."""

    granularity: Literal["none", "selective", "full"] = Field(
        "none",
        description="none: keep all activations; selective: compute `modules` again; full: keep only layers' inputs",
    )
    modules: tuple[Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"], ...] = (
        Field(("core_attn",), description="parts of a layer that selective recomputation covers")
    )
    method: Literal["uniform", "block"] = Field(
        "uniform",
        description="full: uniform covers all layers, in units of `layers`; block only the first `layers` of a stage",
    )
    layers: PositiveInt = Field(1, description="full: layers of a unit (uniform) or layers covered (block)")


class Moe(Section):
    """How tokens choose and reach their experts (docs/concepts.md says what each term is)."""

    dispatcher: Literal["alltoall", "flex"] = Field(
        "alltoall", description="alltoall: collectives of torch.distributed; flex: kernels of `flex_backend` (CUDA)"
    )
    flex_backend: Literal["deepep", "hybridep"] = Field(
        "deepep", description="library behind the flex dispatcher; hybridep spans NVLink domains of GB300"
    )
    replay: Literal["none", "R2", "R3"] = Field(
        "none",
        description="experts of a training pass. none: the router's own choice; R2: what it chose under the weights "
        "before the step's first update (one more forward pass); R3: what the engine chose",
    )
    aux_loss_coef: float = Field(0.0, ge=0, description="weight of each MoE layer's load-balancing loss; 0: none")
    aux_loss_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = Field(
        "seq_aux_loss",
        description="tokens over which load is balanced: aux_loss a micro-batch, seq_aux_loss each sequence, "
        "global_aux_loss all micro-batches of the update so far",
    )
    z_loss_coef: float = Field(
        0.0, ge=0, description="weight of each MoE layer's mean squared logsumexp of the router's logits; 0: none"
    )
    bias_update_rate: float = Field(
        0.0, ge=0, description="step of each expert's selection bias towards equal load, after every update; 0: none"
    )


_ROUTING = {
    "moe_aux_loss_coeff": "set trainer.moe.aux_loss_coef",
    "moe_router_load_balancing_type": "set trainer.moe.aux_loss_type",
    "moe_z_loss_coeff": "set trainer.moe.z_loss_coef",
    "moe_router_bias_update_rate": "set trainer.moe.bias_update_rate",
    "moe_enable_routing_replay": "set trainer.moe.replay",
    "moe_router_fusion": "a fused router can be neither recorded nor replayed",
    "overlap_moe_expert_parallel_comm": "its schedule takes layers apart, and their routers would lose their batch",
    "cuda_graph_impl": "a captured router would see the first micro-batch for ever",
    "enable_cuda_graph": "a captured router would see the first micro-batch for ever",
    "external_cuda_graph": "a captured router would see the first micro-batch for ever",
}
"""Fields of megatron-core's TransformerConfig that routing has to itself, and what a user does instead."""


class Trainer(Section):
    load: str | None = Field(
        None,
        description="initial weights: a Hugging Face directory, or a Megatron-LM checkpoint (torch_dist) such as those "
        "of slime, Miles and slimx itself; null: model.path",
    )
    world_size: PositiveInt = Field(1, description="number of trainer ranks (processes; one GPU each on CUDA)")
    tensor: PositiveInt = Field(1, description="tensor parallel size (TP); sequence parallel follows it")
    pipeline: PositiveInt = Field(1, description="pipeline parallel size (PP)")
    virtual_pipeline: PositiveInt = Field(
        1, description="model chunks of each pipeline rank, interleaved (VPP): smaller bubbles, more messages"
    )
    layers_per_stage: tuple[Count, ...] | None = Field(
        None,
        description="decoder layers of each stage, pipeline x virtual_pipeline numbers in the order of the forward "
        "pass; null: equal",
    )
    context: PositiveInt = Field(
        1, description="context parallel size (CP): ranks that share each sequence, in zigzag halves"
    )
    data: PositiveInt | None = Field(None, description="data parallel size (DP); null: what remains of world_size")
    expert: PositiveInt = Field(1, description="expert parallel size (EP)")
    expert_tensor: PositiveInt | None = Field(
        None, description="tensor parallel size inside an expert (ETP); null: trainer.tensor, as in Megatron-LM"
    )
    distributed_optimizer: bool = Field(True, description="shard the optimizer's state over DP ranks")
    max_tokens_per_microbatch: PositiveInt = Field(8192, description="tokens packed into one forward pass, at most")
    balance: Literal["tokens", "flops"] = Field(
        "flops",
        description="what DP ranks and micro-batches get equal amounts of: tokens, or FLOPs by the model's sizes "
        "(a n + b n^2 for a sequence of n tokens)",
    )
    logprob_chunk_tokens: PositiveInt | None = Field(
        None,
        description="tokens of a rank whose logits exist at once, in forward and backward; null: as many as make 256 "
        "MiB of fp32 logits, at least 128",
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = Field(
        "auto",
        description="kernel of the attention: flash (flash-attn), fused (cuDNN), unfused (Transformer Engine's own, or "
        "torch without it); auto: the fastest that the machine has",
    )
    moe: Moe = Moe()
    recompute: Recompute = Recompute()
    threads: PositiveInt = Field(1, description="CPU threads of one trainer rank")
    deadline: PositiveFloat = Field(1800, description="seconds that one call to all trainer ranks may take")
    offload: bool = Field(
        True,
        description="with schedule.colocate: weights, gradients and optimizer state leave the device for (pinned) host "
        "memory while engines generate",
    )
    memory_margin_mib: Count = Field(
        1024,
        description="MiB of GPU memory that must be free before a training step; below it the caches are freed, then "
        "the run stops and names the biggest holders; 0: no check (nor on the CPU)",
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="globs over Megatron or Hugging Face names of parameters that are not trained, such as "
        "'*.mlp.gate.weight'; they still publish and stand in checkpoints",
    )
    optimizer: Optimizer = Optimizer()
    megatron: dict[str, Any] = Field(
        default_factory=dict, description="fields of megatron-core's TransformerConfig, passed through after a check"
    )

    @property
    def data_size(self) -> int:
        """Data parallel size, given or derived."""
        return self.data or max(1, self.world_size // (self.tensor * self.context * self.pipeline))

    @property
    def expert_tensor_size(self) -> int:
        """Expert tensor parallel size, given or Megatron's default."""
        return self.expert_tensor or self.tensor

    @model_validator(mode="after")
    def _routing(self) -> Trainer:
        for key, instead in _ROUTING.items():
            if self.megatron.get(key) not in (None, False, 0, "none"):
                raise ValueError(f"trainer.megatron.{key} is not passed through; {instead}")
        return self

    @model_validator(mode="after")
    def _layout(self) -> Trainer:
        product = self.tensor * self.pipeline * self.context * self.data_size
        if product != self.world_size:
            raise ValueError(
                f"trainer.world_size is {self.world_size}, but tensor {self.tensor} x pipeline {self.pipeline} x "
                f"context {self.context} x data {self.data_size} = {product}; set trainer.world_size={product} or "
                "change one of the sizes"
            )
        experts = self.expert * self.expert_tensor_size
        stage = self.tensor * self.context * self.data_size
        if stage % experts:
            fitting = [n for n in range(1, stage + 1) if stage % (n * self.expert_tensor_size) == 0]
            nearest = min(fitting or [1], key=lambda n: (abs(n - self.expert), n))
            raise ValueError(
                f"trainer.expert {self.expert} x trainer.expert_tensor {self.expert_tensor_size} = {experts} does not "
                f"divide the {stage} ranks of a pipeline stage (tensor x context x data); the nearest that does is "
                f"trainer.expert={nearest}" + ("" if fitting else " with trainer.expert_tensor=1")
            )
        if self.expert == 1 and self.expert_tensor_size != self.tensor:
            # megatron-core 0.16.1 marks expert weights for the expert groups only if EP > 1; otherwise their gradients
            # are summed over the dense DP ranks, which is wrong as soon as ETP differs from TP.
            raise ValueError(
                f"trainer.expert is 1 but trainer.expert_tensor {self.expert_tensor_size} differs from trainer.tensor "
                f"{self.tensor}; megatron-core would sum expert gradients over the wrong ranks: set "
                "trainer.expert_tensor=null"
            )
        return self


class Sampling(Section):
    temperature: float = Field(1.0, ge=0, description="softmax temperature; 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description=f"nucleus mass kept, of at most {MAX_SUPPORT} candidates"
    )
    top_k: int = Field(-1, ge=-1, description=f"candidates kept, at most {MAX_SUPPORT}; -1: all")
    max_new_tokens: PositiveInt = Field(1024, description="tokens sampled per turn, at most")
    stop_token_ids: tuple[int, ...] = Field((), description="extra ids that end a turn (the model's eos always does)")

    @model_validator(mode="after")
    def _supported(self) -> Sampling:
        if self.top_k == 0:
            raise ValueError(
                "rollout.sampling.top_k is 0, which keeps no candidate; use -1 for all or a positive count"
            )
        if self.top_k > MAX_SUPPORT:
            raise ValueError(
                f"rollout.sampling.top_k is {self.top_k}, but engines report at most {MAX_SUPPORT} kept candidates per "
                "token, which the trainer needs; lower it or use -1 for all"
            )
        return self


class Engines(Section):
    """A group of identical engine servers."""

    model: str | None = Field(
        None,
        description="Hugging Face directory that the servers start from, such as an fp8 copy of model.path; null: "
        "model.path",
    )
    name: str = Field("actor", description="name of the group in logs and metrics")
    count: PositiveInt = Field(1, description="number of servers in the group")
    max_total_tokens: PositiveInt | None = Field(None, description="KV-cache room in tokens; null: SGLang decides")
    threads: PositiveInt = Field(1, description="CPU threads of each rank of a server (CPU only)")
    tensor: PositiveInt = Field(1, description="tensor parallel size of a server (SGLang's tp_size)")
    expert: PositiveInt = Field(1, description="expert parallel size of a server (ep_size); divides tensor")
    pipeline: PositiveInt = Field(1, description="pipeline parallel size of a server (pp_size)")
    dp_attention: PositiveInt = Field(
        1, description="copies of the attention in a server (dp_size with enable_dp_attention); divides tensor"
    )
    sglang: dict[str, Any] = Field(
        default_factory=dict, description="fields of SGLang's ServerArgs, passed through after a check"
    )

    @property
    def ranks(self) -> int:
        """Ranks of one server: a GPU each on CUDA."""
        return self.tensor * self.pipeline


class Health(Section):
    interval: PositiveFloat = Field(5, description="seconds between two checks of /health_generate")
    timeout: PositiveFloat = Field(30, description="seconds that one check may take")
    threshold: PositiveInt = Field(
        3, description="failed checks in a row after which an engine is quarantined and started again"
    )
    restarts: Count = Field(
        2, description="times that each engine, and the courier of a transport, may be started again in a run; 0: never"
    )


class Rollout(Section):
    prompts: str = Field(description="JSONL file of prompts: {messages | token_ids, answer, metadata}")
    prompts_per_step: PositiveInt = Field(32, description="prompts (groups) trained per step")
    group_size: PositiveInt = Field(8, description="rollouts per prompt")
    generate: str = Field("slimx.rollout.single_turn.generate", description="dotted path of the data-generation hook")
    keep: str | None = Field(None, description="dotted path of the group filter: keep(group) -> bool | reason")
    engines: tuple[Engines, ...] = Field((Engines(),), description="groups of servers; empty: no generation (SFT)")
    sampling: Sampling = Sampling()
    max_prompt_tokens: PositiveInt = Field(1024, description="longer prompts are refused before the run starts")
    concurrency: PositiveInt = Field(256, description="rollouts in flight, at most")
    request_deadline: PositiveFloat = Field(600, description="seconds for one request to an engine")
    request_retries: Count = Field(2, description="times that a request is sent again when its engine was lost")
    rollout_deadline: PositiveFloat = Field(1800, description="seconds for one rollout, all turns and tools included")
    max_failed_share: Share = Field(0.1, description="share of a step's groups that may fail before the run stops")
    routed_experts: bool = Field(True, description="return each token's experts with the completion (MoE)")
    gap_probe: Count = Field(4, description="rollouts re-scored by an engine per step where no token is on-version")
    health: Health = Health()

    @model_validator(mode="after")
    def _engine_names(self) -> Rollout:
        names = [group.name for group in self.engines]
        if len(set(names)) < len(names):
            raise ValueError(f"rollout.engines names a group twice in {names}; give each group its own name")
        return self


class Reward(Section):
    function: str | None = Field("slimx.rewards.exact.reward", description="dotted path of the reward hook; null: none")
    deadline: PositiveFloat = Field(60, description="seconds for one reward call")
    workers: PositiveInt = Field(8, description="reward calls that run at once (threads)")


class Algorithm(Section):
    name: Literal["grpo", "ppo", "sft"] = Field(
        "grpo",
        description="grpo: clipped policy gradient, advantages within a group; ppo: the same loss, advantages from a "
        "critic (section critic); sft: cross entropy",
    )
    clip_low: PositiveFloat = Field(0.2, description="ratio clipped below 1 - clip_low")
    clip_high: PositiveFloat = Field(0.2, description="ratio clipped above 1 + clip_high")
    normalize_std: bool = Field(True, description="divide advantages by the group's standard deviation")
    advantage_eps: PositiveFloat = Field(1e-6, description="added to the standard deviation")
    aggregation: Literal["token", "sample", "prompt"] = Field(
        "token",
        description="what the loss of an update is a mean of: token: all trained tokens; sample: rollouts, each the "
        "mean of its tokens; prompt: groups, each the mean of the tokens of all its rollouts",
    )
    reference: bool = Field(False, description="log KL to the initial weights (one more forward pass)")
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy || reference), k3, in the loss")
    gamma: Share = Field(1.0, description="ppo: discount per trained token")
    gae_lambda: Share = Field(
        1.0, description="ppo: decay of generalised advantage estimation; 1: whole returns, 0: one step and the critic"
    )
    whiten: bool = Field(
        True, description="ppo: advantages of a step get mean 0 and standard deviation 1 over its trained tokens"
    )
    kl_reward_coef: float = Field(
        0.0, ge=0, description="ppo: weight of log policy - log reference, taken from each trained token's reward"
    )
    teacher: str | None = Field(
        None,
        description="Hugging Face directory of a model of the same architecture, whose log-probs of the rollouts are "
        "measured (kl/teacher; one more forward pass, one more copy of the weights in host memory); null: none",
    )
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout",
        description="log-probs that the ratio compares with: rollout: the engine's; recompute: the trainer's own, of "
        "the weights before the step (one more forward pass)",
    )

    @model_validator(mode="after")
    def _kl(self) -> Algorithm:
        for key, default in (("teacher", None), ("old_logprobs", "rollout")):
            if self.name == "sft" and getattr(self, key) != default:
                raise ValueError(
                    f"algorithm.{key} is {getattr(self, key)} but algorithm.name is sft, whose loss has no use for it; "
                    "leave it out"
                )
        if self.kl_coef > 0 and not self.reference:
            raise ValueError(
                "algorithm.kl_coef is positive but algorithm.reference is false; set algorithm.reference=true"
            )
        if self.kl_reward_coef > 0 and not self.reference:
            raise ValueError(
                "algorithm.kl_reward_coef is positive but algorithm.reference is false; set algorithm.reference=true"
            )
        if self.name != "ppo":
            own = ("gamma", "gae_lambda", "whiten", "kl_reward_coef")
            given = [key for key in own if getattr(self, key) != type(self).model_fields[key].default]
            if given:
                raise ValueError(
                    f"algorithm.{given[0]} belongs to ppo but algorithm.name is {self.name}; set algorithm.name=ppo or "
                    "leave it out"
                )
        return self


class CriticOptimizer(Optimizer):
    """As `trainer.optimizer`, with a larger default."""

    lr: PositiveFloat = Field(1e-5, description="peak learning rate")


class CriticLayout(Section):
    """Sizes of a critic on ranks of its own; each key means what the trainer's key of that name means."""

    world_size: PositiveInt = Field(1, description="number of the critic's ranks, beside those of the trainer")
    tensor: PositiveInt = Field(1, description="tensor parallel size (TP)")
    pipeline: PositiveInt = Field(1, description="pipeline parallel size (PP)")
    virtual_pipeline: PositiveInt = Field(1, description="model chunks of each pipeline rank (VPP)")
    layers_per_stage: tuple[Count, ...] | None = Field(
        None, description="decoder layers of each stage, in the order of the forward pass; null: equal"
    )
    context: PositiveInt = Field(1, description="context parallel size (CP)")
    data: PositiveInt | None = Field(None, description="data parallel size (DP); null: what remains of world_size")
    expert: PositiveInt = Field(1, description="expert parallel size (EP)")
    expert_tensor: PositiveInt | None = Field(
        None, description="tensor parallel size inside an expert (ETP); null: the critic's TP"
    )


class Critic(Section):
    """The value model of PPO: the policy's architecture with one number per token instead of logits. What is not said
    here (attention, recompute, deadline, ...) is the trainer's."""

    load: str | None = Field(
        None, description="Hugging Face directory of the trunk's initial weights; null: the policy's own"
    )
    head: Literal["zero", "normal"] = Field(
        "zero", description="value head at the start: zero, or normal with standard deviation 1/sqrt(hidden size + 1)"
    )
    placement: Literal["shared", "own"] = Field(
        "shared", description="shared: in the trainer's ranks, one after the other; own: in ranks of its own (layout)"
    )
    layout: CriticLayout | None = Field(None, description="placement own: sizes of the critic; null: one rank")
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: float = Field(
        0.2, ge=0, description="a value that moved further than this in a step gains nothing by it; 0: no clipping"
    )
    warmup_steps: Count = Field(
        0, description="first steps of the run that train the critic only; the policy stays as it is"
    )

    @model_validator(mode="after")
    def _placement(self) -> Critic:
        if self.placement == "shared" and self.layout is not None:
            raise ValueError(
                "critic.layout is given but critic.placement is shared, where the critic is split as the trainer is; "
                "set critic.placement=own or leave critic.layout out"
            )
        return self


class Schedule(Section):
    steps: PositiveInt = Field(
        100, description="steps of the run: one trains prompts_per_step x group_size rollouts and publishes once"
    )
    updates_per_step: PositiveInt = Field(
        1,
        description="optimizer updates per step, each on prompts_per_step / updates_per_step whole groups; the ratio "
        "of the loss stays that to the policy that sampled",
    )
    max_staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        0, description="versions a trajectory may be behind: 0 synchronous, 1 one step off"
    )
    colocate: bool = Field(False, description="trainers and engines share devices: sleep and wake in turns")
    step_deadline: PositiveFloat = Field(3600, description="seconds to wait for a step's rollouts")

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.updates_per_step


class Publish(Section):
    bucket_mib: PositiveFloat = Field(512, description="size of one bucket of weights in MiB")
    encoding: Literal["auto", "hf", "local"] = Field(
        "auto",
        description="hf: tensors with Hugging Face names, which any engine loads; local: each engine rank's own bytes "
        "in its fused layout; auto: local where slimx knows that layout",
    )
    quantise: Literal["ieee", "triton", "te", "ue8m0"] | None = Field(
        None,
        description="rule by which linear weights become fp8 in blocks of 128 x 128 (docs/numerics.md); null: none",
    )
    transport: Literal["memory", "cuda_ipc", "gloo", "nccl", "disk"] = Field(
        "memory",
        description="memory: engines on the trainers' machine map it; cuda_ipc: they copy it from GPU to GPU; gloo: "
        "over the network; nccl: over the network from GPU to GPU; disk: through files that both sides see, from which "
        "an engine that was lost catches up without the trainers",
    )
    directory: str | None = Field(None, description="directory of the disk transport; null: run.dir/publish")
    staging: Literal["model", "bucket"] = Field(
        "model",
        description="model: engines serve while everything is staged, in memory for a whole model (host memory; with "
        "cuda_ipc and nccl the engine's GPUs hold it twice); bucket: they are paused and copy each bucket as it comes, "
        "in memory for two buckets",
    )
    deadline: PositiveFloat = Field(300, description="seconds for one publication")
    step_deadline: PositiveFloat = Field(
        120, description="seconds for one step of one engine (a bucket, the copy, ...); a later one is quarantined"
    )

    @property
    def on_device(self) -> bool:
        """Whether buckets are packed in the memory of a GPU."""
        return self.transport in ("cuda_ipc", "nccl")


class Checkpoint(Section):
    every: Count = Field(0, description="steps between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_every: Count = Field(0, description="checkpoints of every so many steps are kept for good; 0: none is")
    asynchronous: bool = Field(
        True, description="write files in the background from a copy in host memory, while the run goes on"
    )
    deadline: PositiveFloat = Field(1800, description="seconds until all files of a checkpoint must be on disk")
    verify: Literal["size", "full"] = Field(
        "full", description="before a checkpoint is loaded, compare its files' sizes only, or their digests too"
    )
    load_optimizer: bool = Field(
        True, description="resume with the optimizer's state; false: weights and position only, moments begin anew"
    )
    export_hf: bool = Field(False, description="write the final weights as a Hugging Face directory (RUN/hf)")
    export_every: Count = Field(
        0, description="steps between exports as Hugging Face directories (RUN/hf-NNNNNN, all kept); 0: none"
    )

    @model_validator(mode="after")
    def _kept(self) -> Checkpoint:
        if self.keep_every and (not self.every or self.keep_every % self.every):
            raise ValueError(
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written "
                + (f"every {self.every} steps" if self.every else "at the end only (checkpoint.every is 0)")
                + "; make it a multiple of checkpoint.every"
            )
        return self


class Eval(Section):
    prompts: str | None = Field(None, description="JSONL file of held-out prompts; null: no evaluation")
    every: Count = Field(0, description="steps between evaluations (greedy); 0: only before and after")


class Track(Section):
    tensorboard: bool = Field(True, description="write RUN/tensorboard")
    wandb: bool = Field(False, description="log to Weights & Biases (needs the wandb package)")
    project: str = Field("slimx", description="project name for wandb")
    samples: Count = Field(8, description="rollouts written to RUN/samples.jsonl per recorded step")
    samples_every: PositiveInt = Field(10, description="steps between recorded samples")
    report: bool = Field(True, description="write RUN/report.html when the run ends")


class Config(Section):
    """One run."""

    run: Run
    model: Model
    numerics: Numerics = Numerics()
    cluster: Cluster = Cluster()
    trainer: Trainer = Trainer()
    rollout: Rollout
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic | None = Field(None, description="needed by `algorithm.name=ppo` and by nothing else; may be `{}`")
    schedule: Schedule = Schedule()
    publish: Publish = Publish()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    track: Track = Track()

    @model_validator(mode="after")
    def _across(self) -> Config:
        name = self.algorithm.name
        if name != "sft" and not self.rollout.engines:
            raise ValueError(f"algorithm.name is {name} but rollout.engines is empty; add an engine group or use sft")
        if name != "sft" and self.reward.function is None:
            raise ValueError(f"algorithm.name is {name} but reward.function is null; name a reward hook")
        if name == "ppo" and self.critic is None:
            raise ValueError("algorithm.name is ppo, which needs a critic; add a section `critic: {}`")
        if name != "ppo" and self.critic is not None:
            raise ValueError(f"critic is given but algorithm.name is {name}, which has none; remove it or use ppo")
        if self.critic is not None:
            self.as_critic()
        if self.trainer.moe.replay == "R3" and not (self.rollout.engines and self.rollout.routed_experts):
            missing = "rollout.routed_experts is false" if self.rollout.engines else "rollout.engines is empty"
            raise ValueError(
                f"trainer.moe.replay is R3 but {missing}: there are no routes of an engine to replay; set "
                "rollout.routed_experts=true, or trainer.moe.replay=none or R2"
            )
        if self.eval.prompts and not self.rollout.engines:
            raise ValueError("eval.prompts is set but rollout.engines is empty; evaluation needs an engine")
        if self.rollout.prompts_per_step % self.schedule.updates_per_step:
            raise ValueError(
                f"schedule.updates_per_step {self.schedule.updates_per_step} does not divide "
                f"rollout.prompts_per_step {self.rollout.prompts_per_step}: an update trains whole groups; change one "
                "of them"
            )
        if self.schedule.colocate and self.schedule.max_staleness:
            raise ValueError(
                "schedule.colocate and schedule.max_staleness exclude each other: engines that sleep while trainers "
                "train cannot generate ahead; set one of them to its default"
            )
        if self.schedule.colocate and self.publish.transport == "nccl":
            raise ValueError(
                "schedule.colocate and publish.transport=nccl exclude each other: NCCL connects no GPU with itself; "
                "set publish.transport=cuda_ipc"
            )
        if self.publish.quantise == "triton" and self.numerics.dtype == "float32":
            raise ValueError(
                "publish.quantise=triton is defined for bfloat16 weights, and numerics.dtype is float32; set it to "
                "bfloat16, or publish.quantise=ieee"
            )
        if not self.rollout.engines and (self.schedule.max_staleness or self.schedule.colocate):
            raise ValueError("schedule.max_staleness and schedule.colocate need engines; rollout.engines is empty")
        return self

    def as_critic(self) -> Config:
        """The configuration of the critic's own model: its `trainer` section is what the critic's ranks follow. Raises
        ValueError for a layout that does not fit its ranks."""
        if self.critic is None:
            raise ValueError("there is no section critic")
        changes: dict[str, Any] = {
            "load": self.critic.load or self.trainer.load,
            "optimizer": self.critic.optimizer,
            "freeze": (),  # patterns for the policy
            # Layers of multi-token prediction learn from labels; a critic has none.
            "megatron": {key: value for key, value in self.trainer.megatron.items() if key != "mtp_num_layers"},
        }
        if self.critic.placement == "own":
            changes |= dict(self.critic.layout or CriticLayout())
        try:
            trainer = Trainer.model_validate({**dict(self.trainer), **changes})
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(message.replace("trainer.", "critic.layout.")) from None
        if trainer.virtual_pipeline > 1 and self.numerics.dtype == "bfloat16":
            # Measured: after one step the fp32 head of a bf16 trunk holds other values than Adam gave it.
            raise ValueError(
                f"the critic would have {trainer.virtual_pipeline} chunks per pipeline rank in bfloat16, where "
                "megatron-core does not update its fp32 value head; set trainer.virtual_pipeline=1, or "
                "critic.placement=own with critic.layout.virtual_pipeline=1"
            )
        return self.model_copy(update={"trainer": trainer})

    @property
    def initial_weights(self) -> str:
        """Directory of the weights the run starts from, Hugging Face's or Megatron-LM's."""
        return self.trainer.load or self.model.path
