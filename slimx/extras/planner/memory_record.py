"""Memory records of `slimx plan --json`. Sizes are in bytes unless stated otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TrainerMemory(Record):
    """One rank per pipeline stage: the one with the most optimizer state. Weights, gradients and optimizer are exact;
    activations follow slimx.extras.planner.memory.activations; the overhead is assumed."""

    model: Literal["trainer", "critic"]
    stage: int
    rank: int
    parameters: int
    """Elements."""
    weights: int
    """Includes the rounded weights of exact mode if publish.quantize is set."""
    gradients: int
    optimizer: int
    """Optimizer state on the device."""
    moments: int
    """Moments, a part of `optimizer`; they exist after the first step or a restored checkpoint."""
    activations: int
    """Activations kept by all micro-batches in flight."""
    head: int
    """Logits of a chunk of tokens and the output layer's gradient, on the last stage."""
    work: int
    """Workspace of one layer's backward pass, in addition to the activations."""
    step: int
    """Workspace of the optimizer step, in addition to weights, gradients and optimizer."""
    copies: int = 0
    """Codes and scales that Transformer Engine keeps of the weights (trainer.fp8), from the first step until the
    trainer is offloaded from the device."""
    communication: int
    """Tokens in transit to and from experts."""
    dispatcher: int = 0
    """DeepEP's buffers (`slimx.extras.planner.memory.deep_ep`), which the process keeps."""
    publication: int
    """GPU memory of this rank during a weight publication: buckets, or its part of a bucket in transit to host memory,
    and temporary memory for merging a weight with its adapter."""
    overhead: int
    """CUDA context, NCCL, workspaces of libraries: assumed, not measured."""
    in_flight: int
    """Micro-batches whose activations are kept (of one chunk each with VPP)."""
    peak: int
    """Maximum at any time."""
    away: int
    """Memory still used on the device while engines generate (schedule.colocate)."""
    host_optimizer: int
    """Moments in host memory (trainer.optimizer.offload_fraction)."""
    host_copies: int
    """Weights of reference and teacher, and of the policy while it is swapped out for them."""
    host_away: int
    """Offloaded state, kept in host memory until the trainer returns (schedule.colocate)."""
    host_chosen: int
    """Token choices of sparse attention for one step's updates (trainer.indexer_replay)."""
    host_checkpoint: int
    """Copy from which checkpoints are written."""
    host_activations: int
    """Activations offloaded until the backward pass (trainer.offload_activations), each rounded up to a power of two by
    torch's pinned memory allocator: at most twice their size."""
    moved: int
    """Activations of an update that are copied to the host and back."""
    parts: dict[str, int]
    """Activation bytes saved by recomputing one module, by its name in trainer.recompute.modules, or by offloading it
    (`offload NAME`), if nothing else is recomputed or offloaded. Modules that a rule refuses to offload are omitted."""

    @property
    def host(self) -> int:
        kept = self.host_optimizer + self.host_copies + self.host_away + self.host_chosen
        return kept + self.host_checkpoint + self.host_activations


class EngineMemory(Record):
    """The fullest rank of one server of a group."""

    group: str
    count: int
    ranks: int
    """Ranks of one server."""
    weights: int
    static_fraction: float | None = None
    """SGLang's mem_fraction_static, as configured or as SGLang would choose it."""
    static: int | None = None
    """Weights and KV cache together, a share of the memory that is free when the server starts; null if the GPU's
    memory is unknown."""
    kv_per_token: int
    kv_room: int | None = None
    kv_tokens: int | None = None
    """Tokens whose keys and values fit, per copy of the attention."""
    state_per_request: int
    """Recurrent states of one request, independent of its length; 0 if the model has none."""
    concurrency: int | None = None
    """Rollouts of the maximum length that one server holds at once."""
    staged: int
    """Memory that a publication needs in addition to the weights."""
    overhead: int
    """CUDA context, NCCL, workspaces of libraries: assumed, not measured."""
    dispatcher: int = 0
    """DeepEP's buffers, which are kept while the server sleeps."""
    graphs: int
    """CUDA graphs, by SGLang's reserve for them."""
    work: int
    """Activations: assumed; SGLang leaves the remaining free memory to activations and graphs."""

    @property
    def cache(self) -> int:
        """Bytes of the KV cache."""
        return (self.kv_tokens or 0) * self.kv_per_token

    @property
    def states(self) -> int:
        """Bytes of recurrent states."""
        if not self.state_per_request or self.static is None:
            return 0
        return max(0, self.static - self.weights - (self.kv_room or 0))

    @property
    def fits(self) -> bool:
        """True if the weights and one rollout fit, as far as known."""
        return (self.static is None or self.weights <= self.static) and self.concurrency != 0


class ColocatedMemory(Record):
    """One GPU shared in turns by a trainer rank and an engine rank."""

    memory: int
    training: int
    """Peak of the trainer and memory of the sleeping engine."""
    generating: int
    """Peak of the engine and memory that the trainer still uses."""
    publishing: int
    """Weights of trainer and engine, and staged weights."""
    engine_asleep: int
    margin: int
    """GPU memory minus the fullest phase; negative if it does not fit."""


Phase = Literal["load", "start", "restore", "publish", "generate", "sleep", "train", "save", "wake"]
"""Phases of a run: trainers load weights, engines start, a checkpoint is restored, weights are published (initially and
after every step), engines generate, engines sleep and trainers return to the device, trainers train, a checkpoint is
saved, engines reallocate the memory of their weights."""


class MemoryPart(Record):
    """Memory used for one purpose."""

    name: str = Field(serialization_alias="what")
    nbytes: int


class MemoryBreakdown(Record):
    """Memory of one GPU or node by purpose."""

    parts: tuple[MemoryPart, ...] = Field(serialization_alias="held")
    """Largest part first."""

    @property
    def nbytes(self) -> int:
        """Sum over all parts."""
        return sum(part.nbytes for part in self.parts)


class PhasePeak(MemoryBreakdown):
    """The fullest GPU of one kind in one phase."""

    gpu: Literal["trainer", "critic", "engine", "shared"]
    """shared: used in turns by a trainer rank and an engine rank."""
    group: str
    """Group of `rollout.engines`; "" if the GPU has no engine."""
    phase: Phase


class HostMemory(MemoryBreakdown):
    """Host memory needed by the fullest node with trainer ranks."""

    memory: int | None
    """Host memory of the node; null if unknown."""
    ranks: int
    """Trainer ranks on the node."""


class DiskBytes(Record):
    """Maximum disk usage of a run."""

    checkpoint: int
    """One checkpoint: weights, main weights and moments, including a critic's."""
    checkpoints: int
    """Checkpoints that exist at once: retained ones, and one that is being written."""
    export: int
    """One export as a Hugging Face directory."""
    exports: int
    """Number of exports written, including references of `algorithm.reference_refresh`."""
    rollouts: int
    """Groups of the retained steps (track.rollouts), without text and metadata."""

    @property
    def nbytes(self) -> int:
        """Sum of all of them."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + self.rollouts
