"""Rules about the memory of a GPU and of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.critic import Critic
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer

if TYPE_CHECKING:
    from slimx.extras.planner.memory_record import EngineMemory, HostMemory, PhaseMemory, TrainerMemory
    from slimx.preflight.hardware import Machine

GIB = 2**30
MIB = 2**20


@rule("memory.trainer", "trainer")
def trains(
    trainer: Trainer, critic: Critic | None, machine: Machine, trainer_memory: tuple[TrainerMemory, ...]
) -> Problems:
    if machine.memory is None:
        return
    from slimx.extras.planner.memory.phases import by_gpu, peak_of

    margin = trainer.memory_margin_mib * MIB
    ranks, critics = by_gpu(trainer_memory, critic is not None and critic.placement == "own")
    for rank in (*ranks, *critics):
        record, peak = rank[0], peak_of(rank)
        if peak + margin > machine.memory:
            what = " and ".join(each.model for each in rank)
            yield (
                f"{what} rank {record.rank} (stage {record.stage}) would need {_gib(peak)} GiB and "
                f"trainer.memory_margin_mib {margin // MIB} of a GPU's {_gib(machine.memory)} GiB: {_kinds(record)}; "
                "use more ranks, more recomputation or trainer.optimizer.offload_fraction"
            )


@rule("memory.engine", "rollout.engines")
def serves(rollout: Rollout, machine: Machine, engine_memory: tuple[EngineMemory, ...]) -> Problems:
    for engine in engine_memory if machine.memory is not None else ():
        if engine.static is not None and engine.weights > engine.static:
            yield (
                f"a rank of engine {engine.group} holds {_gib(engine.weights)} GiB of weights, and SGLang gives "
                f"weights and KV cache {_gib(engine.static)} GiB of a GPU (mem_fraction_static "
                f"{engine.static_fraction}); raise rollout.engines.tensor, or quantise (publish.quantise)"
            )
        elif engine.concurrency == 0:
            states = f" beside states of {engine.state_per_request} bytes per request" * (engine.state_per_request > 0)
            yield (
                f"engine {engine.group} has room for the keys and values of {engine.kv_tokens} tokens{states}, and one "
                f"rollout may have {rollout.longest}; raise rollout.engines.tensor or max_total_tokens, or lower "
                "rollout.sampling.max_new_tokens"
            )


@rule("memory.colocated", "schedule.colocate")
def takes_turns(machine: Machine, trainer: Trainer, phases: tuple[PhaseMemory, ...]) -> Problems:
    for group, told in _too_full(machine, trainer, phases, "shared"):
        yield (
            f"trainer and engine {group}, which take turns (schedule.colocate), do not fit {told}; lower "
            "mem_fraction_static, split the trainer over more ranks, or set publish.staging=bucket"
        )


@rule("memory.phase", "trainer")
def holds_in_all_phases(machine: Machine, trainer: Trainer, phases: tuple[PhaseMemory, ...]) -> Problems:
    others = tuple(each for each in phases if each.phase != "train")  # "memory.trainer" tells of that one
    for gpu in ("trainer", "critic"):
        for _, told in _too_full(machine, trainer, others, gpu):
            yield (
                f"the fullest {gpu} rank does not fit {told}; use more ranks, or smaller buckets "
                "(publish.staging=bucket)"
            )


@rule("memory.engine_phase", "rollout.engines")
def serves_in_all_phases(machine: Machine, trainer: Trainer, phases: tuple[PhaseMemory, ...]) -> Problems:
    for group, told in _too_full(machine, trainer, phases, "engine"):
        yield (
            f"a rank of engine {group} does not fit {told}; lower mem_fraction_static of rollout.engines, or set "
            "publish.staging=bucket"
        )


def margin_warnings(machine: Machine, phases: tuple[PhaseMemory, ...]) -> Iterator[str]:
    """Sentences about GPUs that are nearly full in some phase, one for each kind."""
    from slimx.preflight.hardware import MARGIN

    for kind, group in dict.fromkeys((each.gpu, each.group) for each in phases if machine.memory is not None):
        own = [each for each in phases if (each.gpu, each.group) == (kind, group)]
        worst = max(own, key=lambda each: each.nbytes)
        if 0 <= machine.memory - worst.nbytes < MARGIN:
            name = f"{kind} GPU of {group}" if group else f"{kind} GPU"
            yield (
                f"the fullest {name} has {_gib(machine.memory - worst.nbytes)} GiB left of {_gib(machine.memory)} in "
                f"phase {_told(worst)}, and estimates may be off by {MARGIN // GIB}; use more ranks, or lower "
                "mem_fraction_static or trainer.max_tokens_per_microbatch"
            )


@rule("memory.host", "cluster.host_memory_gib")
def fits_host(machine: Machine, host: HostMemory) -> Problems:
    if machine.memory is None or host.memory is None or host.nbytes <= host.memory:
        return
    first = host.held[0]
    yield (
        f"{host.ranks} trainer ranks need {_gib(host.nbytes)} GiB of a node's host memory, most of it {first.what} "
        f"({_gib(first.nbytes)}), and a node has {_gib(host.memory)} (cluster.host_memory_gib, or by cluster.gpu); "
        "lower trainer.optimizer.offload_fraction, or use more nodes"
    )


def _too_full(
    machine: Machine, trainer: Trainer, phases: tuple[PhaseMemory, ...], gpu: str
) -> Iterator[tuple[str, str]]:
    """Groups of GPUs of one kind, and what the fullest of them does not fit, in words."""
    margin = trainer.memory_margin_mib * MIB
    groups = dict.fromkeys(each.group for each in phases if each.gpu == gpu)
    for group in groups if machine.memory is not None else ():
        own = [each for each in phases if each.gpu == gpu and each.group == group]
        needed = {each.phase: each.nbytes + (margin if each.phase == "train" else 0) for each in own}
        worst = max(own, key=lambda each: needed[each.phase])
        if needed[worst.phase] > machine.memory:
            yield group, f"a GPU of {_gib(machine.memory)} GiB in phase {_told(worst)}"


def _told(worst: PhaseMemory) -> str:
    largest = ", ".join(f"{each.what} {_gib(each.nbytes)}" for each in worst.held[:3])
    return f"{worst.phase}, which takes {_gib(worst.nbytes)} GiB ({largest})"


def _kinds(record: TrainerMemory) -> str:
    kinds = {
        "weights": record.weights,
        "gradients": record.gradients,
        "optimizer": record.optimizer,
        "activations": record.activations + max(record.head, record.work),
    }
    return ", ".join(f"{kind} {_gib(size)}" for kind, size in kinds.items())


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"
