"""The records that `slimx plan --json` prints, and its text is made from. Sizes are bytes unless they say otherwise.

A key keeps its name and meaning within one `schema_version`; new keys may be added."""

from __future__ import annotations

from slimx.extras.planner.links.model import Stages
from slimx.extras.planner.memory_record import (
    ColocatedMemory,
    DiskBytes,
    EngineMemory,
    HostMemory,
    PhaseMemory,
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
    """Machines that each server spans."""
    external: bool = False
    """True if its servers run already."""
    borrowed: bool = False
    """True if they are another policy's, with which they are counted."""


class RankPlace(Record):
    """One trainer (or critic) rank: where it runs, its number in each dimension and what it holds."""

    rank: int
    node: int
    gpu: int
    """Number of the GPU in its node."""
    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int
    expert_data: int
    layers: tuple[int, ...]
    """Decoder layers, counted over the model from 0, chunk by chunk."""
    experts: tuple[int, int] | None
    """First and last expert of each MoE layer; null: a dense model."""


class EnginePlace(Record):
    """One server and the GPUs of its ranks."""

    group: str
    server: int
    node: int
    gpus: tuple[int, ...]
    """Counted from the first GPU of the first node."""


class RankMap(Record):
    """Places of ranks on GPUs, if ranks fill nodes in their order, engines after trainers."""

    gpus: int
    """GPUs that the policy needs, frozen engines included."""
    nodes: int
    """Nodes that they are on."""
    per_node: int
    trainer: tuple[RankPlace, ...]
    critic: tuple[RankPlace, ...]
    """Ranks of its own; empty where it shares the trainer's."""
    engines: tuple[EnginePlace, ...]
    """Servers of the policy."""
    frozen: tuple[EnginePlace, ...] = ()
    """Servers of other models."""


class BatchPlan(Record):
    """prompts_per_step x group_size = rollouts_per_step, trained in updates_per_step updates (optimizer steps)."""

    prompts_per_step: int
    group_size: int
    rollouts_per_step: int
    updates_per_step: int
    rollouts_per_update: int
    rollouts_per_data_rank: int
    """At most, in one update."""
    tokens_per_rollout: int
    """At most, prompt included."""
    tokens_per_step: int
    """At most."""
    tokens_per_microbatch: int
    """At most."""
    tokens_per_context_rank: int
    """At most, in a micro-batch."""
    microbatches_per_update: int
    """Micro-batches of a data-parallel rank, if all rollouts have the greatest length."""
    bubble: float
    """Share of an update that pipeline stages wait: (P-1) / (v M + P-1)."""
    requests_in_flight: int
    """At most, in all engines together, if each rollout makes one at a time."""


class PublicationFigures(Record):
    """One publication to all engines, as compiled. Coverage is proven: compiling refuses what it cannot prove."""

    encoding: Encoding
    note: str
    """Why this encoding."""
    rule: str
    """Rule by which values are quantised; "none" where they are not."""
    tensors: int
    """Sent to one engine, block scales counted."""
    quantised: int
    """Tensors of quantised values among these."""
    buckets: int
    moves: int
    """Rectangles that go from one trainer rank's tensor to one engine rank's."""
    launches: int
    """Kernel launches of the trainer rank that has most of them."""
    nbytes: int
    """Values and scales to all engines together."""
    adapter_bytes: int = 0
    """With publish.adapters=alone, bytes of a publication of adapters to all engines together; `nbytes` are those of
    the first, which brings their base too."""
    received: int
    """Bytes that the engine rank with most of them takes."""
    sent_max: int
    """Bytes that the trainer rank with most of them sends."""
    sent_mean: float
    transport: str
    transport_note: str
    """Why this transport."""
    on_gpus: bool
    """True if buckets lie in the memory of GPUs."""
    publisher_bytes: int
    """Memory that buckets take, of the host of trainer rank 0; with cuda_ipc of each trainer rank's GPU. With nixl the
    ring of the trainer rank that has the largest, of its host's memory or its GPU's."""
    merging_bytes: int = 0
    """With trainer.lora, memory of the trainer rank that needs most to merge the weights of one bucket."""
    kept_bytes: int = 0
    """With publish.delta, host memory of the trainer rank that keeps most: what it sent last, and part of a bucket.
    With disk that of trainer rank 0."""
    held_bytes: int = 0
    """With publish.delta, host memory beside one engine, on each of its machines: what came last."""
    landing_bytes: int = 0
    """Host memory beside one engine, on each of its machines, with nixl: what trainer ranks write into, and buckets
    made of it until they are loaded. With disk and publish.delta these buckets alone."""
    staged_bytes: int
    """GPU memory that the engine rank with most of it needs beside its weights, in a publication."""
    plan_bytes: int
    """Size of the serialised plan, which every trainer rank keeps."""
    compile_seconds: float


class LinkBytes(Record):
    """Bytes on one kind of link in a publication, if each trainer rank sends each engine rank its own bytes."""

    link: str
    nbytes: int
    busiest: int
    """Bytes through the GPU (or node) with most of them."""
    seconds: float | None
    """Predicted: busiest / the link's rate; null: the rate is unknown."""


class Prediction(Record):
    """Seconds of a publication on links that were not measured."""

    links: str
    stages: Stages | None
    refusal: str = ""
    """Why there are none."""


class Predicted(Record):
    """Predictions of the link model, and a test of them on this machine."""

    model_off_here: float
    shown: bool
    publications: tuple[Prediction, ...] | None


class Suggestion(Record):
    """A layout that fits."""

    overrides: tuple[str, ...]
    """For the command line of slimx plan and slimx train."""
    layout: str
    trainer_peak: int
    margin: int
    """Free GPU memory on the fullest rank."""
    cost: float
    """Predicted seconds of an update by the stated cost model; for ranking only."""
    again: float
    """FLOPs that are computed again, as a share of those of an update without recomputation."""
    why: str


class Searched(Record):
    """Extent of a search for layouts."""

    layouts: int
    """Splits of up to 64 times as many ranks that the model's layers and experts allow."""
    tried: int
    """Layouts among these whose memory was computed; arithmetic ruled others out."""
    complete: bool
    """False: the search ended at its limit, with layouts that might fit left over."""


class EngineSuggestion(Record):
    """Servers of a group, on as many GPUs, that hold most rollouts at once."""

    group: str
    tensor: int
    expert: int
    dp_attention: int
    count: int
    nodes: int
    """Machines of one server."""
    weights: int
    """Weights of a rank."""
    concurrency: int
    """Rollouts of the greatest length that all servers of the group hold at once."""


class Together(Record):
    """Needs of all trained policies of a run, placed policy after policy."""

    gpus: int
    nodes: int
    per_node: int
    fullest: int | None
    """Memory that the fullest GPU needs in its fullest phase; null: the GPU is unknown."""
    host: HostMemory | None
    """Host memory of the node, if it is one; null: each policy's own figure counts."""
    disk: DiskBytes | None


class PlanReport(Record):
    """Everything that `slimx plan` says. Null where the run is refused before it can be known."""

    schema_version: int = SCHEMA_VERSION
    model: str
    architecture: str | None = None
    parameters: int = 0
    """Elements that the trainer holds, each counted once."""
    checkpoint_tensors: int = 0
    device: str = "cuda"
    gpu: str | None = None
    """Kind of GPU that is planned for."""
    gpu_memory: int | None = None
    host_bandwidth: float | None = None
    """Bytes per second and direction between that GPU and host memory."""
    trainer: Sizes | None = None
    largest_rank: int = 0
    """Elements of the parameters on the trainer rank that holds most of them."""
    critic: Sizes | None = None
    """PPO's critic; null: there is none."""
    critic_own: bool = False
    """True if it has ranks of its own beside the trainer's."""
    critic_largest_rank: int = 0
    engines: tuple[PlannedGroup, ...] = ()
    """Groups of the policy."""
    frozen: tuple[PlannedGroup, ...] = ()
    """Groups of other models, which nothing is published to."""
    kernels: tuple[str, ...] = ()
    """The trainers' choices of kernels with the packages of the environment that plans, one sentence each."""
    rank_map: RankMap | None = None
    nodes_lacking: int = 0
    """Nodes that the run needs beyond cluster.nodes."""
    trainer_memory: tuple[TrainerMemory, ...] = ()
    engine_memory: tuple[EngineMemory, ...] = ()
    colocated: ColocatedMemory | None = None
    phases: tuple[PhaseMemory, ...] = ()
    """Memory in every phase of a run on the fullest GPU of each kind; empty where the GPU is unknown."""
    host: HostMemory | None = None
    """Null where nothing is started: violations say why."""
    disk: DiskBytes | None = None
    batch: BatchPlan | None = None
    publication: PublicationFigures | None = None
    """Null for a run without engines, and for one that lacks nodes."""
    links: tuple[LinkBytes, ...] = ()
    predicted: Predicted | None = None
    """With --predict."""
    violations: tuple[str, ...] = ()
    """Everything that stands in the way; the exit code is then 2."""
    refits: bool = False
    """True if another layout of the trainer's ranks could lift a violation."""
    warnings: tuple[str, ...] = ()
    nearest: Suggestion | None = None
    """The nearest layout that fits cluster.gpu, where a layout is refused."""
    searched: Searched | None = None
    """Null: nothing was searched."""
    suggestions: tuple[Suggestion, ...] = ()
    """With --suggest: layouts that fit, cheapest first."""
    suggested_engines: tuple[EngineSuggestion, ...] = ()
    """With --suggest."""
    policies: dict[str, PlanReport] = {}
    """Plans of the policies that are trained beside the run's own, by name. The GPUs of each follow those before it."""
    together: Together | None = None
    """Sums over the run's own policy and `policies`; null where there is one, or where one cannot be placed."""

    @property
    def complete(self) -> bool:
        """True if all of it could be computed: nothing but sizes of memory and machine may be refused."""
        published = self.publication is not None or not self.engines
        return self.rank_map is not None and (published or self.nodes_lacking > 0)
