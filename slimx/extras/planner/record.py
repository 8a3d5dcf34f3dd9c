"""Records of a plan: `slimx plan --json` prints them, and its text output is made from them. Sizes are in bytes unless
stated otherwise.

A key keeps its name and meaning within one `schema_version`; new keys may be added."""

from __future__ import annotations

from pydantic import Field

from slimx.extras.planner.links.model import Stages
from slimx.extras.planner.memory_record import (
    ColocatedMemory,
    DiskBytes,
    EngineMemory,
    HostMemory,
    PhasePeak,
    Record,
    TrainerMemory,
)
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.reshard.manifest import Encoding

SCHEMA_VERSION = 1


class PlannedGroup(Record):
    """One group of `rollout.engines`."""

    name: str
    count: int
    sizes: EngineSizes
    role: str = "regular"
    nodes: int = 1
    """Machines that one server spans."""
    external: bool = False
    """True if its servers are started elsewhere and already run."""
    borrowed: bool = False
    """True if its servers belong to another policy, which counts them."""


class RankPlace(Record):
    """One trainer (or critic) rank: its GPU, its index in each parallel dimension, and its part of the model."""

    rank: int
    node: int
    gpu: int
    """Index of the GPU within its node."""
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[int, ...]
    """Decoder layers by index in the whole model from 0, chunk by chunk."""
    experts: tuple[int, int] | None
    """First and last expert of each MoE layer; null for a dense model."""


class EnginePlace(Record):
    """One server and the GPUs of its ranks."""

    group: str
    server: int
    node: int
    gpus: tuple[int, ...]
    """Indices over all GPUs, counted from the first GPU of the first node."""


class RankMap(Record):
    """Placement of ranks on GPUs: ranks fill the nodes in order, engines after trainers."""

    gpus: int
    """GPUs that the policy needs, including those of frozen engines."""
    nodes: int
    """Nodes that these GPUs are on."""
    per_node: int
    trainer: tuple[RankPlace, ...]
    critic: tuple[RankPlace, ...]
    """Ranks of a separate critic; empty if the critic shares the trainer's ranks."""
    engines: tuple[EnginePlace, ...]
    """Servers of the policy."""
    frozen: tuple[EnginePlace, ...] = ()
    """Servers of other, frozen models."""


class BatchPlan(Record):
    """prompts_per_step x group_size = rollouts_per_step, trained in updates_per_step updates (optimizer steps)."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    updates_per_step: int
    rollouts_per_update: int
    rollouts_per_data_rank: int
    """Maximum in one update."""
    tokens_per_rollout: int
    """Maximum, including the prompt."""
    tokens_per_step: int
    """Maximum."""
    tokens_per_microbatch: int
    """Maximum."""
    tokens_per_context_rank: int
    """Maximum in one micro-batch."""
    microbatches_per_update: int
    """Micro-batches of one data-parallel rank if all rollouts have the maximum length."""
    bubble: float
    """Share of an update that pipeline stages spend waiting: (P-1) / (v M + P-1)."""
    requests_in_flight: int
    """Maximum over all engines together, with one request per rollout at a time."""


class PublicationFigures(Record):
    """One compiled publication to all engines. Coverage is proven: the compiler refuses plans that it cannot prove."""

    encoding: Encoding
    note: str
    """Reason for this encoding."""
    rule: str
    """Rule by which values are quantized; "none" without quantization."""
    tensors: int
    """Tensors sent to one engine, block scales included."""
    quantized: int
    """Number of these tensors that hold quantized values."""
    buckets: int
    moves: int
    """Rectangles copied from one trainer rank's tensor to one engine rank's."""
    launches: int
    """Kernel launches of the trainer rank with the most."""
    nbytes: int
    """Values and scales sent to all engines together."""
    adapter_bytes: int = 0
    """With publish.adapters=alone, bytes of a publication of adapters to all engines together; `nbytes` is then the
    size of the first publication, which also sends the base weights."""
    received: int
    """Bytes received by the engine rank that receives most."""
    sent_max: int
    """Bytes sent by the trainer rank that sends most."""
    sent_mean: float
    transport: str
    transport_note: str
    """Reason for this transport."""
    on_gpus: bool
    """True if buckets are in GPU memory."""
    publisher_bytes: int
    """Memory of the buckets: host memory at trainer rank 0, or with cuda_ipc GPU memory of each trainer rank. With nixl
    the largest ring of any trainer rank, in host or GPU memory."""
    merging_bytes: int = 0
    """With trainer.lora, memory for merging the weights of one bucket on the trainer rank that needs most."""
    kept_bytes: int = 0
    """With publish.delta, host memory of the trainer rank that keeps most: the weights it sent last and its part of a
    bucket. With disk, that of trainer rank 0."""
    received_bytes: int = Field(default=0, serialization_alias="held_bytes")
    """With publish.delta, host memory for one engine on each of its machines: the weights received last."""
    landing_bytes: int = 0
    """With nixl, host memory for one engine on each of its machines: memory that trainer ranks write into, and the
    buckets assembled from it until they are loaded. With disk and publish.delta, these buckets only."""
    staged_bytes: int
    """GPU memory that a publication needs in addition to the weights, on the engine rank that needs most."""
    plan_bytes: int
    """Size of the serialized plan, of which every trainer rank keeps a copy."""
    compile_seconds: float


class LinkBytes(Record):
    """Bytes on one kind of link in one publication, if each trainer rank sends each engine rank its part directly."""

    link: str
    nbytes: int
    busiest: int
    """Bytes through the GPU (or node) that transfers most."""
    seconds: float | None
    """Predicted: `busiest` / the link's rate; null if the rate is unknown."""


class Prediction(Record):
    """Predicted seconds of a publication on links that were not measured."""

    links: str
    stages: Stages | None
    refusal: str = ""
    """Reason for a missing prediction."""


class Predicted(Record):
    """Predictions of the link model, and its error on this machine."""

    model_off_here: float
    shown: bool
    publications: tuple[Prediction, ...] | None


class Suggestion(Record):
    """A layout that fits."""

    overrides: tuple[str, ...]
    """Command-line arguments for slimx plan and slimx train."""
    layout: str
    trainer_peak: int
    margin: int
    """Free GPU memory of the fullest rank."""
    cost: float
    """Seconds of an update as predicted by the cost model; for ranking only."""
    again: float
    """Recomputed FLOPs as a share of an update's FLOPs without recomputation."""
    why: str


class Searched(Record):
    """Extent of a search for layouts."""

    layouts: int
    """Splits that the model's layers and experts allow, up to 64 times the number of ranks."""
    tried: int
    """Layouts whose memory was computed; the others were ruled out by arithmetic."""
    complete: bool
    """False if the search stopped at its limit with possible layouts left."""


class EngineSuggestion(Record):
    """Servers of a group that hold the most concurrent rollouts on the same number of GPUs."""

    group: str
    tensor: int
    expert: int
    dp_attention: int
    count: int
    nodes: int
    """Machines that one server spans."""
    weights: int
    """Weight bytes of one rank."""
    concurrency: int
    """Rollouts of the maximum length that all servers of the group hold at once."""


class Together(Record):
    """Requirements of all trained policies of a run, placed one after another."""

    gpus: int
    nodes: int
    per_node: int
    fullest: int | None
    """Memory of the fullest GPU in its fullest phase; null if the GPU is unknown."""
    host: HostMemory | None
    """Host memory of the node if there is only one; otherwise null, and each policy's figure applies."""
    disk: DiskBytes | None


class PlanReport(Record):
    """The complete output of `slimx plan`. A field is null if the run is refused before it can be computed."""

    schema_version: int = SCHEMA_VERSION
    model: str
    architecture: str | None = None
    parameters: int = 0
    """Elements of the trainer's parameters, each counted once."""
    checkpoint_tensors: int = 0
    device: str = "cuda"
    gpu: str | None = None
    """Kind of GPU that the plan is for."""
    gpu_memory: int | None = None
    host_bandwidth: float | None = None
    """Bytes per second and direction between this GPU and host memory."""
    trainer: Sizes | None = None
    largest_rank: int = 0
    """Parameter elements of the trainer rank that holds most."""
    critic: Sizes | None = None
    """PPO's critic; null without one."""
    separate_critic: bool = Field(default=False, serialization_alias="critic_own")
    """True if the critic has separate ranks instead of sharing the trainer's."""
    critic_largest_rank: int = 0
    engines: tuple[PlannedGroup, ...] = ()
    """Groups of the policy."""
    frozen: tuple[PlannedGroup, ...] = ()
    """Groups of other models, which receive no publications."""
    kernels: tuple[str, ...] = ()
    """Kernels that the trainers would choose with the packages of the current environment, one sentence each."""
    rank_map: RankMap | None = None
    nodes_lacking: int = 0
    """Nodes that the run needs in addition to cluster.nodes."""
    trainer_memory: tuple[TrainerMemory, ...] = ()
    engine_memory: tuple[EngineMemory, ...] = ()
    colocated: ColocatedMemory | None = None
    phases: tuple[PhasePeak, ...] = ()
    """Memory of the fullest GPU of each kind in every phase of a run; empty if the GPU is unknown."""
    host: HostMemory | None = None
    """Null if the run would not start: violations give the reason."""
    disk: DiskBytes | None = None
    batch: BatchPlan | None = None
    publication: PublicationFigures | None = None
    """Null for a run without engines, and for one that lacks nodes."""
    links: tuple[LinkBytes, ...] = ()
    predicted: Predicted | None = None
    """With --predict."""
    violations: tuple[str, ...] = ()
    """Everything that prevents the run; the exit code is then 2."""
    refits: bool = False
    """True if another layout of the trainer's ranks could remove a violation."""
    warnings: tuple[str, ...] = ()
    nearest: Suggestion | None = None
    """Nearest layout that fits cluster.gpu, if the configured one is refused."""
    searched: Searched | None = None
    """Null if no layouts were searched."""
    suggestions: tuple[Suggestion, ...] = ()
    """With --suggest: layouts that fit, cheapest first."""
    suggested_engines: tuple[EngineSuggestion, ...] = ()
    """With --suggest."""
    policies: dict[str, PlanReport] = {}
    """Plans of the run's other trained policies, by name. Each policy's GPUs follow those of the previous one."""
    together: Together | None = None
    """Sums over the main policy and `policies`; null for a single policy, or if a policy cannot be placed."""

    @property
    def complete(self) -> bool:
        """True if everything could be computed: only memory and machine limits may be violated."""
        published = self.publication is not None or not self.engines
        return self.rank_map is not None and (published or self.nodes_lacking > 0)
