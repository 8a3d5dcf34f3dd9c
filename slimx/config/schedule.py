"""Sections schedule, publish and checkpoint: what happens at which step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slimx.config.rollout import Rollout
from slimx.config.rule import Refusal
from slimx.config.section import Amount, Count, Positive, Seconds, Section


class Schedule(Section):
    steps: Amount = Field(
        100, description="steps of the run: one trains prompts_per_step x group_size rollouts and publishes once"
    )
    updates_per_step: Amount = Field(
        1,
        description="optimizer updates per step, each on prompts_per_step / updates_per_step whole groups; the ratio "
        "of the loss stays that to the policy that sampled",
    )
    max_staleness: Count = Field(
        0,
        description="versions that the oldest token of a trajectory may be behind when it is trained: 0 synchronous, 1 "
        "one step off, more: fully asynchronous",
    )
    window: Count = Field(
        0,
        description="batches of groups by which a finished group may overtake an unfinished older one, at most "
        "max_staleness; 0: groups are trained in the order of their prompts",
    )
    straggler_deadline: Seconds | None = Field(
        None,
        description="seconds that a batch waits for unfinished groups that may not be overtaken, once enough others "
        "are done; then they are given up and counted as dropped/straggler; null: they are waited for",
    )
    colocate: bool = Field(False, description="trainers and engines share devices: sleep and wake in turns")
    step_deadline: Seconds = Field(3600, description="seconds to wait for a step's rollouts")

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.steps * self.updates_per_step


class Publish(Section):
    bucket_mib: Positive = Field(512, description="size of one bucket of weights in MiB")
    encoding: Literal["auto", "hf", "local"] = Field(
        "auto",
        description="hf: tensors with Hugging Face names, which any engine loads; local: each engine rank's own bytes "
        "in its fused layout; auto: local where slimx knows that layout",
    )
    quantise: Literal["ieee", "triton", "te", "ue8m0"] | None = Field(
        None,
        description="rule by which linear weights become fp8 in blocks of 128 x 128 (docs/numerics.md), in exact mode "
        "those that the trainer computes with, too; null: none",
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
    deadline: Seconds = Field(300, description="seconds for one publication")
    engine_deadline: Seconds = Field(
        120, description="seconds for one step of one engine (a bucket, the copy, ...); a later one is quarantined"
    )

    @property
    def on_device(self) -> bool:
        """True if buckets are packed in the memory of a GPU."""
        return self.transport in ("cuda_ipc", "nccl")

    @property
    def one_machine(self) -> bool:
        """True if engines must be on the publisher's machine."""
        return self.transport in ("memory", "cuda_ipc")


class Checkpoint(Section):
    every: Count = Field(0, description="steps between checkpoints; 0: by `every_seconds` alone, and at the end")
    every_seconds: Seconds | None = Field(
        1800,
        description="seconds after which the next step that ends is followed by a checkpoint, whatever `every` says: "
        "what a crash can cost; null: by `every` alone",
    )
    keep: Amount = Field(2, description="newest checkpoints kept")
    keep_every: Count = Field(0, description="checkpoints of every so many steps are kept for good; 0: none is")
    asynchronous: bool = Field(
        True, description="write files in the background from a copy in host memory, while the run goes on"
    )
    deadline: Seconds = Field(1800, description="seconds until all files of a checkpoint must be on disk")
    verify: Literal["size", "full"] = Field(
        "full", description="before a checkpoint is loaded, compare its files' sizes only, or their digests too"
    )
    damaged: Literal["skip", "stop"] = Field(
        "skip",
        description="what becomes of a newest checkpoint that is damaged when a run resumes: skip renames it to "
        "iter_NNNNNNN.damaged, says so and goes on from the one before, if there is one; stop refuses to start",
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
            raise Refusal(
                f"checkpoint.keep_every is {self.keep_every}, but checkpoints are written "
                + (f"every {self.every} steps" if self.every else "by time and at the end only (checkpoint.every is 0)")
                + "; make it a multiple of checkpoint.every",
                code="checkpoint.keep_every",
                about="checkpoint.keep_every",
            )
        return self


def batches_in_flight(rollout: Rollout, schedule: Schedule) -> float:
    """Groups that are open while a step waits for its own, over `rollout.prompts_per_step`."""
    return rollout.over_sampling or float(max(1, schedule.max_staleness + 1 - schedule.window))
