"""SGLang with its own LoRA layers: the cases that rules refuse, and the results in all others."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slimx.extras.lora.form import ServedLora
from slimx.models.families import read_model
from tests.warm.sglang import run_with_sglang

SERVED = "first=8.0,second=2.0"
FUSED = {"down_proj": 1, "gate_up_proj": 2, "o_proj": 1, "qkv_proj": 3}
"""SGLang's modules with adapters, and of how many of the checkpoint's each is."""
HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the findings of tests/extras/lora/lora_engine.py."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(HF))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model(path).table.checkpoint_shapes()
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors")
    done = run_with_sglang("-m", "tests.extras.lora.lora_engine", str(path), "--publish-adapters", SERVED)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"weights": len(weights)}


def test_sglang_computes_with_unpinned_adapters_what_merged_weights_do(
    report: dict[str, Any],
) -> None:
    """Removes the need for a GPU (`lora.served_on_cpu`). One batch then uses two adapters of different scales and none,
    and every projection is that of merged weights."""
    assert report["pinned"]["file"] == "layers.py", report
    assert report["distance"] <= 1e-5 < 0.1 < report["effect"], report


def test_adapters_are_published_with_their_base_then_alone_and_verified(report: dict[str, Any]) -> None:
    """Checks that each policy's publication writes its slot only, and verifies the base and every slot. Requests
    without an adapter get the first policy's; another policy cannot publish another base."""
    refusals = ["receiver.no_adapters", "receiver.no_base", "receiver.policy", "receiver.other_base"]
    assert report["refused"] == refusals
    assert report["attested"] == {"rank": 4, "scales": {"first": 2.0, "second": 0.5}}
    counts = {}
    kinds = ("whole", "alone", "whole, with others", "again")
    for how in kinds:
        assert report[how]["distance"] <= 1e-5 < 0.1 < report[how]["effect"], report
        assert report[how]["kept"]
        proof = report[how]["proof"]
        assert not proof["differ"] and not proof["missing"]
        counts[how] = proof["tensors"]
    few = 2 * sum(FUSED.values())
    assert counts == dict(zip(kinds, 2 * [report["weights"] + few, few], strict=True))
    up = "model.layers.0.mlp.up_proj"
    adapter = f"base_model.model.{up}.lora_B.weight"
    wrong = [adapter, f"second:{adapter}", f"{up}.weight"]
    assert [set(differ) for differ in report["spoilt"]] == [set(wrong[:count]) for count in (1, 2, 3)]


@pytest.mark.parametrize(
    ("policies", "named", "rid", "taken"),
    [
        ({"actor": 8.0}, None, "r", True),
        ({"actor": 8.0}, "judge", "r", False),
        ({"actor": 8.0, "judge": 8.0}, "judge", "r", True),
        ({"actor": 8.0, "judge": 8.0}, None, "r", False),
        ({"actor": 8.0, "judge": 8.0}, None, "HEALTH_CHECK_1", True),
    ],
)
def test_requests_to_several_policies_name_theirs(
    policies: dict[str, float], named: str | None, rid: str, taken: bool
) -> None:
    """Refuses unnamed requests, which would silently use another policy, and unknown names, which would crash SGLang's
    scheduler."""
    with contextlib.nullcontext() if taken else pytest.raises(ValueError, match=", ".join(policies)):
        ServedLora(policies).check_request(SimpleNamespace(lora_id=named, rid=rid))
