"""Rules about GPU memory and about the host memory of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slimx.config.rule import Problems, rule
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import ServedEngines
from slimx.config.sections.eval import Eval
from slimx.config.sections.rollout import Rollout
from slimx.config.sections.trainer import Trainer
from slimx.extras.evaluation.settings import lengths

if TYPE_CHECKING:
    from slimx.extras.planner.memory_record import EngineMemory, HostMemory, PhasePeak, TrainerMemory
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
        record = rank[0]
        peak = peak_of(rank)
        if peak + margin > machine.memory:
            models = " and ".join(member.model for member in rank)
            yield (
                f"{models} rank {record.rank} (stage {record.stage}) would need {_gib(peak)} GiB ({_kinds(record)}) "
                f"plus trainer.memory_margin_mib={margin // MIB}, but a GPU has only {_gib(machine.memory)} GiB; use "
                "more ranks, recompute more modules (trainer.recompute), or raise "
                "trainer.optimizer.offload_fraction"
            )


@rule("memory.engine", "rollout.engines")
def serves(
    rollout: Rollout, served: ServedEngines, machine: Machine, engine_memory: tuple[EngineMemory, ...]
) -> Problems:
    if machine.memory is None:
        return
    for engine in engine_memory:
        key = _key(served, engine.group)
        if engine.static is not None and engine.weights > engine.static:
            yield (
                key,
                f"a rank of engine {engine.group} has {_gib(engine.weights)} GiB of weights, but SGLang reserves only "
                f"{_gib(engine.static)} GiB of a GPU for weights and KV cache "
                f"({key}.sglang.mem_fraction_static={engine.static_fraction}); raise {key}.tensor, or set "
                "publish.quantize",
            )
        elif engine.concurrency == 0:
            states = ""
            if engine.state_per_request > 0:
                states = f" in addition to states of {engine.state_per_request} bytes per request"
            yield (
                key,
                f"engine {engine.group} has memory for the KV cache of only {engine.kv_tokens} tokens{states}, but a "
                f"rollout may have {rollout.longest} tokens; raise {key}.tensor or {key}.max_total_tokens, or lower "
                "rollout.sampling.max_new_tokens",
            )


@rule("memory.engine_eval", "eval.max_new_tokens")
def answers_at_length(rollout: Rollout, eval: Eval, engine_memory: tuple[EngineMemory, ...]) -> Problems:
    for engine in engine_memory:
        for key, answer in lengths(eval).items():
            longest = rollout.max_prompt_tokens + answer
            if engine.concurrency and engine.kv_tokens is not None and engine.kv_tokens < longest:
                yield (
                    key,
                    f"engine {engine.group} has memory for the KV cache of only {engine.kv_tokens} tokens, but an "
                    f"evaluated answer and its prompt may have {longest}; raise the group's tensor, or lower {key}",
                )


@rule("memory.colocated", "schedule.colocate")
def takes_turns(machine: Machine, trainer: Trainer, phases: tuple[PhasePeak, ...]) -> Problems:
    for group, excess in _too_full(machine, trainer, phases, "shared"):
        yield (
            f"trainer and engine {group}, which share GPUs (schedule.colocate=true), do not fit on {excess}; lower "
            "rollout.engines.sglang.mem_fraction_static, raise trainer.world_size, or set publish.staging=bucket"
        )


@rule("memory.phase", "trainer")
def holds_in_all_phases(machine: Machine, trainer: Trainer, phases: tuple[PhasePeak, ...]) -> Problems:
    others = tuple(peak for peak in phases if peak.phase != "train")  # the rule memory.trainer covers this phase
    for gpu in ("trainer", "critic"):
        for _, excess in _too_full(machine, trainer, others, gpu):
            yield (
                f"the {gpu} rank that needs the most memory does not fit on {excess}; split the {gpu} over more ranks, "
                "or set publish.staging=bucket"
            )


@rule("memory.engine_phase", "rollout.engines")
def serves_in_all_phases(
    served: ServedEngines, machine: Machine, trainer: Trainer, phases: tuple[PhasePeak, ...]
) -> Problems:
    for group, excess in _too_full(machine, trainer, phases, "engine"):
        key = _key(served, group)
        yield (
            key,
            f"a rank of engine {group} does not fit on {excess}; lower {key}.sglang.mem_fraction_static, or set "
            "publish.staging=bucket",
        )


def margin_warnings(machine: Machine, phases: tuple[PhasePeak, ...]) -> Iterator[str]:
    """Yields a warning for each kind of GPU that is nearly full in some phase."""
    from slimx.preflight.hardware import MARGIN

    if machine.memory is None:
        return
    fullest: dict[tuple[str, str], PhasePeak] = {}
    for peak in phases:
        key = peak.gpu, peak.group
        if key not in fullest or peak.nbytes > fullest[key].nbytes:
            fullest[key] = peak
    for (kind, group), peak in fullest.items():
        left = machine.memory - peak.nbytes
        if 0 <= left < MARGIN:
            name = f"{kind} GPU"
            if group:
                name += f" of {group}"
            yield (
                f"the fullest {name} has only {_gib(left)} GiB of {_gib(machine.memory)} GiB left in phase "
                f"{_describe(peak)}, and the estimate may be off by {MARGIN // GIB} GiB; split the model over more "
                "ranks, or lower sglang.mem_fraction_static of the engines or trainer.max_tokens_per_microbatch"
            )


@rule("memory.host", "cluster.host_memory_gib")
def fits_host(machine: Machine, host: HostMemory) -> Problems:
    if machine.memory is None or host.memory is None or host.nbytes <= host.memory:
        return
    largest = host.parts[0]
    yield (
        f"the {host.ranks} trainer ranks on a node need {_gib(host.nbytes)} GiB of host memory, including "
        f"{_gib(largest.nbytes)} GiB for {largest.name}, but the node has only {_gib(host.memory)} GiB (set by "
        "cluster.host_memory_gib or implied by cluster.gpu); lower trainer.optimizer.offload_fraction, or place fewer "
        "trainer ranks on each node"
    )


def _too_full(machine: Machine, trainer: Trainer, phases: tuple[PhasePeak, ...], gpu: str) -> Iterator[tuple[str, str]]:
    """Yields (engine group name, description of the worst phase) for each group in which a GPU of the kind `gpu` needs
    more memory than it has."""
    if machine.memory is None:
        return
    margin = trainer.memory_margin_mib * MIB
    worst: dict[str, tuple[int, PhasePeak]] = {}
    for peak in phases:
        if peak.gpu == gpu:
            needed = peak.nbytes
            if peak.phase == "train":
                needed += margin
            if peak.group not in worst or needed > worst[peak.group][0]:
                worst[peak.group] = needed, peak
    for group, (needed, peak) in worst.items():
        if needed > machine.memory:
            yield group, f"a GPU of {_gib(machine.memory)} GiB in phase {_describe(peak)}"


def _key(served: ServedEngines, name: str) -> str:
    """Returns the key of the list that contains the engine group `name`."""
    return next(group.key for group in served.groups if group.name == name)


def _describe(peak: PhasePeak) -> str:
    largest = ", ".join(f"{part.name} {_gib(part.nbytes)}" for part in peak.parts[:3])
    return f"{peak.phase}, which takes {_gib(peak.nbytes)} GiB ({largest})"


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
