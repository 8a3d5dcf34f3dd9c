"""Memory that publications take: to merge weights with adapters (`trainer.lora`; for exports, too), registered at both
ends with `publish.transport: nixl`, and for changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from slimx.config.schema import Config
from slimx.extras.direct import SLOTS
from slimx.extras.direct.wire import move_bytes, summed
from slimx.extras.lora.room import merged_room
from slimx.extras.lora.targets import adapts
from slimx.layout.number_formats import ITEMSIZE
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import GIB
from slimx.reshard.pack import PORTION
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.publication import export_plan

CONTEXT = GIB // 2
"""Bytes that the process beside an engine takes of each GPU in whose memory it receives: assumed."""


class MergingBytes(NamedTuple):
    """Bytes of the trainer rank that needs most."""

    published: int = 0
    """Kept from the first publication on, for the weights of one bucket."""
    exported: int = 0
    """Kept from the first export on."""
    work: int = 0
    """While the largest weight is merged."""


def merging_memory(config: Config, spec: ModelSpec, sizes: Sizes, published: Plan | None) -> MergingBytes:
    """`published`: the plan by which ranks pack publications, dealt out where it is (`publish.transport: nixl`)."""
    if config.trainer.lora is None:
        return MergingBytes()
    if config.serves_adapters:  # engines get the parameters as they are
        published = None
    merges = partial(adapts, config.trainer.lora.targets)
    exported = export_plan(config, spec, sizes) if exports(config) else None
    room, other = (
        max(merged_room(plan, merges).values(), default=0) if plan is not None else 0 for plan in (published, exported)
    )
    plans = [plan for plan in (published, exported) if plan is not None]
    return MergingBytes(room, other, max((merging_work(plan, merges) for plan in plans), default=0))


def merging_work(plan: Plan, merges: Callable[[str], bool]) -> int:
    """Bytes beside that memory while the largest weight is merged: its product in fp32, and that rounded to the
    weight's dtype (`slimx.extras.lora.merged`)."""
    elements = [(int(np.prod(p.shape, dtype=np.int64)), p.dtype) for p in plan.parameters if merges(p.name)]
    return max((count * (4 if dtype == "float32" else 4 + ITEMSIZE[dtype]) for count, dtype in elements), default=0)


def exports(config: Config) -> bool:
    """Returns True if trainer ranks write the model in Hugging Face's format during the run or at its end."""
    return config.checkpoint.export_hf or config.checkpoint.export_every > 0


def most_merging(config: Config, adapted: int) -> int:
    """Bytes for `merging_memory`'s rooms at most, where no plan is compiled; `adapted`: a rank's elements that have
    adapters. A bucket of every engine rank may bring weights that it holds a part of."""
    if config.trainer.lora is None:
        return 0
    groups = () if config.serves_adapters else config.rollout.policy_engines
    ranks = [max((group.ranks for group in groups), default=0), int(exports(config))]
    bucket = round(2 * config.publish.bucket_mib * 2**20)
    return sum(min(adapted * ITEMSIZE[config.numerics.dtype], bucket * count) for count in ranks)


class DirectMemory(NamedTuple):
    """Bytes of memory, the host's or GPUs', paddings to 16 bytes left out."""

    ring: int
    """Registered by the trainer rank that sends most of a bucket to all engines."""
    landing: int
    """Registered for one receiver of an engine, for buckets under way to its ranks."""
    kept: int = 0
    """With `publish.delta` kept by the fullest trainer rank: what it sent last, and its part of a bucket."""
    held: int = 0
    """With `publish.delta` held by one receiver of an engine: what came last."""


def direct_memory(dealt: Plan, *, ranks: int, edges: Sequence[int], delta: bool = False) -> DirectMemory:
    """Memory that `ranks` trainer ranks and each receiver of each engine take for the publications of a dealt plan;
    `edges`: as `copies_of` gives them; `delta`: for publications that bring what has changed."""
    moved, nbytes = dealt.moved, move_bytes(dealt)
    receiver = np.searchsorted(edges, moved["target"], side="right") - 1
    sent = summed((dealt.count, ranks), (moved["bucket"], moved["source"]), nbytes)
    received = summed((dealt.count, len(edges) - 1), (moved["bucket"], receiver), nbytes)
    slots = min(SLOTS, dealt.count)  # each has room for the largest bucket
    ring, landing = slots * int(np.max(sent)), slots * int(np.max(received))
    if not delta:
        return DirectMemory(ring, landing)
    kept = sent.sum(axis=0) + sent.max(axis=0)
    return DirectMemory(ring, landing, int(kept.max()), int(received.sum(axis=0).max()))


def packed_on_gpu(plan: Plan, *, ranks: int, portion: int = PORTION) -> int:
    """Bytes of a rank's GPU through which its part of a bucket goes to host memory, at most."""
    moved = plan.moved
    part = np.max(summed((plan.count, ranks), (moved["bucket"], moved["source"]), move_bytes(plan)))
    return min(portion, int(part))


def changes_memory(plan: Plan) -> tuple[int, int]:
    """(beside trainer rank 0, beside one engine) bytes that `publish.delta` takes with `disk`: what was published last,
    and there one bucket's changes."""
    sizes = [sum(target[bucket].size for target in plan.buckets) for bucket in range(plan.count)]
    return sum(sizes) + max(sizes), sum(sizes)
