"""The records that `slimx plan --json` prints, and its text is made from. Sizes are bytes unless they say otherwise.

A key keeps its name and meaning within one `schema_version`; new keys may be added."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from slimx.layout.ranks import EngineSizes, Sizes
from slimx.preflight.links.model import Stages
from slimx.reshard.manifest import Encoding

SCHEMA_VERSION = 1


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlannedGroup(Record):
    """One group of `rollout.engines`."""

    name: str
    count: int
    sizes: EngineSizes
    role: str = "regular"
    nodes: int = Field(1, description="that each server spans")
    external: bool = Field(False, description="whether its servers run already")


class RankPlace(Record):
    """One trainer (or critic) rank: where it runs, its number in each dimension and what it holds."""

    rank: int
    node: int
    gpu: int = Field(description="of the node")
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[int, ...] = Field(description="decoder layers, counted over the model from 0, chunk by chunk")
    experts: tuple[int, int] | None = Field(description="first and last expert of each MoE layer; null: a dense model")


class EnginePlace(Record):
    """One server and the GPUs of its ranks."""

    group: str
    server: int
    node: int
    gpus: tuple[int, ...] = Field(description="counted from the first GPU of the first node")


class RankMap(Record):
    """Places of ranks on GPUs, if ranks fill nodes in their order, engines after trainers."""

    gpus: int = Field(description="that the run needs")
    nodes: int = Field(description="that they fill")
    per_node: int
    trainer: tuple[RankPlace, ...]
    critic: tuple[RankPlace, ...] = Field(description="ranks of its own; empty where it shares the trainer's")
    engines: tuple[EnginePlace, ...] = Field(description="of the policy")
    frozen: tuple[EnginePlace, ...] = Field((), description="of other models")


class TrainerMemory(Record):
    """One rank of each pipeline stage: the one with most optimizer state. Weights, gradients and optimizer are exact;
    activations follow slimx.preflight.memory.activations; the overhead is assumed."""

    model: Literal["trainer", "critic"]
    stage: int
    rank: int
    parameters: int = Field(description="elements")
    weights: int = Field(description="with what exact mode rounds them to where publish.quantise is set")
    gradients: int
    optimizer: int = Field(description="on the device")
    activations: int = Field(description="kept by all micro-batches in flight")
    head: int = Field(description="logits of a chunk of tokens and the output layer's gradient, on the last stage")
    work: int = Field(description="beside activations, while a layer's gradients are computed")
    step: int = Field(description="beside weights, gradients and optimizer, while the optimizer steps")
    communication: int = Field(description="tokens on their way to and from experts")
    publication: int = Field(description="buckets on this rank's GPU while weights are published")
    overhead: int = Field(description="CUDA context, NCCL, workspaces of libraries: assumed, not measured")
    in_flight: int = Field(description="micro-batches whose activations are kept (of one chunk each with VPP)")
    peak: int = Field(description="the most at any time")
    away: int = Field(description="left on the device while engines generate (schedule.colocate)")
    host_optimizer: int = Field(description="moments in host memory (trainer.optimizer.offload_fraction)")
    host_copies: int = Field(description="of reference and teacher, of the policy while they are in its place")
    host_away: int = Field(description="what left the device, kept for its return (schedule.colocate)")
    host_checkpoint: int = Field(description="copy of which checkpoints are written in the background")

    @property
    def host(self) -> int:
        return self.host_optimizer + self.host_copies + self.host_away + self.host_checkpoint


class EngineMemory(Record):
    """The fullest rank of a server of one group."""

    group: str
    count: int
    ranks: int = Field(description="of one server")
    weights: int
    static_fraction: float | None = Field(description="SGLang's mem_fraction_static, given or as it would choose")
    static: int | None = Field(description="weights and KV cache together; null: the GPU's memory is unknown")
    kv_per_token: int
    kv_room: int | None
    kv_tokens: int | None = Field(description="tokens whose keys and values fit, per copy of the attention")
    concurrency: int | None = Field(description="rollouts of the greatest length that one server holds at once")
    staged: int = Field(description="beside the weights, while weights are published")

    @property
    def fits(self) -> bool:
        """True if the weights and one rollout fit, as far as that is known."""
        return (self.static is None or self.weights <= self.static) and self.concurrency != 0


class ColocatedMemory(Record):
    """One GPU that a trainer rank and an engine rank share in turns."""

    memory: int
    training: int = Field(description="trainer's peak and what a sleeping engine keeps")
    generating: int = Field(description="engine's peak and what the trainer left on the device")
    publishing: int = Field(description="trainer's weights, engine's weights and what is staged")
    engine_asleep: int
    margin: int = Field(description="memory less the largest of the three; negative: it does not fit")


class BatchPlan(Record):
    """prompts_per_step x group_size = rollouts_per_step, trained in updates_per_step updates (optimizer steps)."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    updates_per_step: int
    rollouts_per_update: int
    rollouts_per_data_rank: int = Field(description="of one update, at most")
    tokens_per_rollout: int = Field(description="at most, prompt included")
    tokens_per_step: int = Field(description="at most")
    tokens_per_microbatch: int = Field(description="at most")
    tokens_per_context_rank: int = Field(description="of a micro-batch, at most")
    microbatches_per_update: int = Field(
        description="of a data-parallel rank, if all rollouts have the greatest length"
    )
    bubble: float = Field(description="share of an update that pipeline stages wait: (P-1) / (v M + P-1)")
    requests_in_flight: int = Field(description="at most, in all engines together, if each rollout makes one at a time")


class PublicationFigures(Record):
    """One publication to all engines, as compiled. Coverage is proven: compiling refuses what it cannot prove."""

    encoding: Encoding
    note: str = Field(description="why this encoding")
    rule: str = Field(description='how values are quantised; "none" where they are not')
    tensors: int = Field(description="sent to one engine, block scales counted")
    quantised: int = Field(description="of these, tensors of quantised values")
    buckets: int
    moves: int = Field(description="rectangles that go from one trainer rank's tensor to one engine rank's")
    launches: int = Field(description="kernel launches of the trainer rank that has most of them")
    nbytes: int = Field(description="values and scales to all engines together")
    received: int = Field(description="what the engine rank with most of them takes")
    sent_max: int = Field(description="what the trainer rank with most of them sends")
    sent_mean: float
    transport: str
    publisher_bytes: int = Field(
        description="buckets beside trainer rank 0's own memory: its GPU's with cuda_ipc and nccl, else the host's"
    )
    staged_bytes: int = Field(
        description="GPU memory that the engine rank with most of it needs beside its weights, in a publication"
    )
    plan_bytes: int = Field(description="size of the serialised plan, which every trainer rank keeps")
    compile_seconds: float


class LinkBytes(Record):
    """Bytes on one kind of link in a publication, if each trainer rank sends each engine rank its own bytes."""

    link: str
    nbytes: int
    busiest: int = Field(description="bytes through the GPU (or node) with most of them")
    seconds: float | None = Field(description="predicted: busiest / the link's rate; null: the rate is unknown")


class Prediction(Record):
    """Seconds of a publication on links that were not measured."""

    links: str
    stages: Stages | None
    refusal: str = Field("", description="why there are none")


class Predicted(Record):
    """Predictions of the link model, and a test of them on this machine."""

    model_off_here: float
    shown: bool
    publications: tuple[Prediction, ...] | None


class Suggestion(Record):
    """A layout that fits."""

    overrides: tuple[str, ...] = Field(description="for the command line of slimx plan and slimx train")
    layout: str
    trainer_peak: int
    margin: int = Field(description="of GPU memory, on the fullest rank")
    cost: float = Field(description="predicted seconds of an update by the stated cost model; for ranking only")
    why: str


class Searched(Record):
    """Extent of a search for layouts."""

    layouts: int = Field(description="splits of up to 64 times as many ranks that the model's layers and experts allow")
    tried: int = Field(description="of these, layouts whose memory was computed; arithmetic ruled others out")
    complete: bool = Field(description="false: the search ended at its limit, with layouts that might fit left over")


class EngineSuggestion(Record):
    """Servers of a group, on as many GPUs, that hold most rollouts at once."""

    group: str
    tensor: int
    expert: int
    dp_attention: int
    count: int
    nodes: int = Field(description="of one server")
    weights: int = Field(description="of a rank")
    concurrency: int = Field(description="rollouts of the greatest length that all servers of the group hold at once")


class PlanReport(Record):
    """Everything that `slimx plan` says. Null where the run is refused before it can be known."""

    schema_version: int = SCHEMA_VERSION
    model: str
    architecture: str | None = None
    parameters: int = Field(0, description="elements that the trainer holds, each counted once")
    checkpoint_tensors: int = 0
    device: str = "cuda"
    gpu: str | None = Field(None, description="that is planned for")
    gpu_memory: int | None = None
    trainer: Sizes | None = None
    largest_rank: int = Field(0, description="elements of the parameters on the trainer rank that holds most of them")
    critic: Sizes | None = Field(None, description="PPO's critic; null: there is none")
    critic_own: bool = Field(False, description="whether it has ranks of its own beside the trainer's")
    critic_largest_rank: int = 0
    engines: tuple[PlannedGroup, ...] = Field((), description="of the policy")
    frozen: tuple[PlannedGroup, ...] = Field((), description="of other models, which nothing is published to")
    rank_map: RankMap | None = None
    trainer_memory: tuple[TrainerMemory, ...] = ()
    engine_memory: tuple[EngineMemory, ...] = ()
    colocated: ColocatedMemory | None = None
    batch: BatchPlan | None = None
    publication: PublicationFigures | None = Field(None, description="null for a run without engines")
    links: tuple[LinkBytes, ...] = ()
    predicted: Predicted | None = Field(None, description="with --predict")
    violations: tuple[str, ...] = Field((), description="what stands in the way, all of it; the exit code is then 2")
    refits: bool = Field(False, description="whether another layout of the trainer's ranks could lift a violation")
    warnings: tuple[str, ...] = ()
    nearest: Suggestion | None = Field(None, description="where a layout is refused: the nearest that fits cluster.gpu")
    searched: Searched | None = Field(None, description="null: nothing was searched")
    suggestions: tuple[Suggestion, ...] = Field((), description="with --suggest: layouts that fit, cheapest first")
    suggested_engines: tuple[EngineSuggestion, ...] = Field((), description="with --suggest")

    @property
    def complete(self) -> bool:
        """True if all of it could be computed: nothing but sizes of memory and machine may be refused."""
        return self.rank_map is not None and (self.publication is not None or not self.engines)
