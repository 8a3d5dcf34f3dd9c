"""What a run cannot do, known from its configuration and the model's config.json: every violated constraint, a sentence
each."""

from __future__ import annotations

from collections.abc import Iterator

from slimx.config.schema import Config
from slimx.layout.ranks import Sizes
from slimx.models.families import ModelSpec
from slimx.preflight.hardware import Machine
from slimx.preflight.record import ColocatedMemory, EngineMemory, RankMap, TrainerMemory

GIB = 2**30
MIB = 2**20


def batch_problems(config: Config, spec: ModelSpec, sizes: Sizes, critic: Sizes | None) -> Iterator[str]:
    """Rollouts that the model, a micro-batch or the data-parallel ranks cannot take. `critic`: its sizes, if there is
    one."""
    rollout, updates = config.rollout, config.schedule.updates_per_step
    longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    if longest > spec.gpt["max_sequence_length"]:
        yield (
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.sampling.max_new_tokens "
            f"{rollout.sampling.max_new_tokens} exceed the model's {spec.gpt['max_sequence_length']} positions; "
            "lower one"
        )
    # A trajectory of n tokens has n - 1 positions, padded where context parallelism cuts it; demonstrations any number.
    positions = sizes.packed_length(longest - 1)
    if rollout.policy_engines and positions > config.trainer.max_tokens_per_microbatch:
        yield (
            f"a rollout may have {longest} tokens (rollout.max_prompt_tokens + rollout.sampling.max_new_tokens), which "
            f"trainer.max_tokens_per_microbatch={config.trainer.max_tokens_per_microbatch} does not hold; set it to "
            f"{positions} at least, or lower one of the others"
        )
    rows = rollout.prompts_per_step * rollout.group_size // updates
    if critic is not None and rows < critic.data:
        yield (
            f"an update of {rows} rollouts (rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step) "
            f"cannot feed the critic's {critic.data} data-parallel ranks; lower critic.layout.data"
        )
    if rows < sizes.data:
        yield (
            f"an update of {rows} rollouts (rollout.prompts_per_step x rollout.group_size / schedule.updates_per_step) "
            f"cannot feed {sizes.data} data-parallel ranks; raise one of the first two, or lower the third or "
            "trainer.data"
        )


def machine_problems(config: Config, machine: Machine, places: RankMap) -> Iterator[str]:
    """What the GPUs or the number of nodes rule out."""
    if machine.nodes is not None and places.nodes > machine.nodes:
        yield (
            f"the run needs {places.gpus} GPUs on {places.nodes} nodes of {machine.per_node}, and cluster.nodes is "
            f"{machine.nodes}; lower trainer.world_size or rollout.engines.count, or raise cluster.nodes"
        )
    moe = config.trainer.moe
    if config.cluster.gpu == "gb300" and moe.dispatcher == "flex" and moe.flex_backend == "deepep":
        yield (
            "trainer.moe.flex_backend=deepep does not run on cluster.gpu=gb300, whose NVLink domain spans nodes of 4 "
            "GPUs; set trainer.moe.flex_backend=hybridep or trainer.moe.dispatcher=alltoall"
        )


def machine_warnings(config: Config, machine: Machine) -> Iterator[str]:
    """What runs, but not well."""
    for key, size in (
        ("trainer.tensor", config.trainer.tensor),
        *((f"rollout.engines.tensor of {group.name}", group.tensor) for group in config.rollout.engines),
    ):
        if size > machine.domain:
            yield (
                f"{key}={size} reaches beyond the {machine.domain} GPUs that NVLink joins, so that every layer waits "
                "for the network"
            )
    if (
        config.trainer.moe.dispatcher == "alltoall"
        and config.trainer.expert * config.trainer.expert_tensor_size > machine.domain
    ):
        yield (
            f"trainer.expert={config.trainer.expert} spans nodes and trainer.moe.dispatcher is alltoall: tokens travel "
            "once per expert, not once per node; flex does better where its kernels are installed"
        )


def memory_problems(
    config: Config,
    machine: Machine,
    trainers: tuple[TrainerMemory, ...],
    engines: tuple[EngineMemory, ...],
    colocated: ColocatedMemory | None,
) -> Iterator[str]:
    """What does not fit a GPU, or a node's host memory."""
    if machine.memory is None:
        return
    margin = config.trainer.memory_margin_mib * MIB
    shared = config.critic is not None and config.critic.placement == "shared"
    policy = [record for record in trainers if record.model == "trainer"]
    for record in policy if shared else trainers:
        beside = (
            next((r for r in trainers if r.model == "critic" and r.stage == record.stage), None) if shared else None
        )
        peak = record.peak if beside is None else together(record, beside)
        if peak + margin > machine.memory:
            what = "trainer and critic" if beside else record.model
            yield (
                f"{what} rank {record.rank} (stage {record.stage}) would need {_gib(peak)} GiB and "
                f"trainer.memory_margin_mib {margin // MIB} of a GPU's {_gib(machine.memory)} GiB: {_kinds(record)}; "
                "use more ranks, more recomputation or trainer.optimizer.offload"
            )
    for engine in engines:
        if engine.static is not None and engine.weights > engine.static:
            yield (
                f"a rank of engine {engine.group} holds {_gib(engine.weights)} GiB of weights, and SGLang gives "
                f"weights and KV cache {_gib(engine.static)} GiB of a GPU (mem_fraction_static "
                f"{engine.static_fraction}); raise rollout.engines.tensor, or quantise (publish.quantise)"
            )
        elif engine.concurrency == 0:
            longest = config.rollout.max_prompt_tokens + config.rollout.sampling.max_new_tokens
            yield (
                f"engine {engine.group} has room for the keys and values of {engine.kv_tokens} tokens, and one rollout "
                f"may have {longest}; raise rollout.engines.tensor or max_total_tokens, or lower "
                "rollout.sampling.max_new_tokens"
            )
    if colocated is not None and colocated.margin < 0:
        yield (
            f"trainer and engine do not fit one GPU of {_gib(colocated.memory)} GiB in turns (schedule.colocate): "
            f"training takes {_gib(colocated.training)} GiB, generating {_gib(colocated.generating)}, publishing "
            f"{_gib(colocated.publishing)}; lower mem_fraction_static, split the trainer over more ranks, or set "
            "publish.staging=bucket"
        )
    if machine.host_memory is not None:
        host = max(record.host for record in trainers) * machine.per_node
        if host > machine.host_memory:
            yield (
                f"{machine.per_node} trainer ranks keep {_gib(host)} GiB in a node's host memory, and "
                f"cluster.host_memory_gib is {_gib(machine.host_memory)}; set checkpoint.asynchronous=false, lower "
                "trainer.optimizer.offload, or use more nodes"
            )


def together(policy: TrainerMemory, critic: TrainerMemory) -> int:
    """Peak of a rank that holds both, which take turns with activations."""
    states = [record.weights + record.gradients + record.optimizer for record in (policy, critic)]
    return sum(states) + max(policy.peak - states[0], critic.peak - states[1])


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
