"""Exact mode refuses what it cannot do, by the key to change."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.extras.exact import rules
from slimx.extras.exact.operations.forward import kernel_cuda
from slimx.extras.families import gpt_oss
from slimx.extras.low_precision.rules import has_kernels
from slimx.extras.recurrent.families import qwen3_5, qwen3_next
from slimx.layout.ranks import Sizes
from slimx.models.families import read_model
from slimx.reshard.plan.publication import publication_plan
from tests.checkpoint_stand import QWEN3_MOE
from tests.extras.exact.run_config import config
from tests.refusals import invalid, refused

TRITON = {"sglang": {"moe_runner_backend": "triton"}}


def broken_codes(config: Config, spec: Any, local_device: str) -> list[str]:
    """Returns the codes of the broken rules about exact mode, model and machine."""
    facts = config.facts | {"spec": spec, "local_device": local_device}
    return [problem.code for problem in broken(rules_in(rules), facts)]


def test_settings_that_keep_the_forward_pass_exact_are_accepted() -> None:
    from megatron.core.transformer import TransformerConfig

    assert set(rules.MEGATRON_FIELDS) <= {field.name for field in fields(TransformerConfig)}
    for good in (
        config(trainer={"megatron": {"batch_p2p_sync": False}}),
        config(schedule={"max_staleness": 1}, rollout={"gap_probe": 0, "replay": "/tmp/y"}),
    ):
        assert broken(rules_in(rules), good.facts) == []


@pytest.mark.parametrize(
    ("sections", "code", "about"),
    [
        (
            {"critic": {}, "algorithm": {"name": "ppo"}},
            "exact.critic",
            "critic",
        ),
        ({"numerics": {"leaves": 3}}, "exact.leaves", "numerics.leaves"),
        ({"trainer": {"world_size": 2, "tensor": 2}, "numerics": {"leaves": 1}}, "exact.leaves", "numerics.leaves"),
        (
            {"rollout": {"engines": [{"tensor": 4}]}, "numerics": {"leaves": 2}},
            "exact.leaves",
            "numerics.leaves",
        ),
        (
            {"eval": {"prompts": "e", "engines": [{"tensor": 4}]}, "numerics": {"leaves": 2}},
            "exact.leaves",
            "numerics.leaves",
        ),
        ({"numerics": {"mode": "fast", "leaves": 2}}, "exact.leaves", "numerics.leaves"),
        ({"trainer": {"attention": "flash"}}, "exact.attention", "trainer.attention"),
        ({"trainer": {"moe": {"routing_replay": "R3"}}}, "exact.replay", "trainer.moe.routing_replay"),
        (
            {"trainer": {"megatron": {"moe_router_pre_softmax": False}}},
            "exact.megatron",
            "trainer.megatron.moe_router_pre_softmax",
        ),
        (
            {"trainer": {"megatron": {"batch_p2p_sync": False, "window_size": [8, 0]}}},
            "exact.megatron",
            "trainer.megatron.window_size",
        ),
        ({"schedule": {"max_staleness": 1}, "rollout": {"gap_probe": 0}}, "exact.gap_probe", "rollout.gap_probe"),
        (
            {"publish": {"quantize": "ieee"}, "algorithm": {"name": "distillation", "teacher": "/t"}},
            "exact.quantize",
            "algorithm.teacher",
        ),
        (
            {"trainer": {"recompute": {"granularity": "selective", "modules": ["moe_act"]}}},
            "exact.recompute",
            "trainer.recompute.modules",
        ),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, "exact.sampling", "rollout.sampling"),
        ({"publish": {"quantize": "ieee"}}, "exact.quantize", "rollout.engines.model"),
        (
            {"publish": {"quantize": "int4"}, "rollout": {"engines": [{"model": "packed"} | TRITON]}},
            "exact.quantize",
            "publish.quantize",
        ),
        ({"publish": {"quantize": "ieee"}, "numerics": {"dtype": "float32"}}, "exact.quantize", "numerics.dtype"),
        ({"publish": {"quantize": "ieee", "encoding": "hf"}}, "exact.quantize", "publish.encoding"),
        (
            {"rollout": {"engines": [{"tensor": 2, "dp_attention": 2}]}},
            "exact.engines",
            "rollout.engines.dp_attention",
        ),
        (
            {"rollout": {"engines": [{"sglang": {"ep_num_redundant_experts": 2}}]}},
            "exact.engines",
            "rollout.engines.sglang.ep_num_redundant_experts",
        ),
        (
            {"rollout": {"engines": [{"sglang": {"kv_cache_dtype": "fp8_e4m3"}}]}},
            "exact.engines",
            "rollout.engines.sglang.kv_cache_dtype",
        ),
        (
            {"rollout": {"engines": [{"sglang": {"speculative_algorithm": "EAGLE"}}]}},
            "exact.engines",
            "rollout.engines.sglang.speculative_algorithm",
        ),
        (
            {"rollout": {"engines": [{"sglang": {"model_impl": "transformers"}}]}},
            "exact.engines",
            "rollout.engines.sglang.model_impl",
        ),
        (
            {"rollout": {"engines": [{"sglang": {"decode_attention_backend": "torch_native"}}]}},
            "exact.engines",
            "rollout.engines.sglang.decode_attention_backend",
        ),
    ],
)
def test_limits_of_exact_mode_are_refused_by_the_key_to_change(sections: dict[str, Any], code: str, about: str) -> None:
    with invalid(code, about=about):
        config(**sections)


def test_a_family_that_was_not_proven_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields = {"num_attention_heads": 4, "kv_channels": 32, "ffn_hidden_size": 192, "moe_ffn_hidden_size": None}
    spec = SimpleNamespace(path="/m", family=SimpleNamespace(ARCHITECTURE="Qwen3ForCausalLM"), transformer=fields)
    assert broken_codes(config(), spec, "cpu") == []
    monkeypatch.setattr(kernel_cuda.ordered, "LIBRARY", tmp_path / "absent.so")
    assert broken_codes(config(), spec, "cuda") == ["library.missing"]
    monkeypatch.setattr(kernel_cuda, "load", lambda path: None)
    assert broken_codes(config(), spec, "cuda") == []
    spec.family.ARCHITECTURE = "LlamaForCausalLM"
    assert broken_codes(config(), spec, "cpu") == []
    assert broken_codes(config(), spec, "cuda") == ["exact.architecture_cuda"]
    many = config(numerics={"mode": "exact", "leaves": 128})
    assert broken_codes(many, spec, "cpu") == ["exact.leaves_width"]
    for family in (gpt_oss, qwen3_5, qwen3_next):
        spec.family.ARCHITECTURE = family.ARCHITECTURE
        assert broken_codes(config(), spec, "cpu") == ["exact.architecture"]
    assert broken_codes(config(numerics={"mode": "fast"}), spec, "cuda") == []


def test_engines_in_other_blocks_than_a_publications_are_refused(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 4, "kv_channels": 32, "ffn_hidden_size": 192, "moe_ffn_hidden_size": None}
    spec = SimpleNamespace(path="/m", family=SimpleNamespace(ARCHITECTURE="Qwen3ForCausalLM"), transformer=fields)
    blocks = config(publish={"quantize": "ieee"}, rollout={"engines": [{"model": str(tmp_path)}]})
    for block_size, codes in (([64, 64], ["exact.blocks"]), (None, ["exact.blocks"]), ([128, 128], [])):
        described = {} if block_size is None else {"quantization_config": {"weight_block_size": block_size}}
        (tmp_path / "config.json").write_text(json.dumps(described))
        assert broken_codes(blocks, spec, "cpu") == codes
    assert "exact.quantize_device" in broken_codes(blocks, spec, "cuda")
    for architecture in ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"):
        spec.family.ARCHITECTURE = architecture
        assert broken_codes(blocks, spec, "cpu") == []
    spec.family.ARCHITECTURE = "LlamaForCausalLM"
    assert broken_codes(blocks, spec, "cpu") == ["exact.quantize_architecture"]


def test_quantized_blocks_are_sent_only_in_the_engines_layout(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "head_dim": 128, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | wide))
    spec, engine = read_model(tmp_path), {"model": str(tmp_path)}
    one = config(publish={"quantize": "ieee"}, rollout={"engines": [engine]})
    found = publication_plan(one, spec, Sizes(), "cpu")
    dtypes = {t.dtype for bucket in found.plan.buckets[0] for t in bucket.tensors}
    assert found.encoding == "local" and "float8_e4m3fn" in dtypes
    layouts = [engine | {"name": "one"}, engine | {"name": "two", "tensor": 2}]
    two = config(publish={"quantize": "ieee"}, rollout={"engines": layouts}, numerics={"mode": "exact", "leaves": 2})
    with refused("publish.exact_encoding", about="publish.quantize"):
        publication_plan(two, spec, Sizes(), "cpu")
    fast = config(numerics={"mode": "fast"}, publish={"quantize": "ieee"})
    for mode, refusals in ((one, 0), (fast, 1)):
        problems = broken([has_kernels], mode.facts | {"device": "cpu", "sizes": Sizes()})
        assert [p.code for p in problems] == refusals * ["publish.quantize_on_cpu"]
