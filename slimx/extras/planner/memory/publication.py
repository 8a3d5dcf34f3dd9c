"""Memory of publications: for merging weights with adapters (`trainer.lora`; also for exports), for RDMA buffers of
sender and receiver with `publish.transport: nixl`, and for deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from slimx.config.schema import Config
from slimx.extras.direct import SLOTS
from slimx.extras.direct.wire import move_bytes, summed
from slimx.extras.lora.merging_buffer import merging_buffer_bytes
from slimx.extras.lora.targets import adapts
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import GIB
from slimx.reshard.pack import PORTION
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import export_plan

CONTEXT = GIB // 2
"""Assumed size in bytes of the CUDA context that an engine's receiving process has on each GPU whose memory it writes
to."""


class MergingBytes(NamedTuple):
    """Memory for merging weights with adapters, in bytes, on the trainer rank that needs the most."""

    published: int = 0
    """Bytes kept from the first publication on, for the merged weights of one bucket."""
    exported: int = 0
    """Bytes kept from the first export on, for the merged weights of one bucket of an export."""
    work: int = 0
    """Bytes that are needed temporarily while the largest weight is merged with its adapter."""


def merging_memory(config: Config, spec: ModelSpec, sizes: Sizes, published: Plan | None) -> MergingBytes:
    """Returns the memory that trainer ranks need for merging weights with adapters. `published`: plan by which trainer
    ranks pack publications (with `publish.transport: nixl`, the plan that divides the bytes among these ranks); None
    without a publication."""
    if config.trainer.lora is None:
        return MergingBytes()
    merges = partial(adapts, config.trainer.lora.targets)
    publishing = 0
    exporting = 0
    work = 0
    if published is not None and not config.serves_adapters:  # without it engines get unmerged parameters
        publishing = max(merging_buffer_bytes(published, merges).values(), default=0)
        work = merging_work(published, merges)
    if exports(config):
        exported = export_plan(config, spec, sizes)
        exporting = max(merging_buffer_bytes(exported, merges).values(), default=0)
        work = max(work, merging_work(exported, merges))
    return MergingBytes(publishing, exporting, work)


def merging_work(plan: Plan, merges: Callable[[str], bool]) -> int:
    """Returns the number of bytes needed temporarily for merging the largest weight: the fp32 product of its adapter's
    matrices, and a copy rounded to the weight's dtype (`slimx.extras.lora.merged`). `merges`: function that returns
    True for the names of parameters with an adapter."""
    largest = 0
    for parameter in plan.parameters:
        if merges(parameter.name):
            elements = int(np.prod(parameter.shape, dtype=np.int64))
            itemsize = 4
            if parameter.dtype != "float32":
                itemsize += ITEMSIZE[parameter.dtype]
            largest = max(largest, elements * itemsize)
    return largest


def exports(config: Config) -> bool:
    """Returns True if trainer ranks export the model in Hugging Face format during the run or at its end."""
    return config.checkpoint.export_hf or config.checkpoint.export_every > 0


def most_merging(config: Config, adapted: int) -> int:
    """Returns an upper bound on the bytes that `merging_memory` counts as kept; needs no compiled plan.

    `adapted`: number of a trainer rank's weight elements that have an adapter. The bound assumes that every engine rank
    receives separate buckets, and that each bucket contains weights of which the trainer rank has a shard."""
    if config.trainer.lora is None:
        return 0
    published = 0
    if not config.serves_adapters:
        published = max((group.ranks for group in config.served.policy), default=0)
    exported = int(exports(config))
    nbytes = adapted * ITEMSIZE[config.numerics.dtype]
    bucket = round(2 * config.publish.bucket_mib * 2**20)
    return min(nbytes, bucket * published) + min(nbytes, bucket * exported)


class DirectMemory(NamedTuple):
    """Memory that publications with nixl need, in bytes, without padding to 16 bytes. It is host memory or, with
    buckets on GPUs, GPU memory."""

    ring: int
    """Bytes of send buffers, on the trainer rank that sends the largest part of a bucket to all engines."""
    landing: int
    """Bytes of receive buffers in one receiver of an engine, for buckets in transit to its ranks."""
    kept: int = 0
    """With `publish.delta`, bytes kept on the fullest trainer rank: the weights that it sent last, and its part of a
    bucket."""
    received: int = 0
    """With `publish.delta`, bytes kept in one receiver of an engine: the weights that it received last."""


def direct_memory(dealt: Plan, *, ranks: int, edges: Sequence[int], delta: bool = False) -> DirectMemory:
    """Returns the memory that trainer ranks and each receiver of an engine need for publications of the plan `dealt`,
    which divides the bytes among trainer ranks.

    `ranks`: number of trainer ranks. `edges`: index of the first target of each receiver, followed by the number of
    targets (`copies_of`). `delta`: True if publications send deltas."""
    moved = dealt.moved
    nbytes = move_bytes(dealt)
    receiver = np.searchsorted(edges, moved["target"], side="right") - 1
    sent = summed((dealt.count, ranks), (moved["bucket"], moved["source"]), nbytes)
    received = summed((dealt.count, len(edges) - 1), (moved["bucket"], receiver), nbytes)
    slots = min(SLOTS, dealt.count)  # each is large enough for the largest bucket
    ring = slots * int(np.max(sent))
    landing = slots * int(np.max(received))
    if not delta:
        return DirectMemory(ring, landing)
    kept = sent.sum(axis=0) + sent.max(axis=0)
    return DirectMemory(ring, landing, int(kept.max()), int(received.sum(axis=0).max()))


def packed_on_gpu(plan: Plan, *, ranks: int, portion: int = PORTION) -> int:
    """Returns the maximum GPU memory, in bytes, that a rank's part of a bucket takes on its way to host memory.
    `ranks`: number of trainer ranks; `portion`: bytes copied at a time."""
    moved = plan.moved
    part = np.max(summed((plan.count, ranks), (moved["bucket"], moved["source"]), move_bytes(plan)))
    return min(portion, int(part))


def changes_memory(plan: Plan) -> tuple[int, int]:
    """Returns the memory that `publish.delta` needs with the disk transport, in bytes: on trainer rank 0 (the last
    published weights and the deltas of one bucket), and per engine (the last published weights)."""
    sizes = []
    for bucket in range(plan.count):
        sizes.append(sum(target[bucket].size for target in plan.buckets))
    return sum(sizes) + max(sizes), sum(sizes)
