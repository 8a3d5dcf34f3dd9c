"""`slimx plan` says what fits on the machines, what does not, and what would."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.extras.planner.plan import publication as publication_module
from slimx.extras.planner.plan.report import plan_report
from slimx.extras.planner.plan.text import describe_suggestions
from slimx.extras.planner.record import PlanReport, Suggestion
from slimx.reshard.plan.publication import publication_plan
from tests.extras.planner.planning_stand import H100, RUN_30B, SHALLOW, lines_of
from tests.published import QWEN3_30B
from tests.refusals import numbers

FULL = "trainer.recompute.granularity=full"


def test_the_rank_map_says_what_each_rank_holds_and_where(plan):
    layout = "trainer={world_size: 16, tensor: 2, pipeline: 2, expert: 8, expert_tensor: 1}"
    report = json.loads(plan(QWEN3_30B, layout, "rollout.engines=[{tensor: 4, count: 3}]", "--json")[1])
    places = report["rank_map"]
    assert (places["gpus"], places["nodes"]) == (16 + 12, 4)
    last = places["trainer"][13]
    assert (last["node"], last["gpu"], last["pipeline"], last["tensor"], last["data"]) == (1, 5, 1, 1, 2)
    assert last["layers"] == list(range(24, 48)) and last["expert"] == 5 and last["experts"] == [80, 95]
    assert [engine["gpus"] for engine in places["engines"]] == [[16, 17, 18, 19], [20, 21, 22, 23], [24, 25, 26, 27]]
    text = plan(QWEN3_30B, layout)[1]
    (stage,) = (line for line in text.splitlines() if "stage 1: " in line)
    assert all(words in stage for words in ("ranks 8-15", "node 1,", "layers 24-47", "experts 0-15, 16-31, 32-47, ..."))


def test_a_run_that_does_not_fit_gets_the_nearest_layout(plan):
    code, text = plan(QWEN3_30B, *RUN_30B, H100)
    assert code == 2
    (refused,) = lines_of(text, "slimx: ")
    assert "trainer rank 0" in refused and 79.1 in numbers(refused)
    (nearest,) = lines_of(text, "nearest")
    assert "TP4 x EP8 x DP2, " in nearest
    overrides = shlex.split(text.splitlines()[text.splitlines().index(nearest) + 1])
    assert plan(QWEN3_30B, *RUN_30B, H100, *overrides)[0] == 0
    assert plan(QWEN3_30B, *RUN_30B, "cluster.gpu=h200")[0] == 0
    assert plan(QWEN3_30B, *RUN_30B)[0] == 0, "without a GPU memory is shown and not judged"


def test_all_violations_are_reported_at_once(plan):
    code, text = plan(
        QWEN3_30B,
        "trainer={world_size: 15, pipeline: 5, expert: 3, expert_tensor: 1, max_tokens_per_microbatch: 512}",
        "rollout.max_prompt_tokens=100000",
    )
    assert code == 2
    violations = lines_of(text, "slimx: ")
    for part in (
        "trainer.expert=3 ",
        "trainer.pipeline=5 ",
        " 40960 ",
        "trainer.max_tokens_per_microbatch is 512, but ",
    ):
        assert sum(part in line for line in violations) == 1, (part, violations)
    assert len(violations) == 4


@pytest.mark.parametrize(("nodes", "code"), [("1", "machine.nodes"), ("null", "dealing.memory")])
def test_a_publication_that_would_exceed_memory_is_not_dealt(plan, monkeypatch, nodes, code):
    compiled = []

    def counted(*of):
        compiled.append(publication_plan(*of))
        return compiled[-1]

    plan(QWEN3_30B, "algorithm.name=sft", "rollout.engines=[]")  # writes the model
    monkeypatch.setattr(publication_module, "publication_plan", counted)
    engines = "rollout.engines=[{tensor: 4, expert: 4, count: 65536}]"
    overrides = [RUN_30B[0], engines, RUN_30B[2], "cluster.gpu=h200", f"cluster.nodes={nodes}"]
    planned = plan_report(load_config(plan.directory / "run.yaml", overrides))
    codes = {problem.code for problem in planned.problems}
    assert codes & {"machine.nodes", "dealing.memory"} == {code} and planned.published is None
    assert len(compiled) == (code == "dealing.memory")


def test_a_run_that_lacks_nodes_is_shown_without_its_publication(plan):
    run = (SHALLOW, *RUN_30B, "cluster={gpu: h200, nodes: 1}")
    code, text = plan(*run)
    report = json.loads(plan(*run, "--json")[1].partition("\nslimx: ")[0])
    assert code == 2 and report["nodes_lacking"] == 1 and report["publication"] is None
    assert [len(lines_of(text, name)) for name in ("places", "memory", "publication")] == [1, 1, 1]


def test_all_contradictions_of_a_configuration_are_reported(plan):
    code, text = plan(
        QWEN3_30B,
        "schedule={colocate: true, max_staleness: 1, updates_per_step: 5}",
        "trainer.moe.routing_replay=R3",
        "rollout.routed_experts=false",
        "eval.prompts=held_out.jsonl",
    )
    assert code == 2
    for part in ("schedule.colocate is true", "updates_per_step is 5", "routing_replay is R3"):
        assert part in text


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow("every suggestion"))])
def test_suggested_layouts_pass_the_plan(plan, every):
    """Checks the first and the last suggestion with everything that a run checks."""
    code, text = plan(QWEN3_30B, *RUN_30B, H100, "--suggest", "--json")
    report = json.loads(text[: text.rindex("}") + 1])
    assert code == 2 and len(report["suggestions"]) == 5, "the run as configured is still refused"
    costs = [suggestion["cost"] for suggestion in report["suggestions"]]
    assert costs == sorted(costs)
    for suggestion in report["suggestions"][::every]:
        code, text = plan(QWEN3_30B, *RUN_30B, H100, *suggestion["overrides"], "--json")
        memory = json.loads(text)["trainer_memory"]
        assert code == 0, text
        assert max(record["peak"] for record in memory) == pytest.approx(suggestion["trainer_peak"], rel=1e-4)
    (engine,) = report["suggested_engines"]
    fields = ", ".join(f"{key}: {engine[key]}" for key in ("tensor", "expert", "dp_attention", "count", "nodes"))
    planned = json.loads(plan(QWEN3_30B, H100, FULL, *RUN_30B, f"rollout.engines=[{{{fields}}}]", "--json")[1])
    (record,) = planned["engine_memory"]
    assert record["concurrency"] * record["count"] == engine["concurrency"]
    assert engine["concurrency"] >= 2 * 1000, "more than the two servers as configured"


def test_the_memory_of_a_critic_is_added_to_the_policys(plan):
    ppo = ("algorithm.name=ppo", "critic={}", H100, FULL)
    code, text = plan(QWEN3_30B, *RUN_30B, *ppo)
    lines = text.splitlines()
    assert code == 2 and any("trainer and critic rank 0" in line for line in lines)
    (nearest,) = (number for number, line in enumerate(lines) if line.startswith("nearest"))
    assert plan(QWEN3_30B, *RUN_30B, *ppo, *lines[nearest + 1].split())[0] == 0


def test_engines_that_do_not_fit_are_refused_with_sizes_that_do(plan):
    engines = "rollout.engines=[{tensor: 1, expert: 1, sglang: {mem_fraction_static: 0.6}}]"
    code, text = plan(QWEN3_30B, RUN_30B[0], RUN_30B[2], H100, FULL, engines)
    (refused,) = lines_of(text, "slimx: ")
    assert code == 2 and "engine actor" in refused and 56.9 in numbers(refused), "GiB of weights"
    (line,) = lines_of(text, "  engines   actor: count")
    assert "count 1, tensor 2, expert 1, dp_attention 1, nodes 1:" in line


def test_suggested_overrides_can_be_pasted_into_a_shell():
    overrides = ("trainer.pipeline=3", "trainer.layers_per_stage=[1, 2, 2]")
    suggestion = Suggestion(overrides=overrides, layout="", trainer_peak=0, margin=0, cost=0.0, recomputed=0.0, why="")
    report = PlanReport.model_construct(nearest=suggestion, suggestions=(suggestion,))
    pasted = [shlex.split(line) for line in describe_suggestions(report) if "pipeline" in line]
    assert pasted == [[*overrides]] * 2


def test_layouts_are_searched_for_a_named_gpu_only(plan):
    code, text = plan(QWEN3_30B, *RUN_30B, "--suggest")
    assert code == 2 and "set cluster.gpu" in text


def test_nodes_and_dispatchers_are_judged_by_the_machine(plan):
    code, text = plan(
        SHALLOW,
        "cluster={gpu: gb300, nodes: 1}",
        "trainer={world_size: 4, expert: 4, expert_tensor: 1, moe: {dispatcher: flex}}",
        "rollout.engines=[{tensor: 4, expert: 4}]",
    )
    assert code == 2
    (nodes,) = (line for line in text.splitlines() if "cluster.nodes" in line)
    assert numbers(nodes) == [8, 2, 4, 1], "GPUs, nodes that they need, GPUs of one, and cluster.nodes"
    assert any("flex_backend=deepep" in line and "cluster.gpu=gb300" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("gpu", "quantize", "named", "refused"),
    [
        ("gb300", "ue8m0", {}, ["moe_runner_backend", "fp8_gemm_runner_backend"]),
        ("gb300", "ue8m0", {"moe_runner_backend": "triton"}, ["fp8_gemm_runner_backend"]),
        ("gb300", "null", {"moe_runner_backend": "flashinfer_trtllm"}, ["moe_runner_backend"]),
        ("gb300", "null", {"moe_runner_backend": "triton"}, []),
        ("h100", "triton", {}, []),
        ("gb300", "null numerics.mode=exact", {}, []),
    ],
)
def test_engines_on_blackwell_name_kernels_that_keep_the_published_layout(plan, gpu, quantize, named, refused):
    engines = json.dumps([{"tensor": 4, "expert": 4, "sglang": named}])
    overrides = [f"cluster.gpu={gpu}", *f"publish.quantize={quantize}".split(), f"rollout.engines={engines}"]
    plan(SHALLOW, *overrides)
    config = load_config(plan.directory / "run.yaml", overrides)
    problems = [problem.about for problem in plan_report(config).problems if problem.code == "engines.backend"]
    assert problems == [f"rollout.engines.sglang.{key}" for key in refused]


def test_engines_beyond_the_transports_reach_are_refused(plan):
    """Fills the first node with trainers, so that engines are on the second."""
    code, text = plan(SHALLOW, *RUN_30B, H100, "publish.transport=cuda_ipc")
    (refused,) = lines_of(text, "slimx: ")
    assert code == 2 and "publish.transport=cuda_ipc" in refused and {2, 8, 1, 0} <= {*numbers(refused)}
    assert plan(SHALLOW, *RUN_30B, H100, "publish.transport=cuda_ipc", "schedule.colocate=true")[0] == 0


def test_colocated_ranks_are_weighed_in_turns(plan):
    run = ("trainer={world_size: 8, expert: 8, expert_tensor: 1}", "schedule.colocate=true", FULL, "cluster.gpu=h200")
    shared = "rollout.engines=[{tensor: 8, expert: 8, sglang: {mem_fraction_static: %s}}]"
    small, large = (
        json.loads(plan(QWEN3_30B, *run, "publish.transport=cuda_ipc", shared % share, "--json")[1].split("\nslimx")[0])
        for share in (0.5, 0.9)
    )
    pair, trainer = small["colocated"], small["trainer_memory"][0]
    assert trainer["away"] == trainer["overhead"], "all that the trainer holds leaves the GPU"
    assert trainer["host_away"] == trainer["weights"] + trainer["optimizer"]
    fullest = max(sum(part["nbytes"] for part in phase["held"]) for phase in small["phases"])
    assert pair["margin"] == pair["memory"] - fullest
    busy = trainer["activations"] + max(trainer["head"], trainer["work"]) + trainer["communication"]
    state = trainer["weights"] + trainer["gradients"] + trainer["optimizer"] + trainer["overhead"]
    assert pair["training"] == state + max(busy, trainer["step"]) + pair["engine_asleep"]
    engine = small["engine_memory"][0]
    free = pair["memory"] - trainer["away"] - engine["overhead"]
    assert engine["static"] == int(0.5 * free), "a share of what is free when the server starts"
    grown = large["colocated"]["generating"] - pair["generating"]
    assert grown == pytest.approx(0.4 * free, abs=2 * engine["kv_per_token"])
    assert small["rank_map"]["gpus"] == 8


def test_host_memory_is_counted_per_node(plan):
    offload = "trainer.optimizer.offload_fraction=1"
    fits, short = (plan(SHALLOW, *RUN_30B, H100, offload, f"cluster.host_memory_gib={gib}") for gib in (1000, 20))
    assert fits[0] == 0 and short[0] == 2
    (refused,) = lines_of(short[1], "slimx: ")
    assert "8 trainer ranks" in refused and "cluster.host_memory_gib" in refused and 20.0 in numbers(refused)


def test_bytes_go_over_the_links_between_the_ranks(plan):
    def links(*overrides: str) -> dict[str, int]:
        found = json.loads(plan(SHALLOW, *RUN_30B, H100, *overrides, "--json")[1])
        assert sum(link["nbytes"] for link in found["links"]) == found["publication"]["nbytes"]
        return {link["link"]: link["nbytes"] for link in found["links"]}

    assert set(links("publish.transport=nixl")) == {"network"}, "trainers fill the first node"
    shared = links("publish.transport=nixl", "trainer={world_size: 4, tensor: 4, expert: 4, expert_tensor: 1}")
    assert set(shared) == {"network", "host memory (PCIe)"}, "the first engine is on the trainers' node"
    assert shared["network"] == shared["host memory (PCIe)"]
    assert set(links("publish.transport=memory", "schedule.colocate=true")) == {"host memory (PCIe)"}
    colocated = links("publish.transport=cuda_ipc", "schedule.colocate=true")
    assert set(colocated) == {"one GPU", "NVLink"}


def test_the_batch_adds_up(plan):
    report = json.loads(
        plan(
            SHALLOW,
            "trainer={world_size: 8, pipeline: 2, max_tokens_per_microbatch: 4096}",
            "rollout={prompts_per_step: 12, group_size: 4, max_prompt_tokens: 500, sampling: {max_new_tokens: 500}}",
            "schedule.updates_per_step=3",
            "--json",
        )[1]
    )["batch"]
    assert (report["rollouts_per_step"], report["rollouts_per_update"], report["rollouts_per_data_rank"]) == (48, 16, 4)
    assert (report["tokens_per_rollout"], report["tokens_per_step"]) == (1000, 48000)
    assert report["microbatches_per_update"] == 1, "four rollouts of 999 positions fit 4,096"
    assert report["bubble"] == pytest.approx(1 / 2)


def test_the_page_on_planning_names_every_key_of_the_record():
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    keys = [field.serialization_alias or name for name, field in PlanReport.model_fields.items()]
    assert [key for key in keys if f"`{key}`" not in text] == []
    described = PlanReport.model_json_schema()["$defs"]["TrainerMemory"]["properties"]
    assert "`host_optimizer`" in described["optimizer"]["description"]


def test_long_answers_of_an_evaluation_need_positions_and_kv_cache(plan):
    engines = "rollout.engines=[{max_total_tokens: 20000, tensor: 4}]"
    long = "eval={prompts: absent.jsonl, max_new_tokens: 16384}"
    code, text = plan(QWEN3_30B, *RUN_30B, engines, long)
    assert code == 0 and "17,408" in text
    code, text = plan(QWEN3_30B, *RUN_30B, "rollout.engines=[{max_total_tokens: 17000, tensor: 4}]", long)
    assert code == 2 and "eval.max_new_tokens" in lines_of(text, "slimx: ")[0]
    too_long = long.replace("16384", "40000")
    code, text = plan(QWEN3_30B, *RUN_30B, too_long)
    assert code == 2 and "eval.max_new_tokens=40000" in lines_of(text, "slimx: ")[0]
    assert plan(QWEN3_30B, *RUN_30B, too_long, "eval.every=0")[0] == 0


def test_evaluation_engines_that_do_not_fit_are_named_by_their_key(plan):
    small = "eval={prompts: absent.jsonl, engines: [{tensor: 4, expert: 4, sglang: {mem_fraction_static: 0.1}}]}"
    run = (*RUN_30B, H100, "trainer.optimizer.offload_fraction=1", small)
    code, text = plan(QWEN3_30B, *run)
    assert code == 2
    refused = [line for line in lines_of(text, "slimx: ") if "engine eval " in line]
    assert refused and all("eval.engines.tensor" in line and "rollout.engines" not in line for line in refused)


@pytest.mark.parametrize("colocate", [False, True])
def test_evaluation_engines_have_gpus_of_their_own(plan, colocate):
    together = ("schedule.colocate=true", "publish.staging=bucket", FULL) if colocate else ()
    run = (*RUN_30B, *together, H100, "trainer.optimizer.offload_fraction=1")
    held_out = "eval={prompts: absent.jsonl, engines: [{tensor: 4, expert: 4}]}"
    before = json.loads(plan(QWEN3_30B, *run, "--json")[1])
    report = json.loads(plan(QWEN3_30B, *run, held_out, "--json")[1])
    assert report["rank_map"]["gpus"] == before["rank_map"]["gpus"] + 4
    (evaluation,) = (place for place in report["rank_map"]["engines"] if place["group"] == "eval")
    assert evaluation["gpus"] == list(range(before["rank_map"]["gpus"], before["rank_map"]["gpus"] + 4))
    peaks = {(peak["gpu"], peak["group"]) for peak in report["phases"] if peak["group"]}
    assert ("engine", "eval") in peaks and (("shared", "actor") in peaks) == colocate
    alone, both = before["colocated"], report["colocated"]
    assert (alone is None) == (both is None) == (not colocate)
    if colocate:  # the trainers' send buffers, which stay, contain what evaluation engines receive
        assert both["engine_asleep"] == alone["engine_asleep"]
        grown = {name: both[name] - alone[name] for name in ("training", "generating", "publishing")}
        assert len(set(grown.values())) == 1 and 0 < grown["publishing"] < 2**30
    off = json.loads(plan(QWEN3_30B, *run, held_out, "eval.every=0", "--json")[1])
    assert off["rank_map"] == before["rank_map"]
    code, text = plan(
        QWEN3_30B, *run, held_out, f"cluster.nodes={before['rank_map']['nodes']}", "cluster.gpus_per_node=8"
    )
    assert code == 2 and "cluster.nodes" in text
