"""Memory records of `slimx plan --json`. All sizes are in bytes unless stated otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TrainerMemory(Record):
    """Memory of one trainer rank: the one with the most optimizer state in its pipeline stage.

    Weights, gradients and optimizer state are exact. Activations are estimated
    (slimx.extras.planner.memory.activations). The overhead is assumed."""

    model: Literal["trainer", "critic"]
    stage: int
    rank: int
    parameters: int
    """Number of elements of all parameters on the rank."""
    weights: int
    """Bytes of weights, including the quantized weights that exact mode computes with if publish.quantize is set."""
    gradients: int
    optimizer: int
    """Bytes of optimizer state on the device, without moments in host memory (`host_optimizer`)."""
    moments: int
    """Bytes of the moments, which are included in `optimizer`. They exist after the first step or after a checkpoint is
    restored."""
    activations: int
    """Bytes of activations kept for all micro-batches in flight."""
    head: int
    """Bytes of the logits of a chunk of tokens and of the output layer's gradient; 0 except on the last stage."""
    work: int
    """Bytes of workspace for one layer's backward pass, in addition to the activations."""
    step: int
    """Bytes of workspace for the optimizer step, in addition to weights, gradients and optimizer state."""
    copies: int = 0
    """Bytes of the weights' fp8 codes and scales that Transformer Engine keeps (trainer.fp8), from the first step until
    the trainer is offloaded."""
    communication: int
    """Bytes of tokens in transit to and from experts."""
    dispatcher: int = 0
    """Bytes of DeepEP's buffers, which the process keeps until it exits (`slimx.extras.planner.memory.deep_ep`)."""
    registered: int = 0
    """Bytes of send buffers on the GPU that stay registered with NIXL from the first publication on, also while the
    trainer is offloaded."""
    publication: int
    """Bytes of GPU memory that a publication of weights needs on this rank: buckets, or the rank's part of a bucket on
    its way to host memory, and temporary memory for merging a weight with its adapter."""
    overhead: int
    """Assumed bytes of the CUDA context, NCCL and library workspaces; not measured."""
    in_flight: int
    """Number of micro-batches whose activations are kept; with virtual stages (VPP), those of one model chunk each."""
    peak: int
    """Maximum number of bytes of GPU memory in use at any time."""
    away: int
    """Bytes that the trainer still uses on the GPU while engines generate (schedule.colocate)."""
    host_optimizer: int
    """Bytes of optimizer moments in host memory (trainer.optimizer.offload_fraction)."""
    host_copies: int
    """Bytes of host memory for the weights of the reference and the teacher, and for the policy's weights while those
    of another model replace them on the GPU."""
    host_away: int
    """Bytes of offloaded state in host memory, kept until the trainer returns to the GPU (schedule.colocate)."""
    host_chosen: int
    """Bytes of host memory for the token selections of sparse attention that are recorded for one step's updates
    (trainer.indexer_replay)."""
    host_checkpoint: int
    """Bytes of host memory for the copy from which checkpoints are written."""
    host_activations: int
    """Bytes of host memory for activations that are offloaded until the backward pass (trainer.offload_activations).
    torch's allocator of pinned memory rounds the size of each tensor up to a power of two, which at most doubles it."""
    moved: int
    """Bytes of activations that are copied to the host and back in an update."""
    parts: dict[str, int]
    """Bytes of activations that would be saved if a single module were recomputed (key: its name in
    trainer.recompute.modules) or offloaded (key: `offload NAME`), and nothing else were recomputed or offloaded.
    Modules whose offloading is forbidden by a rule are omitted."""

    @property
    def host(self) -> int:
        kept = self.host_optimizer + self.host_copies + self.host_away + self.host_chosen
        return kept + self.host_checkpoint + self.host_activations


class EngineMemory(Record):
    """Memory of a server's fullest rank, for one group of engines."""

    group: str
    count: int
    ranks: int
    """Number of ranks per server."""
    weights: int
    static_fraction: float | None = None
    """SGLang's mem_fraction_static, as configured or as SGLang would choose it; null if the GPU's memory is unknown."""
    static: int | None = None
    """Bytes of weights and KV cache together, a fraction of the memory that is free when the server starts; null if the
    GPU's memory is unknown."""
    kv_per_token: int
    kv_room: int | None = None
    kv_tokens: int | None = None
    """Number of tokens whose keys and values fit into the KV cache, per data-parallel copy of the attention layers."""
    state_per_request: int
    """Bytes of one request's recurrent states, independent of the request's length; 0 if the model has none."""
    concurrency: int | None = None
    """Number of rollouts of the maximum length for which one server has memory at the same time."""
    staged: int
    """Bytes of GPU memory that a publication needs in addition to the weights."""
    registered: int = 0
    """Bytes of GPU memory that the receiver of direct transfers keeps from the first publication on, also while the
    engine sleeps."""
    overhead: int
    """Assumed bytes of the CUDA context, NCCL and library workspaces; not measured."""
    dispatcher: int = 0
    """Bytes of DeepEP's buffers, which are kept while the server sleeps."""
    graphs: int
    """Bytes of CUDA graphs, as reserved by SGLang."""
    work: int
    """Assumed bytes of activations; SGLang leaves the remaining free memory to activations and graphs."""
    images: int = 0
    """Bytes that SGLang reserves for pixels and embeddings of images, at the expense of the KV cache; 0 for a model
    without a vision tower."""
    vision_factor: float = 1.0
    """Factor by which SGLang reduces its choice of mem_fraction_static for a model with a vision tower."""

    @property
    def cache(self) -> int:
        """Bytes of the KV cache on one rank."""
        return (self.kv_tokens or 0) * self.kv_per_token

    @property
    def states(self) -> int:
        """Bytes of the recurrent states of all requests on one rank."""
        if not self.state_per_request or self.static is None:
            return 0
        return max(0, self.static - self.weights - self.images - (self.kv_room or 0))

    @property
    def fits(self) -> bool:
        """True if the weights and at least one rollout fit, or if it is unknown whether they do."""
        return (self.static is None or self.weights <= self.static) and self.concurrency != 0


class ColocatedMemory(Record):
    """Memory of one GPU on which a trainer rank and an engine rank alternate."""

    memory: int
    training: int
    """Bytes in the training phase: the trainer rank's peak plus what the sleeping engine keeps."""
    generating: int
    """Bytes in the generation phase: the engine rank's peak plus what the trainer still uses."""
    publishing: int
    """Bytes in the publication phase: weights of trainer and engine, and staged weights."""
    engine_asleep: int
    margin: int
    """Bytes of GPU memory that are free in the fullest phase; negative if the phase does not fit."""


Phase = Literal["load", "start", "restore", "publish", "generate", "sleep", "train", "save", "wake"]
"""Phases of a run. load: trainers load weights; start: engines start; restore: a checkpoint is restored; publish:
weights are published, at the start and after every step; generate: engines generate; sleep: engines release their
memory and trainers return to the GPU; train: trainers train; save: a checkpoint is saved; wake: engines allocate the
memory of their weights again."""


class MemoryPart(Record):
    """Bytes of memory used for one purpose, such as weights."""

    name: str = Field(serialization_alias="what")
    nbytes: int


class MemoryBreakdown(Record):
    """Memory of one GPU or node, broken down by purpose."""

    parts: tuple[MemoryPart, ...] = Field(serialization_alias="held")
    """Memory by purpose, the largest part first."""

    @property
    def nbytes(self) -> int:
        """Total size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts)


class PhasePeak(MemoryBreakdown):
    """Memory of the fullest GPU of one kind in one phase."""

    gpu: Literal["trainer", "critic", "engine", "shared"]
    """Kind of GPU, by the ranks that use it; shared: a trainer rank and an engine rank alternate."""
    group: str
    """Name of the engine group; "" if no engine uses the GPU."""
    phase: Phase


class HostMemory(MemoryBreakdown):
    """Host memory that the fullest node with trainer ranks needs."""

    memory: int | None
    """Host memory of a node in bytes; null if unknown."""
    ranks: int
    """Number of trainer ranks on the node."""


class DiskBytes(Record):
    """Maximum disk space that a run takes, in bytes."""

    checkpoint: int
    """Bytes of one checkpoint: weights, fp32 master weights and moments, including those of a critic."""
    checkpoints: int
    """Maximum number of checkpoints that exist at the same time: those that are kept, and one that is being written."""
    export: int
    """Bytes of one export in Hugging Face format."""
    exports: int
    """Maximum number of exports, including the refreshed reference models (`algorithm.reference_refresh`)."""
    rollouts: int
    """Bytes of the rollouts that track.rollouts keeps on disk, without text and metadata."""

    @property
    def nbytes(self) -> int:
        """Total size of checkpoints, exports and rollouts, in bytes."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + self.rollouts
