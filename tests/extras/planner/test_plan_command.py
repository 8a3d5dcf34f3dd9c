"""`slimx plan` knows what a run of hundreds of GPUs will do from its YAML file and config.json, and nothing else."""

from __future__ import annotations

import json
import re

import pytest

from slimx.config.load import load_config
from slimx.config.sections.trainer import Trainer
from slimx.extras.planner import planning as plan_command
from slimx.extras.planner.links import rehearsal
from slimx.extras.planner.links.model import LinkTrial
from slimx.extras.planner.plan import text as plan_text
from slimx.extras.planner.plan.report import plan_report
from slimx.trainer.device.backends import choose_backends
from tests.extras.planner.planning_stand import RUN_30B, SHALLOW, Planning, lines_of
from tests.published import DEEPSEEK_V3, QWEN3_30B
from tests.refusals import numbers

QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
RUN_235B = (
    "trainer={world_size: 32, tensor: 4, expert: 32, expert_tensor: 1}",
    "rollout.engines=[{tensor: 8, expert: 8, dp_attention: 2, count: 4}]",
)
RUN_671B = (
    "trainer={world_size: 128, tensor: 8, expert: 64, expert_tensor: 1}",
    "rollout.engines=[{tensor: 64, expert: 64, dp_attention: 8}]",
)


IN_FP8 = ("publish.quantize=ieee", "rollout.engines=[{tensor: 4, expert: 4, count: 2, model: a-copy-in-fp8}]")


@pytest.mark.parametrize(
    ("hf", "run", "parameters", "tensors"),
    [
        (QWEN3_30B, RUN_30B, 30.5, 18867),
        pytest.param(QWEN3_235B, RUN_235B, 235.1, 36945, marks=pytest.mark.slow("all sizes of models")),
        (DEEPSEEK_V3, RUN_671B, 671.0, 45000),
    ],
    ids=["30B", "235B", "671B"],
)
def test_the_published_models_are_planned_from_config_json_alone(plan, hf, run, parameters, tensors):
    code, text = plan(hf, *run, "--json")
    assert code == 0, text
    report = json.loads(text)
    publication = report["publication"]
    assert report["parameters"] / 1e9 == pytest.approx(parameters, rel=0.01)
    assert report["checkpoint_tensors"] == pytest.approx(tensors, rel=0.02)
    assert publication["encoding"] == "local" and "its own bytes" in publication["note"]
    # An engine holds everything once in its experts, and attention as often as it has copies.
    engines = report["engines"][0]["count"]
    assert publication["nbytes"] >= 2 * report["parameters"] * engines * 0.98
    assert publication["received"] <= publication["nbytes"]
    assert publication["sent_max"] >= publication["sent_mean"]
    assert publication["launches"] <= publication["buckets"]
    assert publication["compile_seconds"] > 0


def test_the_text_tells_layouts_bytes_work_and_proof(plan):
    code, text = plan(QWEN3_30B, *RUN_30B, *IN_FP8)
    assert code == 0, text
    for words in (
        "Qwen3MoeForCausalLM",
        "30.5 B parameters",
        "18,867 tensors",
        "8 ranks: tensor 4 x pipeline 1 x data 2, expert 8 x expert tensor 1",
        "actor: 2 x 4 ranks: tensor 4 x pipeline 1, expert 4",
        "encoding local",
        "rule ieee",
        "kernel launches",
        "(publish.transport nixl)",
        "transport nixl: ",
        "proven: ",
    ):
        assert words in text
    assert "predicted" not in text


def test_memory_for_buckets_follows_transport_and_staging(plan):
    def memory(*overrides: str) -> tuple[float, float]:
        _, text = plan(SHALLOW, *RUN_30B, "publish.bucket_mib=256", *overrides, "--json")
        figures = json.loads(text)["publication"]
        return figures["publisher_bytes"] / 2**20, figures["staged_bytes"] / 2**20

    ranks, embedding = 4, 151936 * 2048 * 2 / 2**20  # of an engine; a tensor that is larger than a bucket
    model = 1.886e9 * 2 / 2**20
    assert memory("publish.transport=memory", "publish.staging=model") == (pytest.approx(model, rel=0.05), 0)
    two, staged = memory("publish.transport=memory", "publish.staging=bucket")
    assert staged == 0 and 2 * ranks * 200 <= two <= 2 * ranks * max(embedding, 256)
    part = pytest.approx(two / ranks, rel=0.05)  # one part of each of two buckets
    assert memory("publish.transport=cuda_ipc", "publish.staging=bucket") == (part, pytest.approx(256, rel=0.25))
    staged = pytest.approx(model / ranks, rel=0.1)
    assert memory("publish.transport=cuda_ipc", "publish.staging=model") == (part, staged)


def test_fp8_halves_the_bytes_and_counts_the_quantized_tensors(plan):
    plain, quantized = (
        json.loads(plan(QWEN3_30B, *RUN_30B, *more, "--json")[1])["publication"] for more in ((), IN_FP8)
    )
    # Per layer and rank: qkv, o, w13 and w2; the embeddings stay as they are.
    assert (plain["quantized"], quantized["quantized"]) == (0, 4 * 48 * 4)
    assert quantized["tensors"] == plain["tensors"] + quantized["quantized"]
    assert 0.5 < quantized["nbytes"] / plain["nbytes"] < 0.52


def test_engines_that_start_from_bf16_weights_have_no_place_for_fp8_ones(plan):
    code, text = plan(SHALLOW, *RUN_30B, "publish.quantize=ieee")
    assert code == 2 and "publish.quantize" in text and "rollout.engines group actor" in text
    assert plan(SHALLOW, *RUN_30B, *IN_FP8)[0] == 0


def test_weights_not_writable_in_place_fall_back_with_the_reason(plan):
    code, text = plan(SHALLOW, RUN_30B[0], "rollout.engines=[{tensor: 4, sglang: {enable_eplb: true}}]")
    (line,) = (line for line in text.splitlines() if "encoding hf" in line)
    assert code == 0 and "sglang.enable_eplb" in line


def test_engines_of_different_sizes_are_counted_rank_by_rank(plan):
    engines = "rollout.engines=[{name: a, tensor: 2, count: 3}, {name: b, tensor: 4}]"
    report = json.loads(plan(SHALLOW, engines, "--json")[1])
    assert report["publication"]["encoding"] == "hf"
    assert report["publication"]["nbytes"] == 2 * report["parameters"] * (3 * 2 + 4)
    assert report["publication"]["sent_max"] == 2 * report["parameters"] * (3 + 1)


def test_a_tiny_model_has_a_size_too(plan):
    tiny = SHALLOW | {"num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 64, "vocab_size": 1000}
    assert "1.9 M parameters" in plan(tiny)[1]


def test_the_plan_is_for_gpus_unless_the_run_says_cpu(plan):
    # More tensor-parallel ranks than query groups: GPUs repeat these, SGLang's CPU path pads them.
    engines = "rollout.engines=[{tensor: 8, expert: 8}]"
    assert (
        "encoding local" in plan(SHALLOW, engines)[1]
        and "encoding hf" in plan(SHALLOW, engines, "cluster.device=cpu")[1]
    )


def test_fusions_without_their_package_are_a_warning_of_the_plan(plan, monkeypatch):
    monkeypatch.setattr(plan_command, "installed", lambda: {"transformer_engine"})
    kernels = json.loads(plan(SHALLOW, *RUN_30B, "--json")[1])["kernels"]
    several = Trainer(world_size=2, data=2)
    expected = choose_backends(several, device="cuda", packages={"transformer_engine"}).reasons
    assert tuple(kernels) == expected and any("apex" in sentence for sentence in kernels)
    flex = [*RUN_30B, "trainer.moe.dispatcher=flex"]
    code, text = plan(SHALLOW, *flex)
    assert code == 0 and "deep_ep" in next(line for line in text.splitlines() if line.startswith("kernels"))


def test_a_plan_counts_one_thing_in_the_singular(plan):
    one = ["trainer.world_size=1", "trainer.expert=1", "rollout.prompts_per_step=1", "rollout.group_size=2"]
    code, text = plan(SHALLOW, *one)
    assert code == 0 and "1 rank:" in text and "rank 0, node 0" in text
    assert re.findall(r"(?<![\d.,-])1 (?!process\b)[a-z-]+s\b", text) == []


def test_a_run_without_engines_publishes_nothing(plan):
    code, text = plan(QWEN3_30B, "algorithm.name=sft", "rollout.engines=[]")
    assert code == 0 and "publication none" in text


@pytest.mark.parametrize(
    ("overrides", "code", "about", "values"),
    [
        (("trainer={world_size: 5, pipeline: 5}",), "layout.pipeline", "trainer.pipeline", [5, 2]),
        (("trainer={world_size: 3, expert: 3, expert_tensor: 1}",), "layout.divides", "trainer.expert", [3, 128]),
        (("rollout.engines=[{tensor: 4, expert: 3}]",), "engines.sizes", "rollout.engines", ["expert=3", 4]),
        (
            ("trainer={world_size: 4, tensor: 4}", *IN_FP8),
            "plan.blocks",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            [192, 2048, 128, "trainer.expert_tensor=2"],
        ),
        (
            (*IN_FP8, "rollout.engines.0.expert=1"),
            "plan.blocks",
            "model.layers.0.mlp.experts.0.up_proj.weight",
            ["rollout.engines.expert=2"],
        ),
        (("model.path=nowhere",), "model.directory", "nowhere", []),
        (("rollout.engines=[{pipeline: 2}]",), "engines.sizes", "rollout.engines", ["pipeline=2", "group actor"]),
        (
            ("rollout.engines=[{sglang: {ep_num_redundant_experts: few}}]",),
            "engines.sizes",
            "rollout.engines",
            ["ep_num_redundant_experts='few'"],
        ),
        (
            ("rollout.engines=[{sglang: {ep_num_redundant_experts: -2}}]",),
            "engines.sizes",
            "rollout.engines",
            ["ep_num_redundant_experts=-2"],
        ),
        (
            ("rollout.engines=[{tensor: 3, expert: 3}]", "publish.encoding=hf"),
            "engine_layout.experts",
            "rollout.engines.expert",
            [3, 128],
        ),
        (
            ("rollout.engines=[{tensor: 3}]",),
            "engine_layout.tensor",
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            [32, 3, "rollout.engines.tensor"],
        ),
        (
            ("publish.transport=cuda_ipc", "cluster.device=cpu"),
            "publish.transport_on_cpu",
            "publish.transport",
            ["publish.transport=cuda_ipc", "cluster.device"],
        ),
        (
            ("publish.quantize=triton", "numerics.dtype=float32"),
            "publish.triton_dtype",
            "publish.quantize",
            ["publish.quantize=triton", "numerics.dtype", "bfloat16"],
        ),
        (
            ("trainer.megatron.mtp_num_layers=few",),
            "model.mtp_layers",
            "trainer.megatron.mtp_num_layers",
            ["'few'"],
        ),
        (("publish.bucket_mib=.inf",), "config.value", "publish.bucket_mib", ["inf"]),
        (("trainer.pipelin=2",), "config.unknown_key", "trainer.pipelin", ["trainer.pipeline?"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_is_one_sentence_and_exit_code_2(plan, overrides, code, about, values):
    refusal = plan.refuses(SHALLOW, *overrides)
    assert (refusal.code, refusal.about) == (code, about)
    assert {value for value in values if not isinstance(value, str)} <= {*numbers(refusal)}
    assert all(value in str(refusal) for value in values if isinstance(value, str))


def test_number_formats_that_cpu_engines_lack_are_violations(plan):
    code, text = plan(SHALLOW, *IN_FP8, "cluster.device=cpu")
    config = load_config(plan.directory / "run.yaml", [*IN_FP8, "cluster.device=cpu"])
    assert code == 2 and "numerics.mode=exact" in text.splitlines()[-1]
    assert [problem.code for problem in plan_report(config).problems] == ["publish.quantize_on_cpu"]


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ([], "checkpoint.json", ""),
        ({"architectures": "Qwen3MoeForCausalLM"}, "model.architectures", "'Qwen3MoeForCausalLM'"),
        (SHALLOW | {"num_attention_heads": "many"}, "model.field", "num_attention_heads"),
        (SHALLOW | {"num_key_value_heads": 0}, "model.field", "num_key_value_heads"),
    ],
    ids=["list", "text", "wrong_kind", "zero"],
)
def test_a_config_that_is_no_models_is_refused_with_its_file(plan, content, code, named):
    refusal = plan.refuses(content)
    assert refusal.code == code and "config.json" in str(refusal) and named in str(refusal)


@pytest.mark.parametrize(("predicted", "shown"), [(1.2, True), (0.8, True), (1.3, False), (0.7, False)])
def test_predictions_are_shown_only_while_the_model_is_right_here(plan, monkeypatch, predicted, shown):
    monkeypatch.setattr(rehearsal, "rehearse", lambda: LinkTrial([predicted] * 3, [1.0] * 3))
    code, text = plan(SHALLOW, *RUN_30B, "--predict")
    assert code == 0
    (label,) = lines_of(text, "predicted")
    if shown:
        assert "not measured" in label and "H100" in text and "GB300" in text
    else:
        assert f"{predicted - 1:+.0%}" in label and "H100" not in text
    values = json.loads(plan(SHALLOW, *RUN_30B, "--predict", "--json")[1])["predicted"]
    assert values["shown"] is shown and (values["publications"] is not None) is shown


def test_a_cluster_that_is_too_small_is_reported_instead_of_a_figure(plan, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda: LinkTrial([1.0], [1.0]))
    code, text = plan(DEEPSEEK_V3 | {"num_hidden_layers": 4}, *RUN_671B, "--predict")
    (line,) = (line for line in text.splitlines() if "GB300 NVL72" in line)
    assert code == 0 and numbers(line)[:4] == [192, 128, 64, 72], "ranks: all, trainers', engines', and the cluster's"


def test_sizes_have_the_unit_that_fits():
    assert [plan_text._size(n) for n in (512, 2e6, 3.5e9, 1.25e12)] == ["512 bytes", "2.00 MB", "3.50 GB", "1.25 TB"]


def test_a_critic_is_split_and_counted_without_the_output_layer(plan):
    ppo = ("algorithm.name=ppo", "critic={placement: own, layout: {world_size: 2, pipeline: 2}}")
    code, text = plan(SHALLOW, *RUN_30B, *ppo)
    assert code == 0, text
    line = next(line for line in text.splitlines() if line.startswith("critic"))
    assert numbers(line)[0] == 2 and "tensor 1 x pipeline 2 x data 1" in line
    report = json.loads(plan(SHALLOW, *RUN_30B, *ppo, "--json")[1])
    vocabulary, norm = SHALLOW["vocab_size"] * SHALLOW["hidden_size"], SHALLOW["hidden_size"]
    layer = (report["parameters"] - 2 * vocabulary - norm) / 2
    assert report["critic_largest_rank"] == layer + vocabulary, "a layer and the embedding"


def test_a_critic_that_cannot_be_split_is_refused_under_the_critics_key(plan):
    ppo = ("algorithm.name=ppo", "critic={placement: own, layout: {world_size: 3, expert: 3}}")
    code, text = plan(SHALLOW, *RUN_30B, *ppo)
    assert code == 2, text
    assert "critic.layout.expert=3" in text and 128 in numbers(text), "the experts that 3 ranks cannot share"
    assert text.split()[-1] == "critic.layout.expert=2", "the nearest that can be"


CHANGES = ("publish.transport=nixl", "publish.bucket_mib=64", "publish.delta={every_full: 10}")


def test_direct_transfers_take_memory_at_every_rank_and_engine(plan):
    def figures(*overrides: str) -> tuple[dict, int]:
        arguments = ("cluster.device=cpu", "publish.bucket_mib=64", *overrides, "--json")
        report = json.loads(plan(SHALLOW, *RUN_30B, *arguments)[1])
        (buckets,) = [part["nbytes"] for part in report["host"]["held"] if part["what"] == "buckets of a publication"]
        return report["publication"], buckets

    memory, of_memory = figures("publish.transport=memory")
    assert memory["landing_bytes"] == 0 and of_memory == memory["publisher_bytes"]
    direct, buckets = figures("publish.transport=nixl")
    assert buckets == 8 * direct["publisher_bytes"] > 0, "each of the trainer ranks has a ring"
    # Two buckets under way to an engine, and the whole model until it is loaded.
    assert direct["landing_bytes"] > memory["publisher_bytes"] > direct["publisher_bytes"]
    shared, beside = figures("publish.transport=nixl", "schedule.colocate=true")
    assert beside == buckets + 2 * shared["landing_bytes"], "two engines of four ranks are on the machine of eight"
    report = json.loads(plan(SHALLOW, *RUN_30B, "cluster.device=cpu", *CHANGES, "--json")[1])
    changes, last = report["publication"], [h for h in report["host"]["held"] if h["what"] == "weights published last"]
    assert last[0]["nbytes"] == 8 * changes["kept_bytes"] and direct["kept_bytes"] == direct["held_bytes"] == 0
    # Two engines hold a copy each; of what a rank sends them it keeps one, and room for a part to compare.
    assert changes["held_bytes"] == changes["nbytes"] // 2
    assert changes["sent_mean"] < changes["kept_bytes"] < 1.5 * changes["sent_max"]
    on_disk = json.loads(plan(SHALLOW, *RUN_30B, "cluster.device=cpu", *CHANGES, "publish.transport=disk", "--json")[1])
    files, last = on_disk["publication"], [h for h in on_disk["host"]["held"] if h["what"] == "weights published last"]
    assert last[0]["nbytes"] == files["kept_bytes"] > files["held_bytes"] == files["landing_bytes"], "rank 0 alone"
    assert files["held_bytes"] == pytest.approx(changes["held_bytes"], rel=0.05)
    in_buckets, _ = figures("publish.transport=nixl", "publish.staging=bucket")
    assert in_buckets["landing_bytes"] < direct["landing_bytes"]


@pytest.mark.parametrize(
    ("overrides", "counts"),
    [
        ((), [[8.0, 8.0]]),
        (("schedule.max_staleness=1",), []),
        (("schedule.colocate=true",), []),
        (("schedule.colocate=true", "rollout.engines=[{tensor: 4, expert: 4}]"), [[4.0, 8.0]]),
        (("schedule.max_staleness=1", "cluster={nodes: 4, gpus_per_node: 8}"), [[16.0, 32.0]]),
    ],
    ids=["in turns", "at once", "shared", "shared by half", "more nodes"],
)
def test_gpus_that_idle_are_counted_in_a_warning(plan, overrides, counts):
    status, text = plan(SHALLOW, *RUN_30B, *overrides, "--json")
    assert status == 0, text
    warnings = [warning for warning in json.loads(text)["warnings"] if "GPUs" in warning]
    assert [[number for number in numbers(warning) if number > 1][:2] for warning in warnings] == counts, warnings


@pytest.mark.parametrize(
    ("concurrency", "counts"), [(96, []), (98, [[32.0, 98.0]])], ids=["a third", "less than a third"]
)
def test_rollouts_that_find_no_room_in_kv_caches_are_counted_in_a_warning(plan, concurrency, counts):
    room = "rollout.engines=[{count: 2, max_total_tokens: 65536, tensor: 4, expert: 4}]"
    batch = ("rollout.max_prompt_tokens=2048", "rollout.sampling={max_new_tokens: 2048}", "rollout.prompts_per_step=64")
    overrides = (room, *batch, f"rollout.concurrency={concurrency}")
    status, text = plan(SHALLOW, *RUN_30B, *overrides, "--json")
    assert status == 0, text
    found = [warning for warning in json.loads(text)["warnings"] if "KV" in warning]
    assert [[number for number in numbers(warning) if number > 1][:2] for warning in found] == counts, found


def test_each_policy_is_planned_with_its_layout_and_named_problems(plan):
    run = ("trainer={world_size: 2, expert: 2}", "publish.transport=memory", "cluster.device=cpu")
    code, text = plan(SHALLOW, *run, "policies.judge.trainer={world_size: 4, expert: 4}", "--json")
    assert code == 0, text
    report = json.loads(text)
    (name, judge), *others = report["policies"].items()
    assert name == "judge" and not others and judge["policies"] == {}
    assert report["trainer"]["expert"] == 2 and judge["trainer"]["expert"] == 4
    assert [group["name"] for group in judge["engines"]] == ["judge"]
    assert judge["largest_rank"] < report["largest_rank"]
    code, text = plan(SHALLOW, *run, "policies.judge.trainer={world_size: 3, expert: 3}", "--json")
    assert code == 2 and json.loads(text[: text.rindex("}") + 1])["violations"][0].startswith("policies.judge: ")


def test_the_plan_names_the_transport_and_refuses_unreachable_ones(plan: Planning) -> None:
    code, text = plan(SHALLOW, "cluster.device=cpu", "--json")
    publication = json.loads(text)["publication"]
    assert code == 0 and publication["transport"] == "memory" and publication["transport_note"]
    arguments = ["cluster.nodes=4", "publish.transport=cuda_ipc"]
    assert plan(SHALLOW, *arguments)[0] == 2
    (problem,) = plan_report(load_config(plan.directory / "run.yaml", arguments)).problems
    assert (problem.code, problem.about) == ("publish.machines", "publish.transport")
