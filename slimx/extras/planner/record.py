"""Records of a plan, which `slimx plan --json` prints and from which the text output is made. Sizes are in bytes unless
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
    """One group of engine servers, an entry of `rollout.engines` or `eval.engines`."""

    name: str
    count: int
    sizes: EngineSizes
    role: str = "regular"
    nodes: int = 1
    """Number of machines that one server spans."""
    external: bool = False
    """True if the servers are started elsewhere and are already running."""
    borrowed: bool = False
    """True if the servers belong to another policy; they are counted in that policy's plan."""


class RankPlace(Record):
    """Placement of one trainer or critic rank: its GPU, its index in each parallel dimension, and its part of the
    model."""

    rank: int
    node: int
    gpu: int
    """Index of the GPU within its node, from 0."""
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[int, ...]
    """Indices of the rank's decoder layers within the whole model, from 0, chunk by chunk."""
    experts: tuple[int, int] | None
    """Indices of the first and the last routed expert that the rank holds in each MoE layer; null for a dense model."""


class EnginePlace(Record):
    """Placement of one engine server: the GPUs of its ranks."""

    group: str
    server: int
    node: int
    gpus: tuple[int, ...]
    """Indices of the GPUs over all nodes, counted from the first GPU of the first node."""


class RankMap(Record):
    """Placement of all ranks on GPUs. Ranks fill the nodes in order, engines after trainers."""

    gpus: int
    """Number of GPUs that the policy needs, including those of frozen engines."""
    nodes: int
    """Number of nodes that contain the policy's GPUs."""
    per_node: int
    trainer: tuple[RankPlace, ...]
    critic: tuple[RankPlace, ...]
    """Ranks of a separate critic; empty if the critic is on the trainer's ranks."""
    engines: tuple[EnginePlace, ...]
    """Servers of the policy, which receive its weights."""
    frozen: tuple[EnginePlace, ...] = ()
    """Servers of other models, whose weights are frozen."""


class BatchPlan(Record):
    """Prompts, rollouts and tokens of one step: prompts_per_step x group_size = rollouts_per_step, which are divided
    among updates_per_step optimizer updates."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    updates_per_step: int
    rollouts_per_update: int
    rollouts_per_data_rank: int
    """Maximum number of rollouts that a data-parallel rank processes in one update."""
    tokens_per_rollout: int
    """Maximum number of tokens in a rollout, including the prompt."""
    tokens_per_answer: int
    """Maximum number of tokens in a rollout of an evaluation, including the prompt; 0 if as many as in training."""
    tokens_per_step: int
    """Maximum number of tokens in a step."""
    tokens_per_microbatch: int
    """Maximum number of tokens in a micro-batch."""
    tokens_per_context_rank: int
    """Maximum number of a micro-batch's tokens on one context-parallel rank."""
    microbatches_per_update: int
    """Number of micro-batches per data-parallel rank and update, if all rollouts have the maximum length."""
    bubble: float
    """Fraction of an update for which pipeline stages wait: (P-1) / (v M + P-1), with P pipeline stages, v model chunks
    per stage and M micro-batches."""
    requests_in_flight: int
    """Maximum number of requests in flight to all engines together, with one request per rollout at a time."""

    @property
    def longest(self) -> str:
        """Maximum number of tokens in a rollout, as text; in evaluations too if it differs there."""
        held_out = f" (in evaluations {self.tokens_per_answer:,})" if self.tokens_per_answer else ""
        return f"{self.tokens_per_rollout:,}{held_out}"


class RolloutLoad(Record):
    """Estimated CPU load of the driver and of the rollout workers while the engines sample as fast as they can
    (`slimx.extras.rollout_workers.load`)."""

    workers: int
    """Number of rollout workers (`rollout.workers`); 0: the driver generates the rollouts."""
    requests_per_second: float
    rollouts_per_second: float
    tokens_per_answer: int
    """Assumed mean number of tokens that a request samples."""
    driver: float
    """CPU time per second of the driver, as a share of a core; without workers, that of its rollouts too."""
    worker: float
    """The same for each worker; 0 without workers."""

    @property
    def text(self) -> str:
        """The load and the traffic that causes it, as text."""
        loads = f"driver {self.driver:.0%} of a core"
        if self.workers:
            loads += f", {self.workers} workers at {self.worker:.0%}"
        traffic = f"{self.requests_per_second:,.0f} requests/s of {self.tokens_per_answer:,} sampled tokens"
        return f"estimated: at most {loads}, while engines sample as fast as their GPUs permit: {traffic}"


class PublicationFigures(Record):
    """Figures of one compiled publication to all engines. The compiler verifies that every element is written exactly
    once and rejects other plans."""

    encoding: Encoding
    note: str
    """Reason why this encoding was chosen for the publication."""
    rule: str
    """Rule by which values are quantized; "none" if they are not quantized."""
    tensors: int
    """Number of tensors that are sent to one engine, including block scales."""
    quantized: int
    """Number of tensors with quantized values that are sent to one engine."""
    buckets: int
    moves: int
    """Number of rectangular regions that are copied from a trainer rank's tensor to an engine rank's tensor."""
    launches: int
    """Number of kernel launches per publication, on the trainer rank that needs the most."""
    nbytes: int
    """Bytes sent to all engines together: values and scales."""
    adapter_bytes: int = 0
    """With publish.adapters=alone, bytes that a publication of adapters sends to all engines together. `nbytes` is then
    the size of the first publication, which also sends the base weights."""
    received: int
    """Bytes received by the engine rank that receives the most."""
    sent_max: int
    """Bytes sent by the trainer rank that sends the most."""
    sent_mean: float
    transport: str
    transport_note: str
    """Reason why this transport was chosen for the publication."""
    on_gpus: bool
    """True if buckets are in GPU memory instead of host memory."""
    publisher_bytes: int
    """Bytes of memory for buckets: host memory on trainer rank 0 or, with cuda_ipc, GPU memory on each trainer rank.
    With nixl, send buffers in host or GPU memory on the trainer rank that needs the most."""
    merging_bytes: int = 0
    """With trainer.lora, bytes of memory for merging the weights of one bucket on the trainer rank that needs the
    most."""
    kept_bytes: int = 0
    """With publish.delta, bytes of host memory on the trainer rank that keeps the most: the weights that it sent last,
    and its part of a bucket. With the disk transport, this is trainer rank 0."""
    received_bytes: int = Field(default=0, serialization_alias="held_bytes")
    """With publish.delta, bytes of host memory that one engine needs on each of its machines for the weights that it
    received last."""
    landing_bytes: int = 0
    """With nixl, bytes of host memory for one engine on each of its machines: the receive buffers that trainer ranks
    write into, and the buckets that are assembled from them and kept until they are loaded. With the disk transport and
    publish.delta, only the buckets."""
    staged_bytes: int
    """Bytes of GPU memory that a publication needs in addition to the weights, on the engine rank that needs the
    most."""
    registered_bytes: int = 0
    """With nixl and buckets in GPU memory, bytes that stay allocated on each engine rank's GPU from the first
    publication on: receive buffers, the memory in which buckets are assembled, and the context of the receiver's
    process."""
    plan_bytes: int
    """Bytes of the serialized plan; every trainer rank keeps a copy of it."""
    compile_seconds: float


class LinkBytes(Record):
    """Bytes that one publication sends over one kind of link, if each trainer rank sends its part directly to each
    engine rank."""

    link: str
    nbytes: int
    busiest: int
    """Bytes sent or received by the GPU (or node) that transfers the most."""
    seconds: float | None
    """Predicted time in seconds: `busiest` divided by the link's rate; null if the rate is unknown."""


class Prediction(Record):
    """Predicted duration, in seconds, of a publication on a cluster whose links were not measured."""

    links: str
    stages: Stages | None
    refusal: str = ""
    """Reason why there is no prediction; "" if there is one."""


class Predicted(Record):
    """Predictions of the link model, and its relative error on this machine."""

    model_off_here: float
    shown: bool
    publications: tuple[Prediction, ...] | None


class Suggestion(Record):
    """Suggested parallel layout that fits in memory."""

    overrides: tuple[str, ...]
    """Overrides that select this layout, as arguments of slimx plan and slimx train."""
    layout: str
    trainer_peak: int
    margin: int
    """Bytes of GPU memory that are free on the fullest rank."""
    cost: float
    """Duration of an update in seconds, as predicted by the cost model; meaningful only for ranking layouts."""
    recomputed: float
    """FLOPs of recomputation as a fraction of the FLOPs of an update without recomputation."""
    why: str


class Searched(Record):
    """Extent of a search for layouts: how many were considered, and whether these were all possible ones."""

    layouts: int
    """Number of combinations of parallel sizes that the model's layers and experts allow on the configured number of
    ranks and, if none of them fits, on up to 64 times as many ranks."""
    tried: int
    """Number of layouts whose memory was computed; the others were excluded by cheaper checks."""
    complete: bool
    """True if all possible layouts were tried, False if the search stopped at its limit."""


class EngineSuggestion(Record):
    """Server sizes with which the most rollouts of one engine group fit at the same time on the group's GPUs, or on
    more GPUs if no size fits on these."""

    group: str
    tensor: int
    expert: int
    dp_attention: int
    count: int
    nodes: int
    """Number of machines that one server spans."""
    weights: int
    """Bytes of weights on the fullest rank of a server."""
    concurrency: int
    """Number of rollouts of the maximum length that fit in all servers of the group at the same time."""


class Together(Record):
    """Requirements of all trained policies of a run together; the GPUs of each policy follow those of the previous
    one."""

    gpus: int
    nodes: int
    per_node: int
    fullest: int | None
    """Bytes used on the fullest GPU in its fullest phase; null if the type of GPU is unknown."""
    host: HostMemory | None
    """Host memory of the node if all policies are on one node; otherwise null, and the figures of each policy apply."""
    disk: DiskBytes | None


class PlanReport(Record):
    """Complete output of `slimx plan`. A field is null, 0 or empty if the run is refused before it can be computed."""

    schema_version: int = SCHEMA_VERSION
    model: str
    architecture: str | None = None
    parameters: int = 0
    """Number of the trainer's parameter elements, each counted once."""
    checkpoint_tensors: int = 0
    device: str = "cuda"
    gpu: str | None = None
    """Type of GPU that the plan is for; null if unknown."""
    gpu_memory: int | None = None
    host_bandwidth: float | None = None
    """Transfer rate between this type of GPU and host memory, in bytes per second in each direction; null if
    unknown."""
    trainer: Sizes | None = None
    largest_rank: int = 0
    """Number of parameter elements on the trainer rank that has the most."""
    critic: Sizes | None = None
    """Parallel sizes of PPO's critic; null without a critic."""
    separate_critic: bool = Field(default=False, serialization_alias="critic_own")
    """True if the critic has separate ranks instead of sharing the trainer's."""
    critic_largest_rank: int = 0
    engines: tuple[PlannedGroup, ...] = ()
    """Engine groups of the policy, which receive its weights."""
    frozen: tuple[PlannedGroup, ...] = ()
    """Engine groups of other models, which receive no publications."""
    kernels: tuple[str, ...] = ()
    """Sentences about the kernels that the trainers would choose with the packages of the current environment."""
    rank_map: RankMap | None = None
    nodes_lacking: int = 0
    """Number of nodes that the run needs in addition to cluster.nodes."""
    trainer_memory: tuple[TrainerMemory, ...] = ()
    engine_memory: tuple[EngineMemory, ...] = ()
    colocated: ColocatedMemory | None = None
    phases: tuple[PhasePeak, ...] = ()
    """Memory of the fullest GPU of each kind (`PhasePeak.gpu`) in every phase of a run; empty if the type of GPU is
    unknown."""
    host: HostMemory | None = None
    """Host memory of the fullest node; null if `violations` contains a reason why the run would not start."""
    disk: DiskBytes | None = None
    batch: BatchPlan | None = None
    rollout_load: RolloutLoad | None = None
    """Estimated load of driver and rollout workers; null without engines on GPUs."""
    publication: PublicationFigures | None = None
    """Figures of the publication; null if the run has no engines or needs more nodes than
    cluster.nodes."""
    links: tuple[LinkBytes, ...] = ()
    predicted: Predicted | None = None
    """Predictions of the publication's duration; null without --predict."""
    violations: tuple[str, ...] = ()
    """Reasons why the run would be refused; if there are any, the exit code is 2."""
    refits: bool = False
    """True if another layout of the trainer's ranks could remove a violation."""
    warnings: tuple[str, ...] = ()
    nearest: Suggestion | None = None
    """Layout that fits cluster.gpu and differs least from the configured one. The search for it runs only if the
    configured layout is refused; null if there was no search or no layout fits."""
    searched: Searched | None = None
    """Extent of the search for layouts; null if there was no search."""
    suggestions: tuple[Suggestion, ...] = ()
    """With --suggest, the layouts with the least predicted time among those that fit, best first."""
    suggested_engines: tuple[EngineSuggestion, ...] = ()
    """With --suggest, server sizes with the highest concurrency, one entry per group."""
    policies: dict[str, PlanReport] = {}
    """Plans of the run's other trained policies, by name. The GPUs of each policy follow those of the previous one."""
    together: Together | None = None
    """Sums over the policy `actor` and those in `policies`; null for a single policy, or if the ranks of a policy
    cannot be placed."""

    @property
    def complete(self) -> bool:
        """True if everything in the report could be computed, except the publication of a run that lacks nodes."""
        published = self.publication is not None or not self.engines
        return self.rank_map is not None and (published or self.nodes_lacking > 0)
