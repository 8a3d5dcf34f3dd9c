"""Memory that both ends of a publication take: registered with `publish.transport: nixl`, and for changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slimx.extras.direct import SLOTS
from slimx.extras.direct.wire import move_bytes, summed
from slimx.preflight.hardware import GIB
from slimx.reshard.pack import PORTION
from slimx.reshard.plan.copy_plan import Plan

CONTEXT = GIB // 2
"""Bytes that the process beside an engine takes of each GPU in whose memory it receives: assumed."""


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
