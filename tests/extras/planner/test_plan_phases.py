"""Memory in every phase of a run: who holds what, what SGLang takes of what is free, the phase that does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.config.sections.general import Cluster
from slimx.data.batch import make_rows
from slimx.data.packing import pack
from slimx.extras.planner.batch_plan import batch_plan
from slimx.extras.planner.memory.engine import WORK, graph_bytes, static_fraction, with_occupied
from slimx.extras.planner.memory.node import PROCESS, disk_bytes, host_memory, kept_batches
from slimx.extras.planner.memory.phases import PHASES, colocated_memory, phase_memory
from slimx.extras.planner.memory_record import EngineMemory, MemoryPart, Phase, PhasePeak, TrainerMemory
from slimx.extras.planner.rules import memory
from slimx.extras.planner.rules.memory import margin_warnings
from slimx.extras.recovery.ledger import TrainedStep
from slimx.layout.ranks import Sizes, engine_sizes
from slimx.models.families import read_model
from slimx.preflight.hardware import GIB, OVERHEAD, Machine, machine_of
from tests.published import QWEN3_30B
from tests.refusals import numbers
from tests.unit.data.trajectory_stand import trajectory

H100 = machine_of(Cluster(gpu="h100"))


def config_of(**sections: Any) -> Config:
    base = {
        "run": {"dir": "r"},
        "model": {"path": "m"},
        "rollout": {"prompts": "p", "engines": [{"tensor": 2, "sglang": {"mem_fraction_static": 0.5}}]},
    }
    return Config.model_validate(base | sections)


def trainer(**gib: float) -> TrainerMemory:
    """Makes a rank of 2 GiB of weights, 4 of gradients, 6 of optimizer state (4 of it moments) and 3 of overhead."""
    sizes = {"weights": 2, "gradients": 4, "optimizer": 6, "moments": 4, "overhead": 3, "away": 3} | gib
    others = ("activations", "head", "work", "step", "communication", "publication", "peak", "moved")
    hosts = ("host_optimizer", "host_copies", "host_away", "host_chosen", "host_checkpoint", "host_activations")
    sizes = dict.fromkeys((*others, *hosts), 0) | sizes
    return TrainerMemory(
        model="trainer",
        stage=0,
        rank=0,
        parameters=1,
        in_flight=1,
        parts={},
        **{k: int(v * GIB) for k, v in sizes.items()},
    )


def engine(**gib: float) -> EngineMemory:
    """Makes a rank of 20 GiB of weights and room for 10 GiB of KV cache."""
    sizes = {"weights": 20, "staged": 0, "overhead": 3, "graphs": 1, "work": 2, "kv_room": 10, "static": 30} | gib
    return EngineMemory(
        group="actor",
        count=1,
        ranks=2,
        static_fraction=0.5,
        kv_per_token=2**20,
        kv_tokens=int(sizes["kv_room"] * 2**10),
        state_per_request=0,
        concurrency=1,
        **{key: int(value * GIB) for key, value in sizes.items()},
    )


def weighed(*records: TrainerMemory, engines: tuple[EngineMemory, ...] = (), **keys: Any) -> dict[Any, float]:
    """Returns GiB by phase; by kind of GPU and phase if there are several kinds."""
    keys = {"separate_critic": False, "colocate": False, "offload": True} | keys
    found = phase_memory(H100, records, engines, **keys)
    kinds = {peak.gpu for peak in found}
    return {peak.phase if len(kinds) == 1 else (peak.gpu, peak.phase): peak.nbytes / GIB for peak in found}


def test_a_gpu_in_turns_holds_in_each_phase_what_its_two_ranks_hold_then():
    rank = trainer(activations=5, work=1, publication=0.5)
    assert weighed(rank, engines=(engine(staged=0.25),), colocate=True) == {
        "load": 3 + 2 + 4 + 2,  # its overhead, weights, gradients, and weights twice or main weights
        "start": 3 + (3 + 1 + 20 + 10 + 2),
        "restore": (3 + 2 + 4 + 6) + 3,
        "publish": (3 + 2 + 0.5) + (3 + 20 + 0.25),
        "generate": 3 + (3 + 1 + 20 + 10 + 2),
        "sleep": (3 + 2 + 4 + 6) + 3,
        "train": (3 + 2 + 4 + 6) + (5 + 1) + 3,
        "save": (3 + 2 + 4 + 6) + 3,
        "wake": (3 + 2) + (3 + 20),
    }


def test_buffers_of_deep_ep_stay_in_every_phase_and_are_those_of_a_process():
    rank, served = trainer(activations=5), engine()
    plain = weighed(rank, engines=(served,), colocate=True)
    buffered = trainer(activations=5, dispatcher=0.5, away=3.5)
    more = weighed(buffered, engines=(engine(dispatcher=2),), colocate=True)
    assert {phase: more[phase] - plain[phase] for phase in plain} == dict.fromkeys(plain, 2.5) | {"load": 0.5}
    critic = buffered.model_copy(update={"model": "critic"})
    both = weighed(buffered, critic, engines=(served,), colocate=True)
    assert both["generate"] == plain["generate"] + 0.5 and both["save"] == plain["save"] + 12.5


def test_a_trainer_that_does_not_leave_stays_in_every_phase():
    stays = weighed(trainer(away=15), engines=(engine(),), colocate=True, offload=False)
    leaves = weighed(trainer(), engines=(engine(),), colocate=True)
    for phase in ("start", "publish", "generate", "wake"):
        assert stays[phase] - leaves[phase] == (12 if phase in ("start", "generate") else 10)


def test_separate_gpus_store_only_their_part():
    found = weighed(trainer(step=0.5, publication=1), engines=(engine(staged=4),))
    assert found == {
        ("trainer", "load"): 11,
        ("trainer", "restore"): 15,
        ("trainer", "publish"): 16,
        ("trainer", "generate"): 15,
        ("trainer", "train"): 15.5,
        ("trainer", "save"): 15,
        ("engine", "start"): 36,
        ("engine", "publish"): 40,
        ("engine", "generate"): 36,
    }
    assert set(weighed(trainer())) == {"load", "restore", "train", "save"}, "without engines nothing is published"


def test_a_critic_in_the_trainers_ranks_adds_its_state_to_each_phase():
    critic = trainer(activations=7).model_copy(update={"model": "critic"})
    both = weighed(trainer(activations=5), critic)
    assert both["save"] == 3 + 2 * (2 + 4 + 6) and both["train"] == both["save"] + 7
    apart = weighed(trainer(activations=5), critic, separate_critic=True)
    assert apart["critic", "train"] == 15 + 7 and apart["trainer", "train"] == 15 + 5


def test_memory_is_reported_by_owner_and_sums_up():
    found = phase_memory(H100, [trainer()], [engine()], separate_critic=False, colocate=True, offload=True)
    assert [peak.phase for peak in found] == list(PHASES)
    (generate,) = [peak for peak in found if peak.phase == "generate"]
    sizes = [part.nbytes for part in generate.parts]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == generate.nbytes and 0 not in sizes
    assert generate.parts[0].name == "engine's weights" and generate.parts[1].name == "KV cache"
    pair = colocated_memory(H100, found, [engine()])
    assert pair.generating == generate.nbytes and pair.engine_asleep == 3 * GIB
    assert pair.margin == H100.memory - max(peak.nbytes for peak in found)


def test_nothing_is_weighed_where_the_gpu_is_unknown():
    unknown = machine_of(Cluster())
    assert phase_memory(unknown, [trainer()], [engine()], separate_critic=False, colocate=True, offload=True) == ()
    assert colocated_memory(unknown, (), [engine()]) is None


def test_sglang_gets_a_share_of_what_is_free_when_its_server_starts():
    config = config_of()
    (group,) = config.rollout.engines
    alone = with_occupied(engine(), config, group, H100, 0)
    beside = with_occupied(engine(), config, group, H100, 5 * GIB)
    assert alone.static == int(0.5 * (H100.memory - OVERHEAD))
    assert beside.static == int(0.5 * (H100.memory - OVERHEAD - 5 * GIB))
    assert beside.kv_room == beside.static - beside.weights and beside.cache <= beside.kv_room
    none = with_occupied(engine(), config, group, H100, H100.memory)
    assert none.static == none.kv_tokens == none.concurrency == 0


def test_graphs_are_those_of_the_largest_decode_batch():
    (few, many, none) = config_of(
        rollout={
            "prompts": "p",
            "engines": [
                {"name": "few", "tensor": 2, "sglang": {"max_running_requests": 16}},
                {"name": "many", "tensor": 8},
                {"name": "none", "tensor": 2, "sglang": {"disable_cuda_graph": True}},
            ],
        }
    ).rollout.engines
    sizes = {group.name: engine_sizes(group) for group in (few, many, none)}
    found = [graph_bytes(group, sizes[group.name], H100.memory) // 2**20 for group in (few, many, none)]
    assert found == [32, 1024, 0]
    assert static_fraction(many, sizes["many"], H100.memory) < static_fraction(few, sizes["few"], H100.memory)
    assert WORK == 2 * GIB


# What does not fit ----------------------------------------------------------------------------------------------------


def problems(*records: TrainerMemory, engines: tuple[EngineMemory, ...] = (), machine: Machine = H100, **keys: Any):
    config = config_of(**keys.pop("sections", {}))
    keys = {"separate_critic": False, "colocate": False, "offload": True} | keys
    phases = phase_memory(machine, records, engines, **keys)
    host = host_memory(config, machine, records, None, separate_critic=False)
    facts = {"machine": machine, "trainer_memory": records, "engine_memory": engines, "phases": phases, "host": host}
    return {problem.code: problem for problem in broken(rules_in(memory), config.facts | facts)}


@pytest.mark.parametrize(
    ("code", "about", "phase", "largest", "case"),
    [
        ("memory.phase", "trainer", "publish", "buckets", {"rank": {"publication": 70}, "engines": (engine(),)}),
        (
            "memory.phase",
            "trainer",
            "load",
            "gradients",
            {"rank": {"weights": 20, "gradients": 40, "optimizer": 1, "moments": 1}},
        ),
        ("memory.engine_phase", "rollout.engines", "publish", "staged weights", {"engines": (engine(staged=50),)}),
        (
            "memory.colocated",
            "schedule.colocate",
            "generate",
            "KV cache",
            {"engines": (engine(kv_room=60, static=80),), "colocate": True},
        ),
        (
            "memory.colocated",
            "schedule.colocate",
            "publish",
            "engine's weights",
            {"rank": {"weights": 30}, "engines": (engine(weights=50, static=60, kv_room=0),), "colocate": True},
        ),
    ],
)
def test_the_phase_that_does_not_fit_is_named_with_what_holds_most(code, about, phase, largest, case):
    found = problems(trainer(**case.pop("rank", {})), **case)
    assert set(found) == {code} and found[code].about == about
    sentence = str(found[code])
    named = [name for name in PHASES if f"phase {name}," in sentence]
    assert named in ([phase], ["start"] if phase == "generate" else [phase])
    assert sentence.index(largest) < sentence.index(" GiB;") if " GiB;" in sentence else largest in sentence


def test_the_host_is_judged_by_the_kind_of_gpu():
    rank, node = trainer(host_checkpoint=300), {"trainer": {"world_size": 8}}
    found = problems(rank, sections=node)
    assert set(found) == {"memory.host"}, "8 ranks, and a DGX H100 has 2 TB"
    assert found["memory.host"].about == "cluster.host_memory_gib"
    enough = replace(H100, host_memory=3000 * GIB)
    assert not problems(rank, machine=enough, sections=node)
    assert machine_of(Cluster(gpu="h100", gpus_per_node=4)).host_memory == 1024 * GIB
    assert machine_of(Cluster(gpu="h100", host_memory_gib=20)).host_memory == 20 * GIB
    assert machine_of(Cluster()).host_memory is None


def test_a_node_holds_what_all_its_ranks_keep_and_their_processes():
    config = config_of(trainer={"world_size": 16}, schedule={"colocate": True})
    kept = {"host_optimizer": 1, "host_copies": 2, "host_away": 8, "host_chosen": 3, "host_checkpoint": 10}
    rank = trainer(**kept)
    found = host_memory(config, H100, [rank], None, separate_critic=False)
    assert found.ranks == 8 and found.nbytes == 8 * rank.host + 16 * PROCESS and rank.host == 24 * GIB
    assert found.parts[0].nbytes == 80 * GIB


def test_batches_kept_for_recovery_are_counted_in_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"num_hidden_layers": 2}))
    spec = read_model(tmp_path)
    rollout = trajectory("g", "r", [0, 1, 1])
    rollout.routed_experts = np.zeros((3, len(spec.moe_layers), spec.transformer["moe_router_topk"]), np.uint8)
    step = TrainedStep(0, 0, [pack(make_rows([rollout], [1.0], [1.0]), data_size=1, max_tokens=8)], {})
    sections = {"recovery": {"trainers": 1}, "checkpoint": {"every": 5}}
    config = config_of(**sections, track={"rollouts": {"routes": True}})
    batch = SimpleNamespace(tokens_per_step=3, rollouts_per_step=1, tokens_per_microbatch=3, tokens_per_rollout=3)
    kept = kept_batches(config, spec, batch)
    assert kept == 2 * 5 * step.nbytes
    host = host_memory(config, H100, [trainer()], None, separate_critic=False, batches=kept)
    assert kept in [part.nbytes for part in host.parts]
    assert kept_batches(config_of(), spec, batch) == 0


def test_sampled_experts_count_only_for_their_rollouts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    spec = read_model(tmp_path)
    sections = {"recovery": {"trainers": 1}, "checkpoint": {"every": 1}}
    rollout = {"prompts": "p", "prompts_per_step": 16, "group_size": 4}
    sampled = config_of(**sections, rollout=rollout)
    none = config_of(**sections, rollout=rollout | {"routed_experts": False})
    batch = SimpleNamespace(
        tokens_per_step=64000, rollouts_per_step=64, tokens_per_microbatch=2500, tokens_per_rollout=1000
    )
    experts = kept_batches(sampled, spec, batch) - kept_batches(none, spec, batch)
    assert experts == 2 * 4 * 1000 * len(spec.moe_layers) * spec.transformer["moe_router_topk"]


def test_mirrors_count_once_at_the_sender_and_twice_at_the_keeper() -> None:
    sizes = {}
    for every in (0, 2):
        config = config_of(recovery={"trainers": 1, "mirror_every": every}, checkpoint={"every": 5})
        host = host_memory(config, H100, [trainer(host_checkpoint=8)], None, separate_critic=False)
        sizes[every] = host.nbytes
    assert sizes[2] - sizes[0] == 3 * 8 * GIB, "one rank"


def test_disk_counts_simultaneous_checkpoints_exports_and_rollouts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"num_hidden_layers": 2}))
    spec = read_model(tmp_path)
    config = config_of(
        schedule={"steps": 100},
        checkpoint={"every": 10, "keep": 3, "keep_every": 50, "export_every": 25, "export_hf": True},
        track={"rollouts": {"keep": 4}},
    )
    batch = batch_plan(config, Sizes())
    found = disk_bytes(config, spec, None, batch)
    elements = found.export // 2
    assert found.checkpoint == elements * (2 + 12), "bf16, and three fp32 numbers"
    assert (found.checkpoints, found.exports) == (3 + 1 + 2, 4 + 1)
    assert found.rollouts == 4 * batch.tokens_per_step * 9
    assert found.nbytes == found.checkpoint * 6 + found.export * 5 + found.rollouts


def test_a_nearly_full_gpu_is_a_warning_with_its_phase():
    def phase(name: Phase, left: float, gpu: str = "shared") -> PhasePeak:
        parts = (MemoryPart(name="weights", nbytes=int(H100.memory - left * GIB)),)
        return PhasePeak(gpu=gpu, group="actor", phase=name, parts=parts)

    roomy = (phase("train", 3), phase("publish", 4), phase("train", 9, "trainer"))
    assert not list(margin_warnings(H100, roomy))
    (warning,) = margin_warnings(H100, (*roomy, phase("publish", 2.25)))
    assert {2.2, 79.1} <= set(numbers(warning)) and "publish" in warning
    assert not list(margin_warnings(H100, (phase("publish", -1),))), "that is refused"
    assert not list(margin_warnings(machine_of(Cluster()), roomy))


def test_no_process_has_the_drivers_part_of_a_gpu():
    """Compares with torch, which counts 79.1 GiB of an H100, of which nvidia-smi reports 81559 MiB."""
    assert H100.memory / GIB == pytest.approx(79.1, abs=0.01)
    assert machine_of(Cluster(gpu_memory_gib=20)).memory == 20 * GIB
