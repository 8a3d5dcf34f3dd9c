"""`slimx plan` knows what a run of hundreds of GPUs will do from its YAML file and config.json, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slimx import cli
from slimx.commands import plan as plan_command
from slimx.config import load_config
from slimx.config.sections.trainer import Trainer
from slimx.errors import SlimxError
from slimx.preflight.links import rehearsal
from slimx.preflight.links.model import LinkTrial
from slimx.preflight.plan import text as plan_text
from slimx.preflight.plan.report import plan_report
from slimx.preflight.record import PlanReport
from slimx.trainer.device.backends import choose_backends
from tests.refusals import numbers
from tests.unit.preflight.published_models import DEEPSEEK_V3, QWEN3_30B

SHALLOW = QWEN3_30B | {"num_hidden_layers": 2}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
RUN_30B = (
    "trainer={world_size: 8, tensor: 4, expert: 8, expert_tensor: 1}",
    "rollout.engines=[{tensor: 4, expert: 4, count: 2}]",
)
RUN_235B = (
    "trainer={world_size: 32, tensor: 4, expert: 32, expert_tensor: 1}",
    "rollout.engines=[{tensor: 8, expert: 8, dp_attention: 2, count: 4}]",
)
RUN_671B = (
    "trainer={world_size: 128, tensor: 8, expert: 64, expert_tensor: 1}",
    "rollout.engines=[{tensor: 64, expert: 64, dp_attention: 8}]",
)


class Planning:
    """`slimx plan` in a directory with nothing else."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.directory, self.capsys, self.monkeypatch = directory, capsys, monkeypatch
        self.refusal: BaseException | None = None
        """Error that ended the last call."""

    def __call__(self, hf: Any, *arguments: str) -> tuple[int, str]:
        """Exit status and output, where config.json holds `hf`."""
        model, file = self.directory / "model", self.directory / "run.yaml"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(hf))
        values = {
            "run": {"dir": str(self.directory / "run")},
            "model": {"path": str(model)},
            "rollout": {"prompts": "absent.jsonl"},
            "publish": {"encoding": "auto"},
        }
        file.write_text(yaml.safe_dump(values))
        self.monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(file), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self.capsys.readouterr()
        self.refusal = end.value.__context__
        return end.value.code or 0, out + err

    def refuses(self, hf: Any, *arguments: str) -> SlimxError:
        """The refusal, which is told in one line and exit status 2."""
        code, text = self(hf, *arguments)
        if not isinstance(self.refusal, SlimxError):  # the first that a plan which could be made tells of
            config = load_config(self.directory / "run.yaml", list(arguments))
            self.refusal = plan_report(config).problems[0]
        assert (code, text) == (2, f"slimx: {self.refusal}\n") and text.count("\n") == 1
        return self.refusal


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planning:
    return Planning(tmp_path, capsys, monkeypatch)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("hf", "run", "parameters", "tensors"),
    [(QWEN3_30B, RUN_30B, 30.5, 18867), (QWEN3_235B, RUN_235B, 235.1, 36945), (DEEPSEEK_V3, RUN_671B, 671.0, 45000)],
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
    assert publication["compile_seconds"] < 30


def test_the_text_tells_layouts_bytes_work_and_proof(plan):
    code, text = plan(QWEN3_30B, *RUN_30B, "publish.quantise=ieee")
    assert code == 0, text
    for told in (
        "Qwen3MoeForCausalLM",
        "30.5 B parameters",
        "18,867 tensors",
        "8 ranks: tensor 4 x pipeline 1 x data 2, expert 8 x expert tensor 1",
        "actor: 2 x 4 ranks: tensor 4 x pipeline 1, expert 4",
        "encoding local",
        "rule ieee",
        "kernel launches",
        "(publish.transport memory)",
        "proven: ",
    ):
        assert told in text
    assert "predicted" not in text


@pytest.mark.costly
def test_memory_for_buckets_follows_transport_and_staging(plan):
    def memory(*overrides: str) -> tuple[float, float]:
        _, text = plan(QWEN3_30B, *RUN_30B, "publish.bucket_mib=256", *overrides, "--json")
        figures = json.loads(text)["publication"]
        return figures["publisher_bytes"] / 2**20, figures["staged_bytes"] / 2**20

    ranks, embedding = 4, 151936 * 2048 * 2 / 2**20  # of an engine; a tensor that is larger than a bucket
    model = 30.5e9 * 2 / 2**20
    assert memory("publish.staging=model") == (pytest.approx(model, rel=0.05), 0)
    two, staged = memory("publish.staging=bucket")
    assert staged == 0 and 2 * ranks * 200 <= two <= 2 * ranks * max(embedding, 256)
    assert memory("publish.transport=cuda_ipc", "publish.staging=bucket") == (two, pytest.approx(256, rel=0.25))
    assert memory("publish.transport=cuda_ipc", "publish.staging=model") == (two, pytest.approx(model / ranks, rel=0.1))
    assert memory("publish.transport=nccl", "publish.staging=bucket")[1] == pytest.approx(256 + two / 2, rel=0.25)


def test_fp8_halves_the_bytes_and_counts_the_quantised_tensors(plan):
    plain, quantised = (
        json.loads(plan(QWEN3_30B, *RUN_30B, *more, "--json")[1])["publication"]
        for more in ((), ("publish.quantise=ieee",))
    )
    # Per layer and rank: qkv, o, w13 and w2; the embeddings stay as they are.
    assert (plain["quantised"], quantised["quantised"]) == (0, 4 * 48 * 4)
    assert quantised["tensors"] == plain["tensors"] + quantised["quantised"]
    assert 0.5 < quantised["nbytes"] / plain["nbytes"] < 0.52


def test_what_slimx_cannot_write_in_place_falls_back_and_says_why(plan):
    code, text = plan(QWEN3_30B, RUN_30B[0], "rollout.engines=[{tensor: 4, sglang: {enable_eplb: true}}]")
    (line,) = (line for line in text.splitlines() if "encoding hf" in line)
    assert code == 0 and "rollout.engines.sglang.enable_eplb" in line


def test_engines_of_different_sizes_are_counted_rank_by_rank(plan):
    engines = "rollout.engines=[{name: a, tensor: 2, count: 3}, {name: b, tensor: 4}]"
    report = json.loads(plan(SHALLOW, engines, "--json")[1])
    assert report["publication"]["encoding"] == "hf"
    assert report["publication"]["nbytes"] == 2 * report["parameters"] * (3 * 2 + 4)
    assert report["publication"]["sent_max"] == 2 * report["parameters"] * (3 + 1)


def test_a_tiny_model_has_a_size_too(plan):
    tiny = SHALLOW | {"num_experts": 2, "hidden_size": 64, "vocab_size": 1000}
    assert "1.9 M parameters" in plan(tiny)[1]


def test_the_plan_is_for_gpus_unless_the_run_says_cpu(plan):
    # More tensor-parallel ranks than query groups: GPUs repeat these, SGLang's CPU path pads them.
    engines = "rollout.engines=[{tensor: 8, expert: 8}]"
    assert (
        "encoding local" in plan(SHALLOW, engines)[1]
        and "encoding hf" in plan(SHALLOW, engines, "cluster.device=cpu")[1]
    )


def test_fusions_that_lack_a_package_are_told_and_stop_no_plan(plan, monkeypatch):
    monkeypatch.setattr(plan_command, "installed", lambda: {"transformer_engine"})
    told = json.loads(plan(SHALLOW, *RUN_30B, "--json")[1])["kernels"]
    several = Trainer(world_size=2, data=2)
    expected = choose_backends(several, device="cuda", packages={"transformer_engine"}).reasons
    assert tuple(told) == expected and any("apex" in sentence for sentence in told)
    flex = [*RUN_30B, "trainer.moe.dispatcher=flex"]
    code, text = plan(SHALLOW, *flex)
    assert code == 0 and "deep_ep" in next(line for line in text.splitlines() if line.startswith("kernels"))


def test_a_run_without_engines_publishes_nothing(plan):
    code, text = plan(QWEN3_30B, "algorithm.name=sft", "rollout.engines=[]")
    assert code == 0 and "publication none" in text


@pytest.mark.parametrize(
    ("overrides", "code", "about", "values"),
    [
        (("trainer={world_size: 5, pipeline: 5}",), "layout.pipeline", "trainer.pipeline", [5, 48]),
        (("trainer={world_size: 3, expert: 3, expert_tensor: 1}",), "layout.divides", "trainer.expert", [3, 128]),
        (("rollout.engines=[{tensor: 4, expert: 3}]",), "engines.sizes", "rollout.engines", ["expert=3", 4]),
        (
            ("trainer={world_size: 4, tensor: 4}", "publish.quantise=ieee"),
            "plan.blocks",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            [192, 2048, 128],
        ),
        (("model.path=nowhere",), "model.directory", "nowhere", []),
        (("rollout.engines=[{pipeline: 2}]",), "engines.sizes", "rollout.engines", ["pipeline=2", "engine actor"]),
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
            ("publish.quantise=ieee", "cluster.device=cpu"),
            "publish.quantise_on_cpu",
            "publish.quantise",
            ["numerics.mode=exact"],
        ),
        (
            ("publish.transport=nccl", "cluster.device=cpu"),
            "publish.transport_on_cpu",
            "publish.transport",
            ["publish.transport=nccl", "cluster.device"],
        ),
        (
            ("publish.transport=cuda_ipc", "cluster.device=cpu"),
            "publish.transport_on_cpu",
            "publish.transport",
            ["publish.transport=cuda_ipc", "cluster.device"],
        ),
        (
            ("publish.transport=nccl", "schedule.colocate=true"),
            "publish.nccl_colocated",
            "publish.transport",
            ["schedule.colocate", "publish.transport=cuda_ipc"],
        ),
        (
            ("publish.quantise=triton", "numerics.dtype=float32"),
            "publish.triton_dtype",
            "publish.quantise",
            ["publish.quantise=triton", "numerics.dtype", "bfloat16"],
        ),
        (
            ("trainer.megatron.mtp_num_layers=few",),
            "model.mtp_layers",
            "trainer.megatron.mtp_num_layers",
            ["mtp_num_layers='few'"],
        ),
        (("publish.bucket_mib=.inf",), "config.value", "publish.bucket_mib", ["inf"]),
        (("trainer.pipelin=2",), "config.unknown_key", "trainer.pipelin", ["trainer.pipeline?"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_is_one_sentence_and_exit_code_2(plan, overrides, code, about, values):
    refusal = plan.refuses(QWEN3_30B, *overrides)
    assert (refusal.code, refusal.about) == (code, about)
    assert {value for value in values if not isinstance(value, str)} <= {*numbers(refusal)}
    assert all(value in str(refusal) for value in values if isinstance(value, str))


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        ([], "checkpoint.json", ""),
        ({"architectures": "Qwen3MoeForCausalLM"}, "model.architectures", "'Qwen3MoeForCausalLM'"),
        (SHALLOW | {"num_attention_heads": "many"}, "model.field", "Qwen3MoeForCausalLM"),
        (SHALLOW | {"num_key_value_heads": 0}, "model.field", "Qwen3MoeForCausalLM"),
    ],
    ids=["list", "text", "wrong_kind", "zero"],
)
def test_a_config_that_is_no_models_is_refused_with_its_file(plan, content, code, named):
    refusal = plan.refuses(content)
    assert refusal.code == code and Path(refusal.about).name == "config.json" and named in str(refusal)


def test_nothing_heavy_is_imported(tmp_path: Path):
    code = """
import sys
import slimx.preflight.plan.report
print([name for name in ("torch", "ray", "sglang", "megatron", "transformers") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("predicted", "shown"), [(1.2, True), (0.8, True), (1.3, False), (0.7, False)])
def test_predictions_are_labelled_and_shown_only_while_the_model_is_right_here(plan, monkeypatch, predicted, shown):
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


def test_a_cluster_that_is_too_small_is_told_instead_of_a_figure(plan, monkeypatch):
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


def test_a_critic_that_cannot_be_split_is_refused_with_its_own_key(plan):
    ppo = ("algorithm.name=ppo", "critic={placement: own, layout: {world_size: 3, expert: 3}}")
    code, text = plan(SHALLOW, *RUN_30B, *ppo)
    assert code == 2, text
    assert "critic.layout.expert=3" in text and 128 in numbers(text), "the experts that 3 ranks cannot share"
    assert text.split()[-1] == "critic.layout.expert=2", "the nearest that can be"


# Memory, machines and suggestions -------------------------------------------------------------------------------------

H100 = "cluster.gpu=h100"
FULL = "trainer.recompute.granularity=full"


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.costly
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
    assert all(each in stage for each in ("ranks 8-15", "nodes 1,", "layers 24-47", "experts 0-15, 16-31, 32-47, ..."))


@pytest.mark.costly
def test_a_run_that_does_not_fit_is_refused_with_the_nearest_layout_that_does(plan):
    code, text = plan(QWEN3_30B, *RUN_30B, H100)
    assert code == 2
    (refused,) = lines_of(text, "slimx: ")
    assert "trainer rank 0" in refused and 79.6 in numbers(refused)
    (nearest,) = lines_of(text, "nearest")
    assert "TP4 x EP8 x DP2, " in nearest
    overrides = text.splitlines()[text.splitlines().index(nearest) + 1].split()
    assert plan(QWEN3_30B, *RUN_30B, H100, *overrides)[0] == 0
    assert plan(QWEN3_30B, *RUN_30B, "cluster.gpu=h200")[0] == 0
    assert plan(QWEN3_30B, *RUN_30B)[0] == 0, "without a GPU memory is told and not judged"


def test_everything_that_is_violated_is_told_at_once(plan):
    code, text = plan(
        QWEN3_30B,
        "trainer={world_size: 15, pipeline: 5, expert: 3, expert_tensor: 1, max_tokens_per_microbatch: 512}",
        "rollout.engines=[{tensor: 4, expert: 3}]",
        "rollout.max_prompt_tokens=100000",
    )
    assert code == 2
    told = lines_of(text, "slimx: ")
    for part in (
        "trainer.expert=3 ",
        "trainer.pipeline=5 ",
        " 40960 ",
        "trainer.max_tokens_per_microbatch=512 ",
        "rollout.engines.expert=3 ",
    ):
        assert sum(part in line for line in told) == 1, (part, told)
    assert len(told) == 5


def test_a_configuration_that_contradicts_itself_is_told_of_all_of_it(plan):
    code, text = plan(
        QWEN3_30B,
        "schedule={colocate: true, max_staleness: 1, updates_per_step: 5}",
        "publish.transport=nccl",
        "eval.prompts=held_out.jsonl",
    )
    assert code == 2
    for part in ("schedule.max_staleness exclude", "updates_per_step 5 does not divide", "publish.transport=nccl"):
        assert part in text


@pytest.mark.costly
def test_suggested_layouts_pass_the_plan(plan):
    """Each of them, with everything that a run checks."""
    code, text = plan(QWEN3_30B, *RUN_30B, H100, "--suggest", "--json")
    report = json.loads(text[: text.rindex("}") + 1])
    assert code == 2 and len(report["suggestions"]) == 5, "the run as configured is still refused"
    costs = [each["cost"] for each in report["suggestions"]]
    assert costs == sorted(costs)
    for suggestion in report["suggestions"]:
        code, text = plan(QWEN3_30B, *RUN_30B, H100, *suggestion["overrides"], "--json")
        memory = json.loads(text)["trainer_memory"]
        assert code == 0, text
        assert max(record["peak"] for record in memory) == pytest.approx(suggestion["trainer_peak"], rel=1e-4)
    (engine,) = report["suggested_engines"]
    fields = ", ".join(f"{key}: {engine[key]}" for key in ("tensor", "expert", "dp_attention", "count", "nodes"))
    told = json.loads(plan(QWEN3_30B, H100, FULL, *RUN_30B, f"rollout.engines=[{{{fields}}}]", "--json")[1])
    (held,) = told["engine_memory"]
    assert held["concurrency"] * held["count"] == engine["concurrency"]
    assert engine["concurrency"] >= 2 * 1000, "more than the two servers as configured"


@pytest.mark.costly
def test_a_critic_beside_the_policy_is_weighed_with_it(plan):
    ppo = ("algorithm.name=ppo", "critic={}", H100, FULL)
    code, text = plan(QWEN3_30B, *RUN_30B, *ppo)
    lines = text.splitlines()
    assert code == 2 and any("trainer and critic rank 0" in line for line in lines)
    (nearest,) = (number for number, line in enumerate(lines) if line.startswith("nearest"))
    assert plan(QWEN3_30B, *RUN_30B, *ppo, *lines[nearest + 1].split())[0] == 0


def test_engines_that_do_not_fit_are_told_which_would(plan):
    engines = "rollout.engines=[{tensor: 1, expert: 1, sglang: {mem_fraction_static: 0.6}}]"
    code, text = plan(QWEN3_30B, RUN_30B[0], H100, FULL, engines)
    (refused,) = lines_of(text, "slimx: ")
    assert code == 2 and "engine actor" in refused and 56.9 in numbers(refused), "GiB of weights"
    (line,) = lines_of(text, "  engines   actor: count")
    assert "count 1, tensor 2, expert 1, dp_attention 1, nodes 1:" in line


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
    ("gpu", "quantise", "named", "refused"),
    [
        ("gb300", "ue8m0", {}, ["moe_runner_backend", "fp8_gemm_runner_backend"]),
        ("gb300", "ue8m0", {"moe_runner_backend": "triton"}, ["fp8_gemm_runner_backend"]),
        ("gb300", "null", {"moe_runner_backend": "flashinfer_trtllm"}, ["moe_runner_backend"]),
        ("gb300", "null", {"moe_runner_backend": "triton"}, []),
        ("h100", "triton", {}, []),
        ("gb300", "null numerics.mode=exact", {}, []),
    ],
)
def test_engines_on_blackwell_name_kernels_that_keep_the_published_layout(plan, gpu, quantise, named, refused):
    engines = json.dumps([{"tensor": 4, "expert": 4, "sglang": named}])
    overrides = [f"cluster.gpu={gpu}", *f"publish.quantise={quantise}".split(), f"rollout.engines={engines}"]
    plan(SHALLOW, *overrides)
    config = load_config(plan.directory / "run.yaml", overrides)
    problems = [problem.about for problem in plan_report(config).problems if problem.code == "engines.backend"]
    assert problems == [f"rollout.engines.sglang.{key}" for key in refused]


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
    fullest = max(sum(held["nbytes"] for held in phase["held"]) for phase in small["phases"])
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

    assert set(links("publish.transport=nccl")) == {"network"}, "trainers fill the first node"
    engines = "{tensor: 4, expert: 4, count: 2, sglang: {moe_runner_backend: triton}}"
    tray = "cluster.gpu=gb300", f"rollout.engines=[{engines}]"
    assert set(links("publish.transport=nccl", *tray)) == {"NVLink"}, "one domain of 72"
    assert set(links("publish.transport=memory")) == {"host memory (PCIe)"}
    own = links("publish.transport=cuda_ipc", "schedule.colocate=true")
    assert set(own) == {"one GPU", "NVLink"}


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
    assert [key for key in PlanReport.model_fields if f"`{key}`" not in text] == []
    described = PlanReport.model_json_schema()["$defs"]["TrainerMemory"]["properties"]
    assert described["optimizer"]["description"] == "On the device."
