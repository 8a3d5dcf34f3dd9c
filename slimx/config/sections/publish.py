"""Section publish: transfer of new weights to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimx.config.section import LARGEST, PathText, Positive, Seconds, Section

Transport = Literal["auto", "memory", "cuda_ipc", "nixl", "disk"]


class Delta(Section):
    """Publication of changed elements instead of all weights."""

    every_full: Annotated[int, Field(ge=2, le=LARGEST)]
    """Interval of full publications: one in this many sends all weights to every engine."""


class Publish(Section):
    bucket_mib: Positive = 512
    """Size of one bucket of weights in MiB."""
    encoding: Literal["auto", "hf", "local"] = "auto"
    """hf: tensors with Hugging Face names, which any engine can load; local: the bytes of each engine rank in its fused
    layout; auto: local if slimx supports that layout."""
    adapters: Literal["merged", "alone"] = "merged"
    """Form of adapters (trainer.lora) in the engines. merged: every publication sends weights with merged adapters;
    alone: the base is sent once, and then the adapters of each version, which engines apply separately
    (docs/lora.md)."""
    quantize: Literal["ieee", "triton", "te", "ue8m0", "int4"] | None = None
    """Rule that quantizes linear weights to fp8 in blocks of 128 x 128 (docs/numerics.md); int4: routed experts in
    INT4, for engines on GPUs that load the output of `slimx convert hf-to-int4`; null: none."""
    transport: Transport = "auto"
    """auto: memory or cuda_ipc on one machine, nixl between several. memory: shared memory; cuda_ipc: GPU to GPU; nixl:
    from every trainer rank to every engine over the network; disk: shared files (docs/publication.md)."""
    directory: PathText | None = None
    """Directory of the disk transport; null: run.dir/publish."""
    staging: Literal["model", "bucket"] = "model"
    """model: engines serve while all weights are staged, which needs memory for a whole model; bucket: engines pause
    and copy each bucket when it arrives, which needs memory for two buckets."""
    delta: Delta | None = None
    """Send only the elements that have changed since the last publication, with a mask, by nixl or disk; null: send all
    weights. Trainers and engines keep the last published bytes in host memory. It pays off on slow links and file
    systems (docs/publication.md)."""
    deadline: Seconds = 300
    """Seconds for one publication."""
    engine_deadline: Seconds = 120
    """Seconds for one step of one engine (a bucket, the copy, ...). An engine that takes longer is quarantined."""

    @property
    def in_fp8(self) -> bool:
        """True if linear weights are published in fp8."""
        return self.quantize not in (None, "int4")

    @property
    def changes(self) -> tuple[int, int] | None:
        """Size in bytes of the elements that deltas compare (1 for quantized codes, 2 for bf16), and the interval of
        full publications in versions; None: every publication is full."""
        if self.delta is None:
            return None
        element_bytes = 2 if self.quantize is None else 1
        return element_bytes, self.delta.every_full

    @property
    def on_device(self) -> bool:
        """True if buckets are packed in GPU memory shared within one machine."""
        return self.transport == "cuda_ipc"

    @property
    def one_machine(self) -> bool:
        """True if engines must be on the publisher's machine."""
        return self.transport in ("memory", "cuda_ipc")
