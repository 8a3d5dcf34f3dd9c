"""A GPU that a trainer rank and an engine rank use in turns (`schedule.colocate`)."""

from __future__ import annotations

from slimx.preflight.hardware import Machine
from slimx.preflight.memory.trainer import OVERHEAD
from slimx.preflight.record import ColocatedMemory, EngineMemory, TrainerMemory


def colocated_memory(
    machine: Machine, trainers: tuple[TrainerMemory, ...], engines: tuple[EngineMemory, ...]
) -> ColocatedMemory | None:
    """The fullest pair, in each of the three phases of a step; `engines`: those that share the trainers' GPUs. None
    without any, or where the GPU is unknown.

    An engine that sleeps keeps what its process needs; its weights and KV cache leave."""
    if machine.memory is None or not engines:
        return None
    weights = max(engine.weights + engine.staged for engine in engines)
    generating = max(machine.memory if engine.static is None else engine.static for engine in engines)
    asleep = OVERHEAD
    away = max(record.away for record in trainers)
    training = max(record.peak for record in trainers) + asleep
    # Graphs and activations of the engine lie beside what mem_fraction_static counts: at least what its process needs.
    generating = generating + OVERHEAD + away
    publishing = OVERHEAD + weights + max(record.overhead + record.weights + record.publication for record in trainers)
    fullest = max(training, generating, publishing)
    return ColocatedMemory(
        memory=machine.memory,
        training=training,
        generating=generating,
        publishing=publishing,
        engine_asleep=asleep,
        margin=machine.memory - fullest,
    )
