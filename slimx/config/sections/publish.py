"""Section publish: how new weights reach the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimx.config.section import LARGEST, PathText, Positive, Seconds, Section

Transport = Literal["auto", "memory", "cuda_ipc", "nixl", "disk"]


class Delta(Section):
    """publish.delta: what has changed travels, in place of all weights."""

    every_full: Annotated[int, Field(ge=2, le=LARGEST)]
    """Each so many publications bring all weights to every engine."""


class Publish(Section):
    bucket_mib: Positive = 512
    """Size of one bucket of weights in MiB."""
    encoding: Literal["auto", "hf", "local"] = "auto"
    """hf: tensors with Hugging Face names, which any engine loads; local: each engine rank's own bytes in its fused
    layout; auto: local where slimx knows that layout."""
    adapters: Literal["merged", "alone"] = "merged"
    """With trainer.lora. merged: engines get weights with their adapters in them, and know of none; alone: they get the
    base once, and then adapters at each version, which they compute with beside it (docs/operations.md)."""
    quantise: Literal["ieee", "triton", "te", "ue8m0", "int4"] | None = None
    """Rule by which linear weights become fp8 in blocks of 128 x 128 (docs/numerics.md), in exact mode those that the
    trainer computes with, too. int4: routed experts become INT4, each 32 columns with a scale, for engines on GPUs that
    start from what `slimx convert hf-to-int4` writes. null: none."""
    transport: Transport = "auto"
    """auto: memory or cuda_ipc on one machine, nixl between several; `slimx plan` says which, and why. memory: engines
    on the trainers' machine map it; cuda_ipc: they copy it from GPU to GPU; nixl: over the network, from every trainer
    rank straight to every engine's machine, between GPUs through the host's memory; disk: through files that both sides
    see, from which an engine that was lost catches up without the trainers."""
    directory: PathText | None = None
    """Directory of the disk transport; null: run.dir/publish."""
    staging: Literal["model", "bucket"] = "model"
    """model: engines serve while everything is staged, in memory for a whole model (host memory; with cuda_ipc the
    engine's GPUs hold it twice); bucket: they are paused and copy each bucket as it comes, in memory for two
    buckets."""
    delta: Delta | None = None
    """Send only elements that have changed since the last publication, with masks that say which, by nixl, or as files
    with disk; both sides keep the bytes published last, in host memory; null: send all weights. Worth it over slow
    links and file systems (docs/publication.md)."""
    deadline: Seconds = 300
    """Seconds for one publication."""
    engine_deadline: Seconds = 120
    """Seconds for one step of one engine (a bucket, the copy, ...); a later one is quarantined."""

    @property
    def in_fp8(self) -> bool:
        """True if linear weights are published in fp8."""
        return self.quantise not in (None, "int4")

    @property
    def changes(self) -> tuple[int, int] | None:
        """Bytes of the elements among which changes are looked for (most of what is published is codes, or bf16),
        and every how many versions one is whole; None: all are."""
        return None if self.delta is None else (2 if self.quantise is None else 1, self.delta.every_full)

    @property
    def on_device(self) -> bool:
        """True if buckets are packed in memory that GPUs of one machine share."""
        return self.transport == "cuda_ipc"

    @property
    def one_machine(self) -> bool:
        """True if engines must be on the publisher's machine."""
        return self.transport in ("memory", "cuda_ipc")
