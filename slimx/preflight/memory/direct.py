"""Host memory that both ends of direct transfers register (`publish.transport: nixl`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slimx.reshard.direct import SLOTS
from slimx.reshard.plan.copy_plan import Plan
from slimx.reshard.plan.dealing import deal
from slimx.reshard.plan.wire import move_bytes, summed


class DirectMemory(NamedTuple):
    """Bytes of host memory, paddings to 16 bytes left out."""

    ring: int
    """Registered by the trainer rank that sends most of a bucket to all engines."""
    landing: int
    """Registered by the process beside one engine, for buckets under way to all of its ranks."""


def direct_memory(plan: Plan, *, ranks: int, engines: int) -> DirectMemory:
    """Memory that `ranks` trainer ranks and each of `engines` engines register for the publications of `plan`."""
    dealt = deal(plan, ranks=ranks, engines=engines)
    moved, nbytes = dealt.moved, move_bytes(dealt)
    sent = summed((plan.count, ranks), (moved["bucket"], moved["source"]), nbytes)
    received = summed((plan.count, engines), (moved["bucket"], moved["target"] // plan.targets), nbytes)
    slots = min(SLOTS, plan.count)  # each has room for the largest bucket
    return DirectMemory(ring=slots * int(np.max(sent)), landing=slots * int(np.max(received)))
