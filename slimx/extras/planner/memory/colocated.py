"""A GPU that a trainer rank and an engine rank use in turns (`schedule.colocate`), in a few figures."""

from __future__ import annotations

from collections.abc import Sequence

from slimx.extras.planner.memory_record import ColocatedMemory, EngineMemory, PhaseMemory
from slimx.preflight.hardware import Machine


def colocated_memory(
    machine: Machine, phases: Sequence[PhaseMemory], engines: Sequence[EngineMemory]
) -> ColocatedMemory | None:
    """The fullest shared GPU; None without one, or where the GPU is unknown."""
    shared = {each.phase: each.nbytes for each in phases if each.gpu == "shared"}
    if machine.memory is None or not shared:
        return None
    return ColocatedMemory(
        memory=machine.memory,
        training=shared["train"],
        generating=shared["generate"],
        publishing=shared["publish"],
        engine_asleep=max(engine.overhead + engine.dispatcher for engine in engines),
        margin=machine.memory - max(shared.values()),
    )
