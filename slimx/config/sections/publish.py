"""Section `publish`: transfer of new weights to the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimx.config.section import LARGEST, PathText, Positive, Seconds, Section

Transport = Literal["auto", "memory", "cuda_ipc", "nixl", "disk"]


class Delta(Section):
    """Publication of only the elements that have changed, instead of all weights."""

    every_full: Annotated[int, Field(ge=2, le=LARGEST)]
    """Interval of full publications: one in every `every_full` publications to an engine sends all weights."""


class Publish(Section):
    bucket_mib: Positive = 512
    """Size in MiB of the buckets in which weights are packed for transfer."""
    encoding: Literal["auto", "hf", "local"] = "auto"
    """Format in which weights are sent. hf: tensors with Hugging Face names, which any engine can load; local: the
    bytes of each engine rank in its fused layout; auto: local if slimx supports that layout."""
    adapters: Literal["merged", "alone"] = "merged"
    """Use of adapters (trainer.lora) by the engines. merged: every publication sends weights with the adapters merged
    into them; alone: the base weights are sent once, followed by the adapters of each version, which engines apply
    separately (docs/lora.md)."""
    quantize: Literal["ieee", "triton", "te", "ue8m0", "int4"] | None = None
    """Rule by which linear weights are quantized to fp8 in blocks of 128 x 128 (docs/numerics.md). int4: routed experts
    are quantized to INT4, for engines on GPUs that load the output of `slimx convert hf-to-int4`. null: weights are not
    quantized."""
    transport: Transport = "auto"
    """Weight transport (docs/publication.md). auto: memory or cuda_ipc on one machine, nixl between several, disk for
    external servers on other machines; memory: shared memory; cuda_ipc: from GPU to GPU; nixl: over the network from
    every trainer rank to every engine; disk: files on a shared file system."""
    directory: PathText | None = None
    """Shared directory for the files of the disk transport; null: run.dir/publish."""
    staging: Literal["model", "bucket"] = "model"
    """Amount of weights staged before engines load them. model: engines continue to serve while all weights are staged,
    which needs memory for a whole model; bucket: engines pause and copy each bucket when it arrives, which needs memory
    for two buckets."""
    delta: Delta | None = None
    """Publication of only those elements that have changed since the previous publication, with a mask that marks them;
    supported by the transports nixl and disk. null: all weights are sent. Trainers and engines keep the last published
    bytes in host memory. Useful with slow networks and file systems (docs/publication.md)."""
    deadline: Seconds = 300
    """Seconds within which a publication must finish."""
    engine_deadline: Seconds = 120
    """Seconds within which an engine must finish one operation of a publication, such as receiving a bucket or copying
    the weights. An engine that takes longer is quarantined."""

    @property
    def in_fp8(self) -> bool:
        """True if linear weights are published in fp8."""
        return self.quantize not in (None, "int4")

    @property
    def changes(self) -> tuple[int, int] | None:
        """Size in bytes of the elements that deltas compare (1 for quantized codes, 2 for bf16), and number of versions
        from one full publication to the next; None if every publication is full."""
        if self.delta is None:
            return None
        element_bytes = 2 if self.quantize is None else 1
        return element_bytes, self.delta.every_full

    @property
    def on_device(self) -> bool:
        """True if buckets are packed in GPU memory that trainers and engines on one machine share."""
        return self.transport == "cuda_ipc"

    @property
    def one_machine(self) -> bool:
        """True if the transport requires all engines to be on the publisher's machine."""
        return self.transport in ("memory", "cuda_ipc")
