"""The records of memory in `slimx plan --json`. Sizes are bytes unless they say otherwise."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TrainerMemory(Record):
    """One rank of each pipeline stage: the one with most optimizer state. Weights, gradients and optimizer are exact;
    activations follow slimx.extras.planner.memory.activations; the overhead is assumed."""

    model: Literal["trainer", "critic"]
    stage: int
    rank: int
    parameters: int
    """Elements."""
    weights: int
    """With what exact mode rounds them to where publish.quantise is set."""
    gradients: int
    optimizer: int
    """On the device."""
    moments: int
    """The part of `optimizer` that is moments, which there are after the first step or a restored checkpoint."""
    activations: int
    """Kept by all micro-batches in flight."""
    head: int
    """Logits of a chunk of tokens and the output layer's gradient, on the last stage."""
    work: int
    """Beside activations, while a layer's gradients are computed."""
    step: int
    """Beside weights, gradients and optimizer, while the optimizer steps."""
    copies: int = 0
    """Codes and scales that Transformer Engine keeps of the weights (trainer.fp8), from the first step until the
    trainer leaves the device."""
    communication: int
    """Tokens on their way to and from experts."""
    dispatcher: int = 0
    """DeepEP's buffers (`slimx.extras.planner.memory.deep_ep`), which the process keeps."""
    publication: int
    """On this rank's GPU while weights are published: buckets, or its part of one on its way to host memory, and what
    merging a weight with its adapter takes for a moment."""
    overhead: int
    """CUDA context, NCCL, workspaces of libraries: assumed, not measured."""
    in_flight: int
    """Micro-batches whose activations are kept (of one chunk each with VPP)."""
    peak: int
    """The most at any time."""
    away: int
    """Left on the device while engines generate (schedule.colocate)."""
    host_optimizer: int
    """Moments in host memory (trainer.optimizer.offload_fraction)."""
    host_copies: int
    """Weights of reference and teacher, and of the policy while they are in its place."""
    host_away: int
    """Everything that left the device, kept for its return (schedule.colocate)."""
    host_chosen: int
    """Tokens that sparse attention sees in a step's updates (trainer.indexer_replay)."""
    host_checkpoint: int
    """Copy that checkpoints are written from."""
    host_activations: int
    """Activations that wait for the backward pass (trainer.offload_activations), each rounded up to a power of two by
    torch's allocator of pinned memory: twice their size at most."""
    moved: int
    """Activations of an update that are copied to the host, and back."""
    parts: dict[str, int]
    """Bytes that recomputation of a module, by its name in trainer.recompute.modules, or offloading it (`offload NAME`)
    takes off the activations, if nothing else is recomputed or offloaded. What a rule refuses to offload is left
    out."""

    @property
    def host(self) -> int:
        kept = self.host_optimizer + self.host_copies + self.host_away + self.host_chosen
        return kept + self.host_checkpoint + self.host_activations


class EngineMemory(Record):
    """The fullest rank of a server of one group."""

    group: str
    count: int
    ranks: int
    """Ranks of one server."""
    weights: int
    static_fraction: float | None = None
    """SGLang's mem_fraction_static, given or as it would choose."""
    static: int | None = None
    """Weights and KV cache together, a share of the memory that is free when the server starts; null: the GPU's memory
    is unknown."""
    kv_per_token: int
    kv_room: int | None = None
    kv_tokens: int | None = None
    """Tokens whose keys and values fit, per copy of the attention."""
    state_per_request: int
    """Recurrent states of a request, whatever its length; 0: the model has none."""
    concurrency: int | None = None
    """Rollouts of the greatest length that one server holds at once."""
    staged: int
    """Beside the weights, while weights are published."""
    overhead: int
    """CUDA context, NCCL, workspaces of libraries: assumed, not measured."""
    dispatcher: int = 0
    """DeepEP's buffers, which stay while the server sleeps."""
    graphs: int
    """CUDA graphs, by SGLang's own reserve for them."""
    work: int
    """Activations: assumed; SGLang leaves the rest of the free memory to them and to graphs."""

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
        """True if the weights and one rollout fit, as far as that is known."""
        return (self.static is None or self.weights <= self.static) and self.concurrency != 0


class ColocatedMemory(Record):
    """One GPU that a trainer rank and an engine rank share in turns."""

    memory: int
    training: int
    """Trainer's peak and what a sleeping engine keeps."""
    generating: int
    """Engine's peak and what the trainer left on the device."""
    publishing: int
    """Trainer's weights, engine's weights and what is staged."""
    engine_asleep: int
    margin: int
    """Memory less the fullest phase; negative: it does not fit."""


Phase = Literal["load", "start", "restore", "publish", "generate", "sleep", "train", "save", "wake"]
"""Phases of a run: trainers load weights, engines start, a checkpoint is restored, weights are published (the first
time, and after every step), engines generate, they sleep and trainers come back, trainers train, a checkpoint is saved,
engines take the memory of their weights back."""


class Held(Record):
    """Memory that one thing takes."""

    what: str
    nbytes: int


class Holding(Record):
    """Memory of one place by what holds it."""

    held: tuple[Held, ...]
    """The largest first."""

    @property
    def nbytes(self) -> int:
        """All that is held."""
        return sum(each.nbytes for each in self.held)


class PhaseMemory(Holding):
    """The fullest GPU of one kind in one phase."""

    gpu: Literal["trainer", "critic", "engine", "shared"]
    """shared: by a trainer rank and an engine rank in turns."""
    group: str
    """Group of `rollout.engines`; "" where no engine is on the GPU."""
    phase: Phase


class HostMemory(Holding):
    """Host memory that the fullest node with trainer ranks needs."""

    memory: int | None
    """Host memory of the node; null: unknown."""
    ranks: int
    """Trainer ranks of the node."""


class DiskBytes(Record):
    """Bytes that a run leaves on disk, at most."""

    checkpoint: int
    """One checkpoint: weights, main weights and moments; those of a critic too."""
    checkpoints: int
    """Checkpoints that are there at once: those that are kept, and one that is being written."""
    export: int
    """One export as a Hugging Face directory."""
    exports: int
    """Exports that are written, with references of `algorithm.reference_refresh`."""
    rollouts: int
    """Groups of the steps that are kept (track.rollouts), without text and metadata."""

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + self.rollouts
