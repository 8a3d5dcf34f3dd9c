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
from slimx.preflight import plan_text, rehearsal
from slimx.preflight.link_model import Trial

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
SHALLOW = QWEN3_30B | {"num_hidden_layers": 2}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
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


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """plan(config.json's content, *arguments) -> (exit code, what it printed), in a directory with nothing else."""

    def run(hf: dict[str, Any], *arguments: str) -> tuple[int, str]:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(hf))
        values = {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"path": str(tmp_path / "model")},
            "rollout": {"prompts": "absent.jsonl"},
            "publish": {"encoding": "auto"},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
        monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(tmp_path / "run.yaml"), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out + err

    return run


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
        "30.5 B parameters in 18,867 tensors",
        "8 ranks: tensor 4 x pipeline 1 x data 2, expert 8 x expert tensor 1",
        "actor: 2 x 4 ranks: tensor 4 x pipeline 1, expert 4",
        "encoding local",
        "quantised to fp8 by the rule ieee",
        "kernel launches per trainer rank",
        "of an engine rank's GPU at most (publish.transport memory)",
        "proven: every element of every tensor is written once",
    ):
        assert told in text
    assert "predicted" not in text


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
    assert code == 0 and "encoding hf: Hugging Face names, because rollout.engines.sglang.enable_eplb" in text


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
        and "pads on the CPU" in plan(SHALLOW, engines, "cluster.device=cpu")[1]
    )


def test_a_run_without_engines_publishes_nothing(plan):
    code, text = plan(QWEN3_30B, "algorithm.name=sft", "rollout.engines=[]")
    assert code == 0 and "publication none" in text


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("trainer={world_size: 5, pipeline: 5}",), "trainer.pipeline=5 does not divide the model's 48 layers"),
        (("trainer={world_size: 3, expert: 3, expert_tensor: 1}",), "trainer.expert=3 does not divide the 128 experts"),
        (("rollout.engines=[{tensor: 4, expert: 3}]",), "rollout.engines.expert=3 does not divide"),
        (("trainer={world_size: 4, tensor: 4}", "publish.quantise=ieee"), "quantisation block"),
        (("model.path=nowhere",), "config.json is missing"),
        (("rollout.engines=[{pipeline: 2}]",), "rollout.engines.pipeline=2 of engine actor"),
        (("rollout.engines=[{sglang: {ep_num_redundant_experts: few}}]",), "ep_num_redundant_experts='few'"),
        (("rollout.engines=[{sglang: {ep_num_redundant_experts: -2}}]",), "ep_num_redundant_experts=-2"),
        (("rollout.engines=[{tensor: 3, expert: 3}]", "publish.encoding=hf"), "cannot share 128 physical experts"),
        (("rollout.engines=[{tensor: 3}]",), "(rollout.engines.tensor or dp_attention)"),
        (("publish.quantise=ieee", "cluster.device=cpu"), "SGLang holds fp8 blocks on CUDA only"),
        (("publish.transport=nccl", "cluster.device=cpu"), "publish.transport=nccl moves weights from GPU to GPU, and"),
        (("publish.transport=cuda_ipc", "cluster.device=cpu"), "publish.transport=cuda_ipc moves weights from GPU to"),
        (
            ("publish.transport=nccl", "schedule.colocate=true"),
            "NCCL connects no GPU with itself; set publish.transport",
        ),
        (("publish.quantise=triton", "numerics.dtype=float32"), "publish.quantise=triton is defined for bfloat16"),
        (("trainer.megatron.mtp_num_layers=few",), "mtp_num_layers='few' is no number of layers"),
        (("publish.bucket_mib=.inf",), "publish.bucket_mib is inf"),
        (("trainer.pipelin=2",), "did you mean trainer.pipeline?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_refusal_is_one_sentence_and_exit_code_2(plan, overrides, told):
    code, text = plan(QWEN3_30B, *overrides)
    assert code == 2 and text.startswith("slimx: ") and text.count("\n") == 1 and told in text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "not a JSON object"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "architectures is 'Qwen3MoeForCausalLM', not a list"),
        (SHALLOW | {"num_attention_heads": "many"}, "a field has a value that a Qwen3MoeForCausalLM cannot have"),
        (SHALLOW | {"num_key_value_heads": 0}, "a field has a value that a Qwen3MoeForCausalLM cannot have"),
    ],
    ids=["list", "text", "wrong_kind", "zero"],
)
def test_a_config_that_is_no_models_is_refused_with_its_file(plan, content, told):
    code, text = plan(content)
    assert code == 2 and text.count("\n") == 1 and "config.json: " in text and told in text


def test_nothing_heavy_is_imported(tmp_path: Path):
    code = """
import sys
import slimx.preflight.plan_report
print([name for name in ("torch", "ray", "sglang", "megatron", "transformers") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "[]\n"


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("predicted", "shown"), [(1.2, True), (0.8, True), (1.3, False), (0.7, False)])
def test_predictions_are_labelled_and_shown_only_while_the_model_is_right_here(plan, monkeypatch, predicted, shown):
    monkeypatch.setattr(rehearsal, "rehearse", lambda: Trial([predicted] * 3, [1.0] * 3))
    code, text = plan(SHALLOW, *RUN_30B, "--predict")
    assert code == 0
    if shown:
        assert "predicted   by the link model, not measured" in text and "H100" in text and "GB300" in text
    else:
        assert f"predicted   not shown: the model is off by {predicted - 1:+.0%} here" in text
        assert "H100" not in text
    values = json.loads(plan(SHALLOW, *RUN_30B, "--predict", "--json")[1])["predicted"]
    assert values["shown"] is shown and (values["publications"] is not None) is shown


def test_a_cluster_that_is_too_small_is_told_instead_of_a_figure(plan, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", lambda: Trial([1.0], [1.0]))
    code, text = plan(DEEPSEEK_V3 | {"num_hidden_layers": 4}, *RUN_671B, "--predict")
    assert code == 0 and "192 ranks (128 trainers, 64 of engines) do not fit the 72 of GB300 NVL72" in text


def test_sizes_have_the_unit_that_fits():
    assert [plan_text._size(n) for n in (512, 2e6, 3.5e9, 1.25e12)] == ["512 bytes", "2.00 MB", "3.50 GB", "1.25 TB"]


def test_a_critic_is_split_and_counted_without_the_output_layer(plan):
    ppo = ("algorithm.name=ppo", "critic={placement: own, layout: {world_size: 2, pipeline: 2}}")
    code, text = plan(SHALLOW, *RUN_30B, *ppo)
    assert code == 0, text
    line = next(line for line in text.splitlines() if line.startswith("critic"))
    assert "2 ranks of its own: tensor 1 x pipeline 2 x data 1" in line
    report = json.loads(plan(SHALLOW, *RUN_30B, *ppo, "--json")[1])
    vocabulary, norm = SHALLOW["vocab_size"] * SHALLOW["hidden_size"], SHALLOW["hidden_size"]
    layer = (report["parameters"] - 2 * vocabulary - norm) / 2
    assert report["critic_largest_rank"] == layer + vocabulary, "a layer and the embedding"


def test_a_critic_that_cannot_be_split_is_refused_with_its_own_key(plan):
    ppo = ("algorithm.name=ppo", "critic={placement: own, layout: {world_size: 3, expert: 3}}")
    code, text = plan(SHALLOW, *RUN_30B, *ppo)
    assert code == 2, text
    assert "critic.layout.expert=3 does not divide the 128 experts" in text
    assert text.rstrip().endswith("the nearest that does is critic.layout.expert=2")
